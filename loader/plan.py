"""The plan of a block: entries of a pool in batches, micro-steps and steps, for every rank.

A plan is a pure function of (lengths, shard sizes, options, seed, epoch). It is never saved.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

import numpy as np
from numpy.typing import NDArray

from loader.block import BlockPlan, PlannedBatch, apply_skip, describe
from loader.deal import Batches, Layout, deal
from loader.keys import Purpose, derive_key, hash_ids
from loader.lane_tail import plan_lane_tail
from loader.options import EpochOptions, PlanOptions
from loader.packed import cut_packed, deal_packed, row_cost
from loader.pool import Corpus, EpochPlanner, Pool
from loader.ragged import longest_in, ragged
from loader.tail import TailSteps, plan_packed_tail, plan_tail
from loader.windows import Cuts, Rows, cut
from shardgen.errors import UserError

__all__ = [
    "BlockPlan",
    "Corpus",
    "EpochOptions",
    "EpochPlanner",
    "PlanOptions",
    "PlannedBatch",
    "Pool",
    "apply_skip",
    "plan_block",
]


def plan_block(
    corpus: Corpus,
    pool: Pool,
    options: PlanOptions,
    epoch_options: EpochOptions,
    epoch: int,
    *,
    resumed: bool = False,
) -> BlockPlan:
    """Plan every entry of a pool, exactly once.

    Args:
        corpus: Lengths and loss tokens.
        pool: What to deliver.
        options: What may change between steps.
        epoch_options: What is fixed within the epoch.
        epoch: Number of the epoch, from 0.
        resumed: Whether the pool is what an interrupted block left: then fewer entries than ranks are
            filled up instead of refused.

    Raises:
        UserError: A sample fits no batch, there are fewer entries than ranks, or fillers are refused.
    """
    if len(pool) < options.world_size and not resumed:
        raise UserError(
            f"{len(pool)} samples in a block cannot feed {options.world_size} ranks: use at most {len(pool)} "
            f"ranks, or a larger block_samples where there is more data"
        )
    return _Round(corpus, pool, options, epoch_options, epoch, resumed=resumed).plan()


# Lanes are left with unequal amounts; over a few more steps the difference is small.
_LANE_STEPS_BACK = 4


class _Round:
    """The pool's arrays, and the rounds that empty it."""

    def __init__(
        self,
        corpus: Corpus,
        pool: Pool,
        options: PlanOptions,
        epoch_options: EpochOptions,
        epoch: int,
        *,
        resumed: bool,
    ) -> None:
        self.corpus, self.pool, self.options, self.epoch_options = corpus, pool, options, epoch_options
        self.budget, self.cost = options.budget(), options.cost_model()
        self.packed = options.layout == "packed"
        self.static = options.padding == "boundary"
        self.length = np.asarray(corpus.lengths[pool.ids], np.int64)
        num_canonical = epoch_options.num_canonical_nodes
        if not resumed and options.batches_per_step % num_canonical:
            raise UserError(
                f"num_canonical_nodes {num_canonical} does not divide the {options.batches_per_step} batches "
                f"of a step ({options.world_size} ranks x {options.accumulate}): use a divisor of that"
            )
        num_lanes = gcd(num_canonical, options.batches_per_step)
        self.layout = Layout(
            world_size=options.world_size, accumulate=options.accumulate, num_lanes=num_lanes
        )
        self.lane = pool.lanes.astype(np.int64) * num_lanes // num_canonical
        self.shuffle = epoch_options.shuffle
        self.epoch = epoch if self.shuffle else 0
        if self.shuffle:
            key = derive_key(epoch_options.seed, Purpose.ROW, epoch)
            self.hash = hash_ids(pool.ids, key, pool.copies)
        else:  # monotone in the entry: windows are then runs of the stored order
            step = np.uint64(((1 << 64) - 1) // max(1, len(pool)))
            self.hash = np.arange(len(pool), dtype=np.uint64) * step
        self._fit_buckets()

    def _fit_buckets(self) -> None:
        upper = np.array(self.options.boundaries[1:], np.int64)
        longest = int(self.length.max(initial=1))
        if longest > upper[-1]:
            at = int(self.length.argmax())
            raise UserError(
                f"sample {int(self.pool.ids[at])} has {longest} tokens, above the last boundary "
                f"{int(upper[-1])}: raise it"
            )
        bucket_at = np.searchsorted(upper, np.arange(longest + 1))
        self.bucket = bucket_at[self.length]
        shaped = upper[bucket_at] if self.static else np.arange(longest + 1)
        self.capacity_at = self.budget.max_rows(shaped)
        self.padded_at = self.budget.padded_length(shaped)
        over = self.capacity_at[self.length] < 1
        if over.any():
            at = int(np.where(over, self.length, 0).argmax())
            what = f" (padded to {int(self.padded_at[self.length[at]])})"
            raise UserError(
                f"sample {int(self.pool.ids[at])} has {int(self.length[at])} tokens{what} and fits no batch "
                f"of token_budget {self.options.token_budget}"
                + (f", cost_budget {self.options.cost_budget}" if self.options.cost_budget else "")
                + f" ({int(over.sum())} samples are too long): raise the budget or leave them out with skip="
            )
        # Cuts fall in length: the capacity may not rise with it.
        self.capacity_at[0] = max(self.capacity_at[0], self.capacity_at[min(1, longest)])

    def plan(self) -> BlockPlan:
        left = np.arange(len(self.pool))
        rows: list[NDArray[np.int64]] = []  # one part per round
        sizes: list[NDArray[np.int64]] = []  # (S, A, R) each
        while len(left):
            placed = self._round(left)
            if placed is None:
                break
            part, size = placed
            rows.append(part)
            sizes.append(size)
            gone = np.zeros(len(self.pool), bool)
            gone[part] = True
            left = left[~gone[left]]
        if len(left) and rows:  # full steps are taken back, so that the tail can be spread evenly
            steps = min(1 if self.layout.num_groups == 1 else _LANE_STEPS_BACK, len(sizes[-1]))
            num_back = int(sizes[-1][-steps:].sum())
            left = np.sort(np.concatenate((left, rows[-1][len(rows[-1]) - num_back :])))
            rows[-1], sizes[-1] = rows[-1][: len(rows[-1]) - num_back], sizes[-1][:-steps]
        return self._assemble(rows, sizes, self._tail(left) if len(left) else None)

    def _round(self, left: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Full steps from the rows that are left: rows batch by batch, and sizes (S, A, R)."""
        length, hashes = self.length[left], self.hash[left]
        if self.packed:
            rows = Rows(length=length, hash=hashes, group=self.lane[left], shuffled=self.shuffle)
            cuts = cut_packed(rows, self.options, self.options.lookahead)
        else:
            group = self.lane[left] * (len(self.options.boundaries) - 1) + self.bucket[left]
            rows = Rows(length=length, hash=hashes, group=group, shuffled=self.shuffle)
            # Sorting inside a static shape would change nothing but the companions.
            cuts = cut(rows, self.capacity_at, 1 if self.static else self.options.lookahead)
        if not len(cuts.start):
            return None
        dealt = self._deal(rows, cuts, left)
        if dealt is None:
            return None
        batch, size = dealt
        index = ragged(cuts.start[batch.ravel()], size.ravel())
        return left[cuts.order[index]], size

    def _deal(
        self, rows: Rows, cuts: Cuts, left: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        first = cuts.order[cuts.start]
        key, lane, num_rows = rows.hash[first], self.lane[left][first], cuts.stop - cuts.start
        ordered = rows.length[cuts.order]
        if self.packed:
            total = np.concatenate(([0], np.cumsum(row_cost(ordered, self.options))))
            dealt = deal_packed(num_rows, total[cuts.stop] - total[cuts.start], lane, key, self.layout)
        else:
            longest = self.padded_at[longest_in(ordered, cuts.start, cuts.stop)]
            dealt = deal(
                Batches(num_rows=num_rows, padded_length=longest, lane=lane, key=key),
                self.layout,
                self.cost,
                budget=self.options.token_budget,
                seed=derive_key(self.epoch_options.seed, Purpose.BATCH, self.epoch),
                level=not self.static,
            )
        return None if dealt is None else (dealt.batch, dealt.num_rows)

    def _tail(self, left: NDArray[np.int64]) -> TailSteps:
        tail, num_groups = None, self.layout.num_groups
        if num_groups > 1:
            group = self.lane[left] * num_groups // self.layout.num_lanes
            tail = plan_lane_tail(
                group,
                num_groups,
                lambda rows, *args: self._tail_of(left[rows], *args),
                lambda rows, num_rows: self._cost_of(left[rows], num_rows),
                self.options,
            )
        tail = tail or self._tail_of(left, self.options, None)
        return replace(tail, rows=left[tail.rows])

    def _tail_of(self, left: NDArray[np.int64], options: PlanOptions, num_batches: int | None) -> TailSteps:
        length, hashes = self.length[left], self.hash[left]
        if self.packed:
            return plan_packed_tail(length, row_cost(length, options), hashes, options, num_batches)
        padded, bucket = self.padded_at[length], self.bucket[left]
        return plan_tail(padded, bucket, hashes, self._rows_within, options, num_batches)

    def _cost_of(self, rows: NDArray[np.int64], num_rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Scaled cost of batches that hold these rows one after another, none empty."""
        start = np.cumsum(num_rows) - num_rows
        if self.packed:
            return np.add.reduceat(row_cost(self.length[rows], self.options), start)
        longest = longest_in(self.padded_at[self.length[rows]], start, start + num_rows)
        return self.cost.scaled(num_rows, longest)

    def _rows_within(self, padded: NDArray[np.int64], limit: int | None) -> NDArray[np.int64]:
        """Rows of a batch by its padded length, under a scaled cost limit too, but at least one."""
        rows = self.budget.max_rows(padded)
        if limit is not None:
            per_row = self.cost.scaled(1, padded) - self.cost.scaled(0, padded)
            rows = np.minimum(rows, (limit - self.cost.overhead_tokens * self.cost.scale) // per_row)
        return np.maximum(rows, 1)

    def _assemble(
        self, rows: list[NDArray[np.int64]], sizes: list[NDArray[np.int64]], tail: TailSteps | None
    ) -> BlockPlan:
        """Shuffle the full steps, put the tail last, and describe every batch."""
        per_step = self.options.batches_per_step
        step_sizes = np.concatenate(
            [np.zeros((0, per_step), np.int64), *(s.reshape(-1, per_step) for s in sizes)]
        )
        all_rows = np.concatenate(rows) if rows else np.zeros(0, np.int64)
        num_full = len(step_sizes)
        if num_full:
            in_step = step_sizes.sum(axis=1)
            start = np.cumsum(in_step) - in_step
            if self.shuffle:
                key = derive_key(self.epoch_options.seed, Purpose.STEP, self.epoch)
                order = np.argsort(hash_ids(np.arange(num_full), key), kind="stable")
            else:
                order = np.argsort(np.minimum.reduceat(all_rows, start), kind="stable")
            all_rows, step_sizes = all_rows[ragged(start[order], in_step[order])], step_sizes[order]
        batch_rows = step_sizes.ravel()
        micro_steps = np.full(num_full, self.options.accumulate, np.int64)
        if tail is not None:
            all_rows = np.concatenate((all_rows, tail.rows))
            batch_rows = np.concatenate((batch_rows, tail.num_rows))
            micro_steps = np.concatenate((micro_steps, tail.micro_steps))
        return describe(
            self.corpus,
            self.options,
            rows=all_rows,
            sample_ids=self.pool.ids[all_rows],
            batch_start=np.concatenate(([0], np.cumsum(batch_rows))),
            step_start=np.concatenate(([0], np.cumsum(micro_steps))),
        )
