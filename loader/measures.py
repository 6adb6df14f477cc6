"""How good a plan is: the definitions behind every figure that we print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.block import BlockPlan
from loader.options import PlanOptions
from loader.pool import Corpus

NUM_LENGTH_BINS = 16


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Figures of one epoch.

    Attributes:
        padding_efficiency: Real tokens over padded tokens, fillers counted as padding.
        rank_balance: Sum over micro-steps of the mean cost over ranks, over that of the largest cost.
        num_batches: Batches of all ranks.
        num_steps: Optimizer steps.
        step_divergence: Mean total-variation distance between a step's token-weighted histogram of lengths
            (16 bins of equal token mass over the corpus) and the corpus's.
        fillers: Batches that deliver nothing.
        num_shapes: Distinct tensor shapes.
    """

    padding_efficiency: float
    rank_balance: float
    num_batches: int
    num_steps: int
    step_divergence: float
    fillers: int
    num_shapes: int

    @property
    def overall(self) -> float:
        """Padding efficiency times rank balance: the part of the ranks' time spent on real tokens."""
        return self.padding_efficiency * self.rank_balance


def batch_cost(plan: BlockPlan, corpus: Corpus, options: PlanOptions) -> NDArray[np.float64]:
    """Token-equivalents of every batch, 0 for a filler, shape (num_micro_steps, world_size)."""
    model = options.cost_model()
    if options.layout == "packed":
        lengths = corpus.lengths[plan.sample_ids]
        rows = np.concatenate(([0.0], np.cumsum(model.cost(1, lengths) - model.overhead_tokens)))
        cost = np.asarray(np.diff(rows[plan.batch_start]) + model.overhead_tokens, np.float64)
    else:
        cost = model.cost(plan.batch_num_rows, plan.batch_padded_length)
    cost[plan.batch_filler >= 0] = 0.0
    return cost.reshape(plan.num_micro_steps, plan.world_size)


def length_bins(lengths: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Upper bounds of the bins of equal token mass, the last left out, shape (NUM_LENGTH_BINS - 1,)."""
    counts = np.bincount(lengths)
    mass = np.cumsum(counts * np.arange(len(counts)), dtype=np.float64)
    wanted = mass[-1] * np.arange(1, NUM_LENGTH_BINS) / NUM_LENGTH_BINS
    bins: NDArray[np.int64] = np.searchsorted(mass, wanted)
    return bins


def step_histograms(
    plan: BlockPlan, lengths: NDArray[np.integer[Any]], bins: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Share of each step's tokens in every length bin, shape (num_steps, len(bins) + 1).

    Args:
        plan: The steps.
        lengths: Tokens by sample id, shape (N,).
        bins: Upper bounds of the bins, the last left out, ascending.
    """
    length, num_bins = lengths[plan.sample_ids], len(bins) + 1
    step_row = plan.batch_start[plan.step_start * plan.world_size]
    step = np.repeat(np.arange(plan.num_steps), np.diff(step_row))
    cell = step * num_bins + np.searchsorted(bins, length)
    tokens = np.bincount(cell, weights=length, minlength=plan.num_steps * num_bins)
    tokens = tokens.reshape(plan.num_steps, num_bins)
    return np.asarray(tokens / np.maximum(tokens.sum(axis=1, keepdims=True), 1))


def assess(plans: Sequence[BlockPlan], corpus: Corpus, options: PlanOptions) -> Quality:
    """Figures of an epoch from the plans of its blocks.

    Args:
        plans: All blocks of one epoch.
        corpus: Lengths by sample id.
        options: What the plans were made with.
    """
    bins = length_bins(corpus.lengths)
    whole = np.bincount(
        np.searchsorted(bins, corpus.lengths), weights=corpus.lengths, minlength=NUM_LENGTH_BINS
    )
    cost = np.concatenate([batch_cost(plan, corpus, options) for plan in plans])
    rows = np.concatenate([plan.batch_num_rows for plan in plans])
    padded_length = np.concatenate([plan.batch_padded_length for plan in plans])
    steps = np.concatenate([step_histograms(plan, corpus.lengths, bins) for plan in plans])
    return Quality(
        padding_efficiency=sum(int(p.step_num_tokens.sum()) for p in plans)
        / int((rows * padded_length).sum()),
        rank_balance=float(cost.mean(axis=1).sum() / cost.max(axis=1).sum()),
        num_batches=len(rows),
        num_steps=sum(plan.num_steps for plan in plans),
        step_divergence=float(np.abs(steps - whole / whole.sum()).sum(axis=1).mean() / 2),
        fillers=sum(plan.num_fillers for plan in plans),
        num_shapes=len(np.unique(rows * (int(padded_length.max()) + 1) + padded_length)),
    )


def recurrence(first: Sequence[BlockPlan], second: Sequence[BlockPlan], num_samples: int) -> float:
    """Of the pairs that share a batch in one epoch, the share that meets again in another.

    Args:
        first: Plans of the one; each sample is delivered at most once.
        second: Plans of the other.
        num_samples: Samples of the corpus.
    """
    batches = []
    for plans in (first, second):
        batch_of = np.full(num_samples, -1, np.int64)
        offset = 0
        for plan in plans:
            size = np.diff(plan.batch_start)
            batch_of[plan.sample_ids] = np.repeat(np.arange(len(size)) + offset, size)
            offset += len(size)
        batches.append(batch_of)
    one, two = batches
    meetings = np.bincount(one[one >= 0])
    num_pairs = int((meetings * (meetings - 1) // 2).sum())
    both = (one >= 0) & (two >= 0)
    again = np.unique(one[both] * (int(two.max(initial=0)) + 1) + two[both], return_counts=True)[1]
    return int((again * (again - 1) // 2).sum()) / num_pairs if num_pairs else 0.0
