"""Units of work: a run of source rows, where their samples go, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen.formats import SourceFile


@dataclass(frozen=True, kw_only=True)
class Task:
    """Some consecutive partitions of one file. R rows, N samples in source order.

    Attributes:
        number: Number of the task.
        source: The file.
        first_partition: First partition to read.
        last_partition: One past the last.
        first_row: Row of the file that comes first.
        row_lengths: Tokens of each row from the first pass, -1 where null, int32, shape (R,).
        row_bytes: Bytes that a row takes once decoded, about, int64, shape (R,).
        row_items: Values or bytes of each measured column per row, int64, shape (R,).
        rows: Row of each sample inside the task, int64, shape (N,).
        starts: First token of each sample inside its row, int64, shape (N,).
        lengths: Tokens of each sample, int64, shape (N,).
        shards: Shard of each sample, int64, shape (N,).
        offsets: Byte of each sample inside its shard, int64, shape (N,).
        sizes: Encoded bytes of each sample, int64, shape (N,).
        shard_paths: Path of each shard that the task writes to, inside the directory of the build.
    """

    number: int
    source: SourceFile
    first_partition: int
    last_partition: int
    first_row: int
    row_lengths: NDArray[np.int32]
    row_bytes: NDArray[np.int64]
    row_items: Mapping[str, NDArray[np.int64]]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    shards: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    shard_paths: Mapping[int, str]


@dataclass(frozen=True, kw_only=True)
class Fragments:
    """Runs of bytes written to shards.

    Attributes:
        shards: Shard of each run, int64, shape (F,).
        offsets: First byte inside the shard, int64, shape (F,).
        num_bytes: Bytes, int64, shape (F,).
        hashes: xxh3_64 of the bytes, uint64, shape (F,).
    """

    shards: NDArray[np.int64]
    offsets: NDArray[np.int64]
    num_bytes: NDArray[np.int64]
    hashes: NDArray[np.uint64]

    def of_shard(self, shard: int) -> Fragments:
        """Those of one shard."""
        return self.take(np.flatnonzero(self.shards == shard))

    def take(self, chosen: NDArray[np.int64]) -> Fragments:
        return Fragments(
            shards=self.shards[chosen],
            offsets=self.offsets[chosen],
            num_bytes=self.num_bytes[chosen],
            hashes=self.hashes[chosen],
        )

    @classmethod
    def join(cls, parts: list[Fragments]) -> Fragments:
        """All runs of several tasks."""
        return cls(
            shards=np.concatenate([np.zeros(0, np.int64), *(p.shards for p in parts)]),
            offsets=np.concatenate([np.zeros(0, np.int64), *(p.offsets for p in parts)]),
            num_bytes=np.concatenate([np.zeros(0, np.int64), *(p.num_bytes for p in parts)]),
            hashes=np.concatenate([np.zeros(0, np.uint64), *(p.hashes for p in parts)]),
        )


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What a task did.

    Attributes:
        number: Number of the task.
        fragments: Where it wrote.
        loss_tokens: Tokens with a loss of each of its samples, int32, shape (N,), empty without a mask.
        first_token_loss: Whether a sample's first token has a loss, bool, shape (N,), empty without a mask.
    """

    number: int
    fragments: Fragments
    loss_tokens: NDArray[np.int32]
    first_token_loss: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """A finished shard.

    Attributes:
        entry: Its entry in ``index.json``.
        content_hash: Hash of the shard before compression, for the fingerprint.
    """

    entry: dict[str, Any]
    content_hash: str
