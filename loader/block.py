"""The planned steps of a block, and what each rank reads from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.options import PlanOptions
from loader.pool import Corpus
from loader.ragged import longest_in


@dataclass(frozen=True, kw_only=True)
class PlannedBatch:
    """What one rank gets for one forward pass.

    Attributes:
        step: Step in the block.
        micro_step: Micro-step in the step.
        num_micro_steps: Micro-steps of the step.
        bucket: Bucket of the plan's boundaries; -1 when packed.
        filler: Whether the batch is there only to keep ranks in step: no sample is delivered.
        sample_ids: Delivered samples, int64, shape (rows,); of a filler: the one to show without labels.
        padded_length: Tokens of each row of the tensor; the sum of lengths when packed.
        num_rows: Rows of the tensor; with static shapes it may exceed the samples.
        step_num_tokens: Real tokens of all batches of the step.
        step_num_loss_tokens: Those that count in the loss.
    """

    step: int
    micro_step: int
    num_micro_steps: int
    bucket: int
    filler: bool
    sample_ids: NDArray[np.int64]
    padded_length: int
    num_rows: int
    step_num_tokens: int
    step_num_loss_tokens: int


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """All steps of a block. Batch b = micro-step x world size + rank, micro-steps counted over the block.

    Attributes:
        rows: Positions in the pool in delivery order, int64, shape (M,).
        sample_ids: Their samples, int64, shape (M,).
        batch_start: First row of each batch with M appended, int64, shape (B + 1,).
        batch_bucket: Bucket of each batch, int64, shape (B,); -1 when packed.
        batch_padded_length: Tokens of each row of its tensor, int64, shape (B,).
        batch_num_rows: Rows of its tensor, int64, shape (B,).
        batch_filler: -1, or the sample that a filler shows, int64, shape (B,).
        step_start: First micro-step of each step with their number appended, int64, shape (S + 1,).
        step_num_tokens: Real tokens of each step over all ranks, int64, shape (S,).
        step_num_loss_tokens: Those that count in the loss, int64, shape (S,).
        world_size: Batches of a micro-step.
    """

    rows: NDArray[np.int64]
    sample_ids: NDArray[np.int64]
    batch_start: NDArray[np.int64]
    batch_bucket: NDArray[np.int64]
    batch_padded_length: NDArray[np.int64]
    batch_num_rows: NDArray[np.int64]
    batch_filler: NDArray[np.int64]
    step_start: NDArray[np.int64]
    step_num_tokens: NDArray[np.int64]
    step_num_loss_tokens: NDArray[np.int64]
    world_size: int

    @property
    def num_steps(self) -> int:
        return len(self.step_start) - 1

    @property
    def num_micro_steps(self) -> int:
        return int(self.step_start[-1])

    @property
    def num_fillers(self) -> int:
        return int((self.batch_filler >= 0).sum())

    def num_rows_before_step(self, step: int) -> int:
        """Entries delivered, over all ranks, by the first ``step`` steps: ``rows[:n]`` are these."""
        return int(self.batch_start[self.step_start[step] * self.world_size])

    def batch(self, step: int, micro_step: int, rank: int) -> PlannedBatch:
        """One rank's batch.

        Args:
            step: 0..num_steps - 1.
            micro_step: In the step.
            rank: 0..world_size - 1.
        """
        first, stop = self.step_start[step : step + 2].tolist()
        if not 0 <= micro_step < stop - first or not 0 <= rank < self.world_size:
            raise IndexError(f"step {step} has {stop - first} micro-steps of {self.world_size} ranks")
        b = (first + micro_step) * self.world_size + rank
        filler = int(self.batch_filler[b])
        ids = self.sample_ids[self.batch_start[b] : self.batch_start[b + 1]]
        return PlannedBatch(
            step=step,
            micro_step=micro_step,
            num_micro_steps=stop - first,
            bucket=int(self.batch_bucket[b]),
            filler=filler >= 0,
            sample_ids=ids if filler < 0 else np.array([filler], np.int64),
            padded_length=int(self.batch_padded_length[b]),
            num_rows=int(self.batch_num_rows[b]),
            step_num_tokens=int(self.step_num_tokens[step]),
            step_num_loss_tokens=int(self.step_num_loss_tokens[step]),
        )


def describe(
    corpus: Corpus,
    options: PlanOptions,
    *,
    rows: NDArray[np.int64],
    sample_ids: NDArray[np.int64],
    batch_start: NDArray[np.int64],
    step_start: NDArray[np.int64],
    spare: NDArray[np.int64] | None = None,
) -> BlockPlan:
    """Derive everything about batches and steps from where the rows are.

    Args:
        corpus: Lengths and loss tokens.
        options: The plan's options.
        rows: See :class:`BlockPlan`, as the next three.
        sample_ids: int64, shape (M,).
        batch_start: An empty batch becomes a filler, int64, shape (B + 1,).
        step_start: int64, shape (S + 1,).
        spare: Samples that a filler may show when no row is left at all.
    """
    length = np.asarray(corpus.lengths[sample_ids], np.int64)
    world_size = options.world_size
    step_row = batch_start[step_start * world_size]
    num_real = np.diff(batch_start)
    filler = np.full(len(num_real), -1, np.int64)
    shown = np.zeros(len(num_real), np.int64)  # length that decides the shape of a batch
    real = num_real > 0
    shown[real] = longest_in(length, batch_start[:-1][real], batch_start[1:][real])
    for b in np.flatnonzero(~real).tolist():
        step = int(np.searchsorted(step_start, b // world_size, side="right")) - 1
        begin, end = step_row[step : step + 2].tolist()
        if begin == end:
            begin, end = 0, len(rows)
        candidates = sample_ids[begin:end]
        if not len(candidates):
            assert spare is not None
            candidates = spare
        filler[b] = candidates[int(corpus.lengths[candidates].argmin())]
        shown[b] = corpus.lengths[filler[b]]

    upper = np.array(options.boundaries[1:], np.int64)
    budget = options.budget()
    bucket = np.searchsorted(upper, shown)
    num_rows = np.maximum(num_real, 1)
    tokens_before = np.concatenate(([0], np.cumsum(length)))
    if options.layout == "packed":
        bucket = np.full(len(bucket), -1, np.int64)
        padded = np.where(real, np.diff(tokens_before[batch_start]), shown)
        num_rows = np.ones_like(num_rows)
    elif options.padding == "boundary":
        padded, num_rows = budget.padded_length(upper[bucket]), budget.max_rows(upper[bucket])
    else:
        padded = budget.padded_length(shown)
    step_tokens = np.diff(tokens_before[step_row])
    step_loss_tokens = step_tokens
    if corpus.loss_tokens is not None:
        loss_before = np.concatenate(([0], np.cumsum(corpus.loss_tokens[sample_ids], dtype=np.int64)))
        step_loss_tokens = np.diff(loss_before[step_row])
    return BlockPlan(
        rows=rows,
        sample_ids=sample_ids,
        batch_start=batch_start,
        batch_bucket=bucket,
        batch_padded_length=padded,
        batch_num_rows=num_rows,
        batch_filler=filler,
        step_start=step_start,
        step_num_tokens=step_tokens,
        step_num_loss_tokens=step_loss_tokens,
        world_size=world_size,
    )


def apply_skip(plan: BlockPlan, corpus: Corpus, options: PlanOptions, skip: NDArray[np.int64]) -> BlockPlan:
    """The same plan without some samples: all other rows, batches and steps keep their place.

    An emptied batch becomes a filler; token counts exclude what is skipped.

    Args:
        plan: The plan.
        corpus: Lengths and loss tokens.
        options: The plan's options.
        skip: Sample ids, int64, shape (K,).
    """
    keep = ~np.isin(plan.sample_ids, skip)
    if keep.all():
        return plan
    kept_before = np.concatenate(([0], np.cumsum(keep)))
    return describe(
        corpus,
        options,
        rows=plan.rows[keep],
        sample_ids=plan.sample_ids[keep],
        batch_start=kept_before[plan.batch_start],
        step_start=plan.step_start,
        spare=plan.sample_ids,
    )
