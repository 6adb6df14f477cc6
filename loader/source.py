"""Where shards come from: finding, downloading, decompressing and evicting files through upstream.

Together with ``dataset.py`` this is all that touches private parts of MosaicML Streaming 0.13. Its own
coordination between processes (shared memory segments, lock files, barriers) is replaced by
:mod:`loader.cache`: it leaks when a process is killed, collides when processes start together, and waits
without a limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import time_ns
from typing import Any

import numpy as np
from streaming import Stream, StreamingDataset
from streaming.base.dataset import _ShardState
from streaming.base.format import Reader, reader_from_json
from streaming.base.spanner import Spanner
from streaming.base.util import bytes_to_int
from streaming.base.world import World as StreamingWorld

from loader.cache import CacheMarker, ShardTable, deadline, process_alive, runtime_root
from loader.world import World
from shardgen.errors import UserError
from shardgen.manifest import MANIFEST, Manifest

INDEX = "index.json"
SAMPLES = "samples.parquet"
REMOTE, PREPARING, LOCAL = (int(s) for s in (_ShardState.REMOTE, _ShardState.PREPARING, _ShardState.LOCAL))
# Our unfinished downloads, and what boto3 makes of their names.
_PART = re.compile(r"\.(\d+)-\d+\.part")
_NEVER = np.iinfo(np.uint64).max


class DownloadError(OSError):
    """A file could not be had from the remote."""


class AtomicStream(Stream):
    """A stream whose files appear whole or not at all, whatever the backend and whenever it is killed."""

    def _download_file(self, from_basename: str, to_basename: str | None = None) -> str:
        final = os.path.join(self.local, self.split, to_basename or from_basename)
        part = f"{to_basename or from_basename}.{os.getpid()}-{threading.get_ident()}.part"
        part_path = os.path.join(self.local, self.split, part)
        try:
            super()._download_file(from_basename, part)
            os.replace(part_path, final)
        except Exception as error:
            raise DownloadError(
                f"{from_basename} could not be downloaded from {self.remote} in {self.download_retry} "
                "attempts: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            Path(part_path).unlink(missing_ok=True)
        return final

    def _decompress_shard_part(
        self, zip_info: Any, zip_filename: str, raw_filename: str, compression: str | None
    ) -> None:
        part = f"{raw_filename}.{os.getpid()}-{threading.get_ident()}.part"
        try:
            super()._decompress_shard_part(zip_info, zip_filename, part, compression)
            os.replace(part, raw_filename)
        finally:
            for leftover in (part, part + ".tmp"):
                Path(leftover).unlink(missing_ok=True)


def _plain_path(remote: str | None) -> str | None:
    # Upstream knows local directories by path alone.
    return remote[len("file://") :] if remote and remote.startswith("file://") else remote


class ShardSource(StreamingDataset):
    """The storage half of a dataset: stock attributes and ``dataset[i]``, without upstream's constructor.

    Args:
        world: This process among the ranks.
        local: Directory of the dataset, or of its local copy.
        remote: Where to download from; ``None`` or the same directory: nothing is downloaded, and nothing
            under ``local`` is ever written or deleted.
        split: Subdirectory of both.
        download_retry: Attempts of each download.
        download_timeout: Seconds for each attempt.
        validate_hash: Hash algorithm to check downloads with.
        keep_zip: Keep the compressed form after decompressing.
        cache_limit: Most bytes under ``local``, such as ``"10gb"``; needs a remote.
        cache_dir: Where shards are decompressed to when there is no remote.
    """

    def __init__(
        self,
        *,
        world: World,
        local: str | None,
        remote: str | None,
        split: str | None,
        download_retry: int,
        download_timeout: float,
        validate_hash: str | None,
        keep_zip: bool,
        cache_limit: int | str | None,
        cache_dir: str | None,
    ) -> None:
        if not local and not remote:
            raise UserError("give local= (a built directory), or remote= and local= (its cache)")
        if download_retry < 1:
            raise UserError(f"download_retry {download_retry} is below 1: it counts the attempts")
        remote = _plain_path(os.fspath(remote)) if remote else None
        local = os.fspath(local) if local else None
        if remote and local and os.path.realpath(remote) == os.path.realpath(local):
            remote = None
        if remote and not local:
            local = cache_dir or str(self._default_cache(os.path.join(remote, split or "")))
        assert local is not None
        if cache_limit and not remote:
            raise UserError(
                f"cache_limit {cache_limit} without a remote would delete the only copy in {local}: "
                "give remote=, or leave cache_limit out"
            )
        self.batch_size = None
        self.predownload = None
        self.shuffle_algo = None
        self.allow_unsafe_types = False
        self.cache_limit = bytes_to_int(cache_limit) if cache_limit else None
        self.replication = world.replication if world.replication > 1 else None
        self._source_world = world
        per_node = world.ranks_per_node if world.num_ranks % world.ranks_per_node == 0 else world.num_ranks
        self._unique_rank_world = StreamingWorld(world.num_ranks // per_node, per_node, 1, world.rank)
        self._parallel_rank_world = (
            self._unique_rank_world.replicate(world.replication)
            if world.replication > 1
            else self._unique_rank_world.copy()
        )
        stream_options: dict[str, Any] = {
            "split": split,
            "download_retry": download_retry,
            "download_timeout": download_timeout,
            "validate_hash": validate_hash,
            "keep_zip": keep_zip,
        }
        stream = AtomicStream(remote=remote, local=local, **stream_options)
        self.home = os.path.join(local, split or "")
        self._marker = CacheMarker(self.home) if remote else None
        if remote is None:
            self.manifest = Manifest.load(self.home)
        else:
            self._fetch(stream, MANIFEST)
            self.manifest = Manifest.load(self.home)
        index = self._read_index(stream)
        compressed = any(info.get("zip_data") for info in index)
        if remote is None and compressed and not self._all_raw(index):
            # Decompressed copies must not be written beside the only originals, so these play the remote.
            cache = cache_dir or str(self._default_cache(os.path.realpath(self.home)))
            stream = AtomicStream(remote=local, local=cache, **stream_options)
            self._marker = CacheMarker(os.path.join(cache, split or ""))
        self._set_streams(stream, index)
        self._set_table()

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release the cache when the block raises."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Say that this dataset no longer uses its cache; others then may, with other limits."""
        if getattr(self, "_marker", None) is not None:
            self._marker.close()  # type: ignore[union-attr]

    def _default_cache(self, identity: str) -> Path:
        key = hashlib.blake2b(identity.encode(), digest_size=10).hexdigest()
        return runtime_root() / f"cache-{key}"

    # --- small files --------------------------------------------------------------------------------

    def _fetch(self, stream: Stream, basename: str) -> str:
        """Path of a small file, downloaded by one process while the others wait."""
        path = os.path.join(self.home, basename)
        if self._marker is None or os.path.exists(path):
            return path
        self._marker.fetch.seconds = self._patience(stream)
        with self._marker.fetch:
            if not os.path.exists(path):
                try:
                    stream._download_file(basename)
                    if hasattr(self, "_table"):
                        with self._marker.lock:
                            self.cache_usage += os.path.getsize(path)
                except DownloadError as error:
                    if basename == MANIFEST:
                        raise UserError(
                            f"{stream.remote} is not a dataset, or cannot be reached: no {MANIFEST} ({error})"
                        ) from error
                    raise
        return path

    def _patience(self, stream: Stream) -> float:
        # Upstream waits 1, 2, 4... s between attempts.
        attempts = stream.download_retry
        return float(attempts * stream.download_timeout + 2**attempts + 30)

    def _read_index(self, stream: Stream) -> list[dict[str, Any]]:
        path = self._fetch(stream, INDEX)
        try:
            index = json.loads(Path(path).read_bytes())
            shards = index["shards"]
        except FileNotFoundError:
            raise UserError(
                f"{path} is missing although there is a {MANIFEST}: build the dataset again"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read: {error}; build the dataset again") from error
        expected = sum(bucket.num_shards for bucket in self.manifest.buckets)
        if len(shards) != expected or sum(s["samples"] for s in shards) != self.manifest.num_samples:
            raise UserError(
                f"{path} lists {len(shards)} shards but {MANIFEST} counts {expected} with "
                f"{self.manifest.num_samples} samples: they are of different builds"
            )
        return list(shards)

    def samples_path(self, directory: str) -> str:
        """Path of a bucket's ``samples.parquet``."""
        return self._fetch(self.streams[0], os.path.join(directory, SAMPLES))

    # --- stock attributes ---------------------------------------------------------------------------

    def _set_streams(self, stream: Stream, index: list[dict[str, Any]]) -> None:
        self.streams = [stream]
        self.num_streams = 1
        self.shards: list[Reader] = []
        for info in index:
            shard = reader_from_json(stream.local, stream.split, info)
            shard.validate(False)
            self.shards.append(shard)
        self.num_shards = len(self.shards)
        self.samples_per_shard = np.array([shard.samples for shard in self.shards], np.int64)
        self.num_samples = int(self.samples_per_shard.sum())
        if not self.num_samples:
            raise UserError(f"{self.home} holds no samples")
        self.sample_offset_per_shard = self.samples_per_shard.cumsum() - self.samples_per_shard
        self.spanner = Spanner(self.samples_per_shard)
        self.stream_per_shard = np.zeros(self.num_shards, np.int64)
        self.shard_offset_per_stream = np.zeros(1, np.int64)
        self.shards_per_stream = np.array([self.num_shards], np.int64)
        self.sample_offset_per_stream = np.zeros(1, np.int64)
        self.samples_per_stream = np.array([self.num_samples], np.int64)
        self.epoch_size = self.num_samples
        self.length = -(-self.num_samples // self._parallel_rank_world.num_ranks)

    def raw_path(self, shard_id: int) -> str:
        """Where a shard's raw file is, or will be."""
        stream = self.streams[0]
        return os.path.join(stream.local, stream.split, self.shards[shard_id].file_pairs[0][0].basename)

    def _all_raw(self, index: Iterable[dict[str, Any]]) -> bool:
        return all(os.path.isfile(os.path.join(self.home, info["raw_data"]["basename"])) for info in index)

    def small_bytes(self) -> int:
        """Bytes of the small files, which always stay."""
        return sum(
            os.path.getsize(os.path.join(directory, name))
            for directory, _, names in os.walk(self.home)
            for name in names
            if name in (INDEX, SAMPLES, MANIFEST)
        )

    # --- shard states -------------------------------------------------------------------------------

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
                self._marker, self.num_shards, self.cache_limit or 0, self._look_at_disk
            )
        # The names by which upstream's own methods find them.
        self._shard_states = self._table.states
        self._shard_access_times = self._table.access_times
        self._cache_usage = self._table.usage

    def _look_at_disk(self, table: ShardTable) -> None:
        """Fill the table from the files that are there, and remove what a killed download left."""
        stream = self.streams[0]
        root = os.path.join(stream.local, stream.split)
        sizes: dict[str, int] = {}
        for directory, _, names in os.walk(root):
            for name in names:
                path = os.path.join(directory, name)
                part = _PART.search(name)
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
                "dataset again, "
                "or give remote="
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
                    "one shard "
                    f"beside {self.cache_usage} bytes in use: raise it"
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

    # --- copies -------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_table", "_shard_states", "_shard_access_times", "_cache_usage"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._set_table()

    def __del__(self) -> None:
        # Upstream's destructor zeroes a live segment when a pickled copy goes; we have none.
        pass
