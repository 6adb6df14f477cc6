"""State, owner and last use of every shard, in memory that all users of a cache share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.cache import CacheMarker
from shardgen.errors import UserError

_HEAD = np.dtype([("magic", "<u8"), ("num_shards", "<i8"), ("usage", "<i8"), ("limit", "<i8")])
_MAGIC = 0x5348_4152_4447_3031


class Values:
    """A one-dimensional array with the access methods of upstream's shared arrays."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def numpy(self) -> NDArray[Any]:
        return self._array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return self._array[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._array[index] = value


class Scalar:
    """One value with the access methods of upstream's shared scalars."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def get(self) -> int:
        return int(self._array[0])

    def set(self, value: int) -> None:
        self._array[0] = value


class ShardTable:
    """State, owner and last access of each shard, and the bytes in use.

    Attributes:
        states: Upstream's shard states, uint8, shape (num_shards,).
        access_times: Nanoseconds of the last use, uint64, shape (num_shards,).
        owners: Process that prepares a shard, int64, shape (num_shards,).
        usage: Bytes in the cache.
    """

    def __init__(self, buffer: Any, num_shards: int) -> None:
        at = _HEAD.itemsize
        self._head = np.frombuffer(buffer, _HEAD, 1)
        self.access_times = Values(np.frombuffer(buffer, np.uint64, num_shards, at))
        self.owners = np.frombuffer(buffer, np.int64, num_shards, at + 8 * num_shards)
        self.states = Values(np.frombuffer(buffer, np.uint8, num_shards, at + 16 * num_shards))
        self.usage = Scalar(self._head["usage"])

    @staticmethod
    def num_bytes(num_shards: int) -> int:
        return _HEAD.itemsize + 17 * num_shards

    @classmethod
    def private(cls, num_shards: int) -> ShardTable:
        """A table of this process alone, all zero."""
        return cls(bytearray(cls.num_bytes(num_shards)), num_shards)

    @classmethod
    def shared(
        cls, marker: CacheMarker, num_shards: int, limit: int, fill: Callable[[ShardTable], None]
    ) -> ShardTable:
        """The table of all users of a cache.

        Args:
            marker: Of the cache.
            num_shards: Shards of the dataset.
            limit: Cache limit in bytes, 0 for none.
            fill: Called under the lock when this process is the first, to look at the disk.

        Raises:
            UserError: Another user of the same directory has another dataset or limit.
        """
        path = marker.directory / "states"
        with marker.lock:
            first = not path.exists()
            if first:
                # Not seen by others before it is filled: they wait for the lock.
                path.write_bytes(bytes(cls.num_bytes(num_shards)))
            with open(path, "r+b") as file:
                same = os.fstat(file.fileno()).st_size == cls.num_bytes(num_shards)
                table = cls(mmap.mmap(file.fileno(), 0), num_shards) if same else None
            if table is not None and first:
                try:
                    fill(table)
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise
                table._head[0] = (_MAGIC, num_shards, table.usage.get(), limit)
        if table is None or int(table._head["magic"][0]) != _MAGIC:
            raise UserError(
                f"{marker.local} is in use as the cache of another dataset: give this one its own local="
            )
        if int(table._head["limit"][0]) != limit:
            raise UserError(
                f"{marker.local} is in use with cache_limit {int(table._head['limit'][0]) or None}, not "
                f"{limit or None}: use the same limit, or another local="
            )
        return table
