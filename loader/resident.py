"""Which shards are on the disk: preparing, waiting for others, evicting, taking over from the dead."""

from __future__ import annotations

import os
from pathlib import Path
from time import time_ns
from typing import Any

import numpy as np
from streaming import Stream, StreamingDataset
from streaming.base.dataset import _ShardState

from loader.built import SAMPLES
from loader.cache import CacheMarker, deadline, process_alive
from loader.stream import PART, DownloadError
from loader.table import ShardTable
from shardgen.errors import UserError
from shardgen.manifest import MANIFEST

INDEX = "index.json"
REMOTE, PREPARING, LOCAL = (int(s) for s in (_ShardState.REMOTE, _ShardState.PREPARING, _ShardState.LOCAL))
_NEVER = np.iinfo(np.uint64).max


class ResidentShards(StreamingDataset):
    """Upstream's shard states, kept by :mod:`loader.cache` instead of its shared memory."""

    home: str
    _marker: CacheMarker | None

    def _patience(self, stream: Stream) -> float:
        # Upstream waits 1, 2, 4... s between attempts.
        attempts = stream.download_retry
        return float(attempts * stream.download_timeout + 2**attempts + 30)

    def raw_path(self, shard_id: int) -> str:
        """Where a shard's raw file is, or will be."""
        stream = self.streams[0]
        return os.path.join(stream.local, stream.split, self.shards[shard_id].file_pairs[0][0].basename)

    @property
    def is_shared(self) -> bool:
        """Whether shards are downloaded or decompressed into a cache."""
        return self._marker is not None

    def _set_table(self) -> None:
        if self._marker is None:
            self._table = ShardTable.private(self.num_shards)
            self._table.states[:] = LOCAL
        else:
            self._table = ShardTable.shared(
                self._marker, self.num_shards, int(self.cache_limit or 0), self._look_at_disk
            )
        # The names by which upstream's own methods find them.
        self._shard_states: Any = self._table.states
        self._shard_access_times: Any = self._table.access_times
        self._cache_usage: Any = self._table.usage

    def _look_at_disk(self, table: ShardTable) -> None:
        """Fill the table from the files that are there, and remove what a killed download left."""
        stream = self.streams[0]
        root = os.path.join(stream.local, stream.split)
        sizes: dict[str, int] = {}
        for directory, _, names in os.walk(root):
            for name in names:
                path = os.path.join(directory, name)
                part = PART.search(name)
                if part and not process_alive(int(part[1])):
                    Path(path).unlink(missing_ok=True)
                elif not part:
                    sizes[path] = os.path.getsize(path)
        usage = sum(size for path, size in sizes.items() if path.endswith((INDEX, SAMPLES, MANIFEST)))
        now = time_ns()
        for shard_id, shard in enumerate(self.shards):
            present = 0
            for info in shard.file_pairs[0]:
                path = os.path.join(root, info.basename) if info else ""
                size = sizes.get(path)
                if info is None or size is None:
                    continue
                if size == info.bytes:
                    present += size
                else:
                    Path(path).unlink(missing_ok=True)
            table.states[shard_id] = LOCAL if present else REMOTE
            table.access_times[shard_id] = now if present else _NEVER
            usage += present
        table.usage.set(usage)

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Make a shard's raw file present; another process may be at it.

        Args:
            shard_id: Shard number.
            blocking: Wait when another process prepares it, or return.

        Raises:
            DownloadError: The remote does not give it.
            TimeoutError: Another process takes longer than all its attempts may take.
            UserError: There is no remote and the file is missing.
        """
        shard_id = int(shard_id)
        if self._is_ready(shard_id):
            return
        if self._marker is None:
            raise UserError(
                f"{self.raw_path(shard_id)} is missing and there is no remote to get it from: build the "
                "dataset again, or give remote="
            )
        name = self.shards[shard_id].file_pairs[0][0].basename
        with deadline(self._patience(self.streams[0]), f"another process to prepare {name}") as wait:
            while not self._claim(shard_id):
                if self._is_ready(shard_id) or not blocking:
                    return
                wait()
        self._prepare_claimed(shard_id)

    def _is_ready(self, shard_id: int) -> bool:
        if self._shard_states[shard_id] != LOCAL or not os.path.isfile(self.raw_path(shard_id)):
            return False
        self._shard_access_times[shard_id] = time_ns()
        return True

    def _claim(self, shard_id: int) -> bool:
        """Become the one who prepares a shard; whether that was possible now."""
        assert self._marker is not None
        table = self._table
        with self._marker.lock:
            state = int(table.states[shard_id])
            if state == PREPARING:
                if process_alive(int(table.owners[shard_id])):
                    return False
                self._forget_files(shard_id)  # a dead owner: whatever it left is not accounted for
                table.states[shard_id] = REMOTE
            if state == LOCAL and os.path.isfile(self.raw_path(shard_id)):
                return False
            if self.cache_limit and not self._make_space(shard_id):
                return False
            table.states[shard_id] = PREPARING
            table.owners[shard_id] = os.getpid()
            return True

    def _make_space(self, shard_id: int) -> bool:
        """Evict the coldest shards until one more fits, with room for those under way."""
        table, limit = self._table, self.cache_limit
        under_way = np.flatnonzero(table.states.numpy() == PREPARING)
        needed = sum(self.shards[s].get_max_size() for s in [*under_way.tolist(), shard_id])
        while self.cache_usage + needed > limit:
            times = np.where(table.states.numpy() == LOCAL, table.access_times.numpy(), _NEVER)
            if shard_id < len(times):
                times[shard_id] = _NEVER
            coldest = int(times.argmin())
            if times[coldest] == _NEVER:
                if len(under_way):
                    return False  # others will be done, then there is something to evict
                raise UserError(
                    f"cache_limit {limit} has no room for {self.shards[shard_id].get_max_size()} bytes of "
                    f"one shard beside {self.cache_usage} bytes in use: raise it"
                )
            self._evict_shard(coldest)
        return True

    def _prepare_claimed(self, shard_id: int) -> None:
        assert self._marker is not None
        table, stream, shard = self._table, self.streams[0], self.shards[shard_id]
        try:
            delta = stream.prepare_shard(shard)
            raw = shard.file_pairs[0][0]
            size = os.path.getsize(self.raw_path(shard_id))
            if size != raw.bytes:
                raise DownloadError(
                    f"{raw.basename} from {stream.remote} has {size} bytes, its index says {raw.bytes}: "
                    "the remote holds a truncated or another file"
                )
        except BaseException as error:
            with self._marker.lock:
                self._forget_files(shard_id)
                table.states[shard_id] = REMOTE
            if isinstance(error, DownloadError) or not isinstance(error, Exception):
                raise
            raise DownloadError(
                f"{shard.file_pairs[0][0].basename} from {stream.remote} cannot be used: "
                f"{type(error).__name__}: {error}"
            ) from error
        with self._marker.lock:
            table.usage.set(table.usage.get() + delta)
            table.access_times[shard_id] = time_ns()
            table.states[shard_id] = LOCAL

    def _forget_files(self, shard_id: int) -> None:
        """Delete a shard's files in the cache, where they are copies; the caller holds the lock."""
        self.shards[shard_id].evict()

    def evict_shard(self, shard_id: int) -> None:
        """Delete a shard's local copy.

        Raises:
            UserError: It is no copy.
        """
        if self._marker is None:
            raise UserError(
                f"{self.raw_path(shard_id)} is the only copy: nothing is evicted without a remote"
            )
        with self._marker.lock:
            self._evict_shard(int(shard_id))

    def evict_coldest_shard(self) -> None:
        """Delete the local copy of the shard used longest ago; errors as in :meth:`evict_shard`."""
        if self._marker is None:
            raise UserError(f"{self.home} is the only copy: nothing is evicted without a remote")
        with self._marker.lock:
            self._evict_coldest_shard()
