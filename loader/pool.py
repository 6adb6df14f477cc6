"""Which entries an epoch delivers, and in which block and lane each of them lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.keys import Purpose, derive_key, hash_ids
from loader.options import EpochOptions
from shardgen.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All that a planner knows of a data set.

    Attributes:
        lengths: Tokens by sample id, positive integers, shape (N,).
        loss_tokens: Tokens that count in the loss by sample id, shape (N,); ``None``: all of them.
        shard_sizes: Per built bucket the samples of each of its shards, in order; they sum up to N.
    """

    lengths: NDArray[np.integer[Any]]
    loss_tokens: NDArray[np.integer[Any]] | None = None
    shard_sizes: tuple[NDArray[np.int64], ...]

    def __post_init__(self) -> None:
        total = sum(int(sizes.sum()) for sizes in self.shard_sizes)
        if total != len(self.lengths):
            raise UserError(f"shards hold {total} samples but there are {len(self.lengths)} lengths")

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    @cached_property
    def bucket_start(self) -> NDArray[np.int64]:
        """First sample id of every built bucket, with N appended, shape (num_buckets + 1,)."""
        return np.cumsum([0, *(int(sizes.sum()) for sizes in self.shard_sizes)])


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Entries to deliver.

    Attributes:
        ids: Sample ids, int64, shape (M,).
        copies: Which copy of the sample, int32, shape (M,).
        lanes: Lane among ``num_canonical_nodes``, int32, shape (M,).
    """

    ids: NDArray[np.int64]
    copies: NDArray[np.int32]
    lanes: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ids)

    def without(self, rows: NDArray[np.int64]) -> Pool:
        """What is left when the entries at positions ``rows`` are gone; the others keep their order."""
        keep = np.ones(len(self.ids), bool)
        keep[rows] = False
        return Pool(ids=self.ids[keep], copies=self.copies[keep], lanes=self.lanes[keep])


class EpochPlanner:
    """Deals the shards of one epoch to blocks and lanes; any block can be had without the others."""

    def __init__(self, corpus: Corpus, options: EpochOptions, epoch: int) -> None:
        """Remember what the epoch depends on.

        Args:
            corpus: Lengths and shards.
            options: What is fixed within the epoch.
            epoch: Number of the epoch, from 0.

        Raises:
            UserError: ``buckets`` or ``weights`` do not fit the corpus, or nothing is left to deliver.
        """
        self.corpus, self.options, self.epoch = corpus, options, epoch
        num_buckets = len(corpus.shard_sizes)
        chosen = options.buckets if options.buckets is not None else tuple(range(num_buckets))
        bad = [k for k in chosen if not 0 <= k < num_buckets]
        if bad:
            raise UserError(f"bucket {bad[0]} does not exist: the data set has buckets 0..{num_buckets - 1}")
        if options.weights is not None and len(options.weights) != num_buckets:
            raise UserError(f"{len(options.weights)} weights for {num_buckets} buckets: give one for each")
        weights = options.weights or (1.0,) * num_buckets
        self._weights = tuple(float(w) if k in chosen else 0.0 for k, w in enumerate(weights))
        sizes = np.diff(corpus.bucket_start)
        # Rounded once per bucket, half up: these are the exact counts that the blocks add up to.
        self.bucket_entries = tuple(
            floor(w * int(n) + 0.5) for w, n in zip(self._weights, sizes, strict=True)
        )
        self.num_entries = sum(self.bucket_entries)
        if self.num_entries == 0:
            raise UserError("the epoch is empty: buckets= and weights= leave no sample")
        self.num_blocks = -(-self.num_entries // options.block_samples)

    @cached_property
    def _segments(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
        """Per bucket: keyed order of its shards, and every segment's bounds as (shard, sample in shard).

        A bucket's samples in that order are cut at equal tokens into one segment per lane and block, inside
        a shard if need be, so that no block lacks a bucket.
        """
        options = self.options
        num_segments = options.num_canonical_nodes * self.num_blocks
        first_shard = 0
        result = []
        for bucket, sizes in enumerate(self.corpus.shard_sizes):
            shards = np.arange(len(sizes))
            if options.shuffle:
                key = derive_key(options.seed, Purpose.SHARD, self.epoch)
                shards = np.argsort(hash_ids(shards + first_shard, key), kind="stable")
            first_shard += len(sizes)
            start = self.corpus.bucket_start[bucket] + np.cumsum(sizes) - sizes
            if self._weights[bucket] == 0 or len(sizes) == 0:
                result.append((shards, start, np.zeros((num_segments + 1, 2), np.int64)))
                continue
            if num_segments == 1:
                bounds = np.array([[0, 0], [len(shards), 0]], np.int64)
            else:
                bounds = self._cut_at_equal_tokens(shards, start, sizes, num_segments)
            result.append((shards, start, bounds))
        return result

    def _cut_at_equal_tokens(
        self, shards: NDArray[np.int64], start: NDArray[np.int64], sizes: NDArray[np.int64], pieces: int
    ) -> NDArray[np.int64]:
        lengths = self.corpus.lengths
        begin, end = int(start[0]), int(start[-1] + sizes[-1])
        tokens = np.add.reduceat(lengths[begin:end], start - begin, dtype=np.int64)[shards]
        total = np.concatenate(([0], np.cumsum(tokens)))
        bounds = np.zeros((pieces + 1, 2), np.int64)
        for piece in range(1, pieces):
            target = int(total[-1]) * piece // pieces
            at = int(np.searchsorted(total, target, side="right")) - 1
            shard = shards[at]
            inside = np.cumsum(lengths[start[shard] : start[shard] + sizes[shard]], dtype=np.int64)
            bounds[piece] = at, np.searchsorted(inside, target - int(total[at]), side="right")
        bounds[pieces] = len(shards), 0
        return bounds

    def pool(self, block: int) -> Pool:
        """Entries of one block, by lane, bucket and keyed shard.

        Args:
            block: 0..num_blocks - 1.
        """
        if not 0 <= block < self.num_blocks:
            raise UserError(f"block {block} does not exist: the epoch has blocks 0..{self.num_blocks - 1}")
        ids, copies, lanes = [], [], []
        for lane in range(self.options.num_canonical_nodes):
            for bucket in range(len(self._segments)):
                members, number = self._segment(bucket, lane * self.num_blocks + block)
                ids.append(members)
                copies.append(number)
                lanes.append(np.full(len(members), lane, np.int32))
        return Pool(ids=np.concatenate(ids), copies=np.concatenate(copies), lanes=np.concatenate(lanes))

    def _segment(self, bucket: int, segment: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        shards, start, bounds = self._segments[bucket]
        weight = self._weights[bucket]
        (first, skip), (last, keep) = bounds[segment].tolist(), bounds[segment + 1].tolist()
        if weight == 0 or (first, skip) == (last, keep):
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        sizes = self.corpus.shard_sizes[bucket]
        parts = []
        for at in range(first, min(last + 1, len(shards))):
            shard = shards[at]
            begin = start[shard] + (skip if at == first else 0)
            end = start[shard] + (keep if at == last else sizes[shard])
            parts.append(np.arange(begin, end))
        members = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        if weight == 1:
            return members, np.zeros(len(members), np.int32)
        before = int(sizes[shards[:first]].sum()) + skip
        return self._weighted(members, weight, before)

    def _weighted(
        self, members: NDArray[np.int64], weight: float, before: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """``floor(weight)`` copies of each, one more of those with the lowest hash, exact over the bucket."""
        quota = floor(weight * (before + len(members)) + 0.5) - floor(weight * before + 0.5)
        whole = quota // len(members) if len(members) else 0
        key = derive_key(self.options.seed, Purpose.WEIGHT, self.epoch if self.options.shuffle else 0)
        rank = np.empty(len(members), np.int64)
        rank[np.argsort(hash_ids(members, key), kind="stable")] = np.arange(len(members))
        number = whole + (rank < quota - whole * len(members))
        ids = np.repeat(members, number)
        copies = np.arange(len(ids)) - np.repeat(np.cumsum(number) - number, number)
        return ids, copies.astype(np.int32)
