"""What an epoch would look like: the loader beside the strategies that people use today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.block import BlockPlan, describe
from loader.keys import Purpose, derive_key, hash_ids
from loader.measures import Quality, assess, recurrence
from loader.options import EpochOptions, PlanOptions
from loader.plan import plan_block
from loader.pool import Corpus, EpochPlanner
from shardgen.batching import cut_in_order
from shardgen.buckets import assign
from shardgen.errors import UserError

# What a token and a sample take of a shard with int32 tokens: offset, size and shape beside the tokens.
_BYTES_PER_TOKEN = 4
_BYTES_PER_SAMPLE = 13


def corpus_of_lengths(
    lengths: NDArray[np.integer[Any]], boundaries: Sequence[int], shard_bytes: int = 1 << 26
) -> Corpus:
    """The data set that a build would make of bare lengths: buckets in order, shards of ``shard_bytes``.

    Args:
        lengths: Tokens by source row, shape (N,).
        boundaries: Bucket boundaries, 0 first.
        shard_bytes: Size limit of a shard.
    """
    bucket = assign(lengths, boundaries)
    ordered = np.asarray(lengths)[np.argsort(bucket, kind="stable")]
    start = 0
    sizes = []
    for count in np.bincount(bucket, minlength=len(boundaries) - 1).tolist():
        taken = ordered[start : start + count]
        shard = np.cumsum(taken.astype(np.int64) * _BYTES_PER_TOKEN + _BYTES_PER_SAMPLE) // shard_bytes
        sizes.append(np.bincount(np.unique(shard, return_inverse=True)[1]).astype(np.int64))
        start += count
    return Corpus(lengths=ordered, shard_sizes=tuple(sizes))


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """One strategy's figures.

    Attributes:
        quality: Of epoch 0.
        recurrence: Pairs of epoch 0 that meet again in epoch 1.
        dropped: Entries of the pool that epoch 0 does not deliver.
        repeated: Deliveries of epoch 0 beyond the pool.
        plan_seconds: Time to plan epoch 0.
    """

    quality: Quality
    recurrence: float
    dropped: int
    repeated: int
    plan_seconds: float

    def to_json(self) -> dict[str, float | int]:
        q = self.quality
        return {
            "padding_efficiency": q.padding_efficiency,
            "rank_balance": q.rank_balance,
            "overall": q.overall,
            "num_batches": q.num_batches,
            "num_steps": q.num_steps,
            "recurrence": self.recurrence,
            "step_divergence": q.step_divergence,
            "dropped": self.dropped,
            "repeated": self.repeated,
            "fillers": q.fillers,
            "num_shapes": q.num_shapes,
            "plan_seconds": self.plan_seconds,
        }


_Epoch = Callable[[Corpus, PlanOptions, EpochOptions, int], list[BlockPlan]]


def _loader(corpus: Corpus, options: PlanOptions, epoch_options: EpochOptions, epoch: int) -> list[BlockPlan]:
    planner = EpochPlanner(corpus, epoch_options, epoch)
    return [
        plan_block(corpus, planner.pool(block), options, epoch_options, epoch, resumed=block > 0)
        for block in range(planner.num_blocks)
    ]


def _dealt(
    corpus: Corpus,
    options: PlanOptions,
    seed: int,
    epoch: int,
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    *,
    shuffle_batches: bool,
) -> list[BlockPlan]:
    """Batches handed to ranks one after the other; ranks idle where the last micro-step lacks batches."""
    sizes = np.diff(starts)
    if shuffle_batches:
        key = derive_key(seed, Purpose.BATCH, epoch)
        turn = np.argsort(hash_ids(np.arange(len(sizes)), key))
        order = np.concatenate([order[starts[b] : starts[b + 1]] for b in turn.tolist()])
        sizes = sizes[turn]
    missing = -len(sizes) % options.world_size
    sizes = np.concatenate((sizes, np.zeros(missing, np.int64)))
    micro_steps = len(sizes) // options.world_size
    step_start = np.append(np.arange(0, micro_steps, options.accumulate), micro_steps)
    return [
        describe(
            corpus,
            options,
            rows=order,
            sample_ids=order,
            batch_start=np.concatenate(([0], np.cumsum(sizes))),
            step_start=step_start,
        )
    ]


def _one_bucket(corpus: Corpus, options: PlanOptions) -> PlanOptions:
    return replace(options, boundaries=(0, int(corpus.lengths.max())))


def _row_hash(corpus: Corpus, epoch_options: EpochOptions, epoch: int) -> NDArray[np.uint64]:
    return hash_ids(np.arange(corpus.num_samples), derive_key(epoch_options.seed, Purpose.ROW, epoch))


def _sorted_static(
    corpus: Corpus, options: PlanOptions, epoch_options: EpochOptions, epoch: int
) -> list[BlockPlan]:
    """Batches of like length, the same in every epoch; only their order changes."""
    order = np.argsort(corpus.lengths, kind="stable")[::-1]
    starts = cut_in_order(corpus.lengths[order], options.budget())
    one = _one_bucket(corpus, options)
    return _dealt(corpus, one, epoch_options.seed, epoch, order, starts, shuffle_batches=True)


def _full_shuffle(
    corpus: Corpus, options: PlanOptions, epoch_options: EpochOptions, epoch: int
) -> list[BlockPlan]:
    order = np.argsort(_row_hash(corpus, epoch_options, epoch), kind="stable")
    starts = cut_in_order(corpus.lengths[order], options.budget())
    one = _one_bucket(corpus, options)
    return _dealt(corpus, one, epoch_options.seed, epoch, order, starts, shuffle_batches=False)


def _bucket_shuffle(
    corpus: Corpus, options: PlanOptions, epoch_options: EpochOptions, epoch: int
) -> list[BlockPlan]:
    """Shuffled inside each bucket, cut, and dealt at random."""
    order, starts, begin = [], [np.zeros(1, np.int64)], 0
    bucket = assign(corpus.lengths, options.boundaries)
    hashes = _row_hash(corpus, epoch_options, epoch)
    for k in range(len(options.boundaries) - 1):
        members = np.flatnonzero(bucket == k)
        members = members[np.argsort(hashes[members], kind="stable")]
        order.append(members)
        starts.append(cut_in_order(corpus.lengths[members], options.budget())[1:] + begin)
        begin += len(members)
    return _dealt(
        corpus,
        options,
        epoch_options.seed,
        epoch,
        np.concatenate(order),
        np.concatenate(starts),
        shuffle_batches=True,
    )


def _pool_counts(corpus: Corpus, epoch_options: EpochOptions) -> NDArray[np.int64]:
    """How often the pool of epoch 0 holds each sample; not once only with ``buckets`` or ``weights``."""
    planner = EpochPlanner(corpus, epoch_options, 0)
    ids = np.concatenate([planner.pool(block).ids for block in range(planner.num_blocks)])
    return np.bincount(ids, minlength=corpus.num_samples)


STRATEGIES: dict[str, _Epoch] = {
    "sorted-static": _sorted_static,
    "full-shuffle": _full_shuffle,
    "bucket-shuffle": _bucket_shuffle,
    "loader": _loader,
}


def strategy_options(options: PlanOptions, strategy: str) -> PlanOptions:
    """The options that a strategy heeds: layout and padding are the loader's alone."""
    if strategy not in STRATEGIES:
        raise UserError(f"strategy {strategy!r} is not one of {', '.join(STRATEGIES)}")
    if strategy == "loader":
        return options
    return replace(options, layout="padded", padding="longest", tail="fill")


def plan_epoch(
    corpus: Corpus, options: PlanOptions, epoch_options: EpochOptions, strategy: str, epoch: int
) -> list[BlockPlan]:
    """The plans of an epoch's blocks under a strategy; arguments and errors as in :func:`simulate`."""
    options = strategy_options(options, strategy)
    return STRATEGIES[strategy](corpus, options, epoch_options, epoch)


def simulate(corpus: Corpus, options: PlanOptions, epoch_options: EpochOptions, strategy: str) -> Simulated:
    """Plan two epochs under a strategy and measure them.

    Args:
        corpus: Lengths and shards.
        options: Budget, boundaries, ranks; layout and padding apply to ``loader`` only.
        epoch_options: Seed, blocks and lanes.
        strategy: A key of :data:`STRATEGIES`; ``"loader"`` runs the loader's own code.

    Raises:
        UserError: An unknown strategy, or options that no plan can keep.
    """
    options = strategy_options(options, strategy)
    began = perf_counter()
    first = plan_epoch(corpus, options, epoch_options, strategy, 0)
    seconds = perf_counter() - began
    second = plan_epoch(corpus, options, epoch_options, strategy, 1)
    times = np.bincount(np.concatenate([p.sample_ids for p in first]), minlength=corpus.num_samples)
    due = (
        np.ones(corpus.num_samples, np.int64) if strategy != "loader" else _pool_counts(corpus, epoch_options)
    )
    return Simulated(
        quality=assess(first, corpus, options),
        recurrence=recurrence(first, second, corpus.num_samples),
        dropped=int((due - times).clip(min=0).sum()),
        repeated=int((times - due).clip(min=0).sum()),
        plan_seconds=seconds,
    )
