"""Where a dataset's files come from, and the attributes that a stock dataset has.

``dataset.py``, this file, ``resident.py`` and ``stream.py`` are all of the loader that knows MosaicML
Streaming 0.13 and touches private parts of it. Its own
coordination between processes (shared memory segments, lock files, barriers) is replaced by
:mod:`loader.cache`: it leaks when a process is killed, collides when processes start together, and waits
without a limit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from streaming import Stream
from streaming.base.format import Reader, reader_from_json
from streaming.base.spanner import Spanner
from streaming.base.util import bytes_to_int
from streaming.base.world import World as StreamingWorld

from loader.built import SAMPLES
from loader.cache import CacheMarker, runtime_root
from loader.resident import INDEX, LOCAL, PREPARING, REMOTE, ResidentShards
from loader.stream import AtomicStream, DownloadError
from loader.world import World
from shardgen.errors import UserError
from shardgen.manifest import MANIFEST, Manifest


def _plain_path(remote: str | None) -> str | None:
    # Upstream knows local directories by path alone.
    return remote[len("file://") :] if remote and remote.startswith("file://") else remote


class ShardSource(ResidentShards):
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
        self.shuffle_algo: Any = None
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


__all__ = ["INDEX", "LOCAL", "PREPARING", "REMOTE", "DownloadError", "ShardSource"]
