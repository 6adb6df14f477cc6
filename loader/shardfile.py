"""One raw MDS file: what the index says of it, and its map once that has proved true."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen.errors import UserError


class ShardNotFound(UserError, FileNotFoundError):
    """A shard's file is not there: never downloaded, or evicted since."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a shard, in stored order.

    Attributes:
        names: Column names.
        encodings: MDS encodings, such as ``ndarray:uint16``.
        sizes: Bytes of each value; ``None`` where they vary.
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.encodings) == len(self.sizes):
            raise UserError(
                f"{len(self.names)} column names, {len(self.encodings)} encodings, {len(self.sizes)} sizes: "
                "the index is damaged; build the set again"
            )

    def number(self, name: str) -> int:
        """Number of a column.

        Raises:
            UserError: There is no such column.
        """
        if name not in self.names:
            raise UserError(f"no column {name!r}: the shards store {', '.join(self.names)}")
        return self.names.index(name)


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """What the index says of one shard.

    Attributes:
        basename: File name relative to the dataset, without a compression's suffix.
        num_samples: Samples in the shard.
        raw_bytes: Size of the uncompressed file.
        columns: What each sample holds.
    """

    basename: str
    num_samples: int
    raw_bytes: int
    columns: Columns

    def __post_init__(self) -> None:
        if self.num_samples < 0 or self.raw_bytes < 0:
            raise UserError(f"shard {self.basename}: {self.num_samples} samples in {self.raw_bytes} bytes")

    @staticmethod
    def from_index(index: Mapping[str, Any]) -> tuple[ShardInfo, ...]:
        """The shards of an ``index.json``, in order.

        Args:
            index: The parsed file: ``{"version": 2, "shards": [...]}``.

        Raises:
            UserError: It is not an index of MDS shards.
        """
        found: list[ShardInfo] = []
        shared: dict[Columns, Columns] = {}
        try:
            for entry in index["shards"]:
                if entry["format"] != "mds" or entry["version"] != 2:
                    raise UserError(
                        f"shard format {entry['format']!r} version {entry['version']}: "
                        "only mds version 2 is read"
                    )
                columns = Columns(
                    names=tuple(entry["column_names"]),
                    encodings=tuple(entry["column_encodings"]),
                    sizes=tuple(entry["column_sizes"]),
                )
                found.append(
                    ShardInfo(
                        basename=entry["raw_data"]["basename"],
                        num_samples=int(entry["samples"]),
                        raw_bytes=int(entry["raw_data"]["bytes"]),
                        columns=shared.setdefault(columns, columns),
                    )
                )
        except (KeyError, TypeError) as error:
            raise UserError(f"index.json is damaged ({error!r}): download or build the set again") from error
        return tuple(found)


def _map_file(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        if sys.version_info >= (3, 13):
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, trackfd=False)
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class MappedShard:
    """One mapped file. Views of it keep the map alive, so it is never closed, only let go."""

    __slots__ = ("data", "info", "offsets", "view")

    def __init__(self, info: ShardInfo, path: str, first_sample: int) -> None:
        self.info = info
        name = f"shard {info.basename}"
        way_out = "delete the local copy to fetch it again, or run `shardgen verify`"
        try:
            num_bytes = os.stat(path).st_size
            if num_bytes == 0:
                raise UserError(f"{name}: bytes 0:{info.raw_bytes} are missing, {path} is empty: {way_out}")
            self.view = memoryview(_map_file(path))
        except FileNotFoundError as error:
            raise ShardNotFound(f"{name}: there is no {path}: download or build it again") from error
        except OSError as error:
            raise UserError(f"{name}: cannot read {path}: {error.strerror}") from error
        self.data: NDArray[np.uint8] = np.frombuffer(self.view, np.uint8)  # (bytes,)
        num_samples = info.num_samples
        header = 4 * (num_samples + 2)
        if num_bytes < header:
            raise UserError(
                f"{name}: bytes {num_bytes}:{info.raw_bytes} are missing, among them the offsets of its "
                f"{num_samples} samples: {way_out}"
            )
        stored = int(np.frombuffer(self.view, "<u4", 1)[0])
        if stored != num_samples:
            raise UserError(
                f"{name}: bytes 0:4 say {stored} samples, the index says {num_samples}: another file; "
                f"{way_out}"
            )
        # (n + 1,) byte offsets of the samples, the last is the end of the file
        self.offsets: NDArray[np.uint32] = np.frombuffer(self.view, "<u4", num_samples + 1, 4)
        falls = np.flatnonzero(self.offsets[1:] <= self.offsets[:-1])
        if len(falls) or self.offsets[0] < header:
            row = int(falls[0]) if len(falls) else 0
            low, high = self.offsets[row : row + 2].tolist() if num_samples else (int(self.offsets[0]),) * 2
            raise UserError(
                f"{name}: sample {first_sample + row} would be bytes {low}:{high}, bytes {4 + 4 * row}:"
                f"{12 + 4 * row} of the offsets are damaged; {way_out}"
            )
        if not int(self.offsets[-1]) == num_bytes == info.raw_bytes:
            end = min(num_bytes, int(self.offsets[-1]), info.raw_bytes)
            row = min(int(np.searchsorted(self.offsets[1:], end, side="right")), max(num_samples - 1, 0))
            low, high = self.offsets[row : row + 2].tolist() if num_samples else (int(self.offsets[0]),) * 2
            raise UserError(
                f"{name}: has {num_bytes} bytes, its offsets end at {int(self.offsets[-1])}, the index says "
                f"{info.raw_bytes}; sample {first_sample + row} at bytes {low}:{high} is the first in doubt; "
                f"{way_out}"
            )
        end = int(self.offsets[0])
        try:
            config = json.loads(bytes(self.view[header:end]))
            columns = Columns(
                names=tuple(config["column_names"]),
                encodings=tuple(config["column_encodings"]),
                sizes=tuple(config["column_sizes"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{name}: bytes {header}:{end} do not describe its columns ({error}): {way_out}"
            ) from error
        if columns != info.columns:
            raise UserError(
                f"{name}: bytes {header}:{end} say {columns}, the index says {info.columns}: {way_out}"
            )
