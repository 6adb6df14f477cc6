"""Where and when samples are delivered: plans looked up by place, and by sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.options import PlanOptions
from loader.plan import PlannedBatch
from loader.state import ResumeState
from loader.walk import BlockRun, Plans
from shardgen.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps of one plan.

    Attributes:
        run: The plan.
        first: First step of the plan that counts.
        stop: Step after the last.
    """

    run: BlockRun
    first: int
    stop: int

    @property
    def first_step(self) -> int:
        """Step of the epoch with which it begins."""
        return self.run.first_step + self.first


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """When and where a sample is delivered.

    Attributes:
        epoch: Epoch.
        block: Block of the epoch.
        step: Step of the epoch.
        micro_step: In the step.
        rank: Data-parallel rank.
        row: Row of the batch.
    """

    epoch: int
    block: int
    step: int
    micro_step: int
    rank: int
    row: int


def stretches(plans: Plans, epoch: int, options: PlanOptions, state: ResumeState | None) -> Iterator[Stretch]:
    """All steps of an epoch in order, as far as they can be told.

    Args:
        plans: Of the dataset.
        epoch: Epoch.
        options: What plans new blocks, and what is left after the state.
        state: A position in this epoch: what was done before it is told by its segments, but only in its
            block; with a position in another epoch, or ``None``, ``options`` plan the whole epoch.
    """
    start = plans.at(epoch)
    if state is not None and state.epoch == epoch:
        start = state
        for run in plans.finished(state)[0]:
            yield Stretch(run=run, first=0, stop=run.start)
    for run in plans.runs(start, options):
        yield Stretch(run=run, first=run.start, stop=run.plan.num_steps)


def find_batch(
    plans: Plans,
    options: PlanOptions,
    *,
    epoch: int,
    step: int,
    micro_step: int,
    rank: int,
    state: ResumeState | None = None,
) -> tuple[PlannedBatch, BlockRun]:
    """The batch that a rank gets, and the plan it is from.

    Args:
        plans: Of the dataset.
        options: See :func:`stretches`.
        epoch: Epoch.
        step: Step of the epoch.
        micro_step: In the step.
        rank: Data-parallel rank.
        state: See :func:`stretches`.

    Raises:
        UserError: There is no such step, micro-step or rank, or the state no longer tells of it.
    """
    stop = 0
    for stretch in stretches(plans, epoch, options, state):
        plan, first = stretch.run.shown, stretch.first_step
        stop = first + stretch.stop - stretch.first
        if step < first:
            raise UserError(
                f"step {step} lies before step {first}, in a block that the state has finished: which "
                "options planned it, it no longer tells; use a state saved in that block"
            )
        if step >= stop:
            continue
        number = step - stretch.run.first_step
        num_micro_steps = int(plan.step_start[number + 1] - plan.step_start[number])
        if not 0 <= micro_step < num_micro_steps:
            raise UserError(f"micro-step {micro_step} is outside the {num_micro_steps} of step {step}")
        if not 0 <= rank < plan.world_size:
            raise UserError(f"rank {rank} is outside the {plan.world_size} ranks of step {step}")
        return plan.batch(number, micro_step, rank), stretch.run
    raise UserError(f"step {step} is outside the {stop} steps of epoch {epoch}")


def num_micro_steps(run: BlockRun, step: int) -> int:
    """Micro-steps of a step of the epoch that lies in a run."""
    start = run.shown.step_start
    return int(start[step - run.first_step + 1] - start[step - run.first_step])


def find_sample(
    plans: Plans, options: PlanOptions, sample_id: int, *, epoch: int, state: ResumeState | None = None
) -> list[Delivery]:
    """Every delivery of a sample in an epoch, in order; none where it is not part of the epoch.

    Args:
        plans: Of the dataset.
        options: See :func:`stretches`.
        sample_id: Sample.
        epoch: Epoch.
        state: See :func:`stretches`.
    """
    found = []
    for stretch in stretches(plans, epoch, options, state):
        plan = stretch.run.shown
        rows = np.flatnonzero(plan.sample_ids == sample_id)
        batches = np.searchsorted(plan.batch_start, rows, side="right") - 1
        # Empty batches start where their successor does: searchsorted finds the last, which holds the row.
        for row, batch in zip(rows.tolist(), batches.tolist(), strict=True):
            micro, rank = divmod(batch, plan.world_size)
            step = int(np.searchsorted(plan.step_start, micro, side="right")) - 1
            if stretch.first <= step < stretch.stop:
                found.append(
                    Delivery(
                        epoch=epoch,
                        block=stretch.run.begin.block,
                        step=stretch.run.first_step + step,
                        micro_step=micro - int(plan.step_start[step]),
                        rank=rank,
                        row=row - int(plan.batch_start[batch]),
                    )
                )
    return found


def left_ids(plans: Plans, state: ResumeState) -> NDArray[np.int64]:
    """Samples of a state's block that are still to be delivered, int64."""
    return plans.finished(state)[1].ids
