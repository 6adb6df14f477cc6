"""One plan of a block, what had been done before it, and the batches it holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from loader.options import PlanOptions
from loader.plan import BlockPlan, PlannedBatch
from loader.pool import Pool
from loader.state import ResumeState, Segment, digest_ids

DIGEST_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much a stretch of an epoch holds.

    Attributes:
        steps: Optimizer steps.
        batches: Batches of each group.
        rows: Samples over all groups.
        plain: Whether every batch's tensor has exactly one row per sample (no filler, no static shape).
    """

    steps: int = 0
    batches: int = 0
    rows: int = 0
    plain: bool = True

    def __add__(self, other: Size) -> Size:
        return Size(
            steps=self.steps + other.steps,
            batches=self.batches + other.batches,
            rows=self.rows + other.rows,
            plain=self.plain and other.plain,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockRun:
    """One plan of a block, and what had been done in the block before it.

    Attributes:
        begin: State at the start of the block, without segments.
        before: Earlier segments of the block.
        num_dealt: Rows dealt by them.
        digest: Of the ids of those rows.
        options: What planned this run.
        pool: The rows it planned.
        plan: As planned; the state counts by it.
        shown: The plan with skipped rows taken out; what is delivered.
        start: First step of the plan to deliver; the ones before were done when the state was saved.
        is_last: Whether the epoch ends with this block.
    """

    begin: ResumeState
    before: tuple[Segment, ...]
    num_dealt: int
    digest: int
    options: PlanOptions
    pool: Pool
    plan: BlockPlan
    shown: BlockPlan
    start: int
    is_last: bool

    @property
    def first_step(self) -> int:
        """Number in the epoch of the plan's step 0."""
        return self.begin.steps_before_block + sum(segment.steps for segment in self.before)

    @property
    def num_batches(self) -> int:
        """Batches of each group that are still to be delivered."""
        return int(self.plan.step_start[-1] - self.plan.step_start[self.start])

    def state_after(self, steps: int) -> ResumeState:
        """State when so many steps of this plan are done, earlier runs included."""
        if steps == self.plan.num_steps:
            if self.is_last:
                return replace(self.begin, epoch=self.begin.epoch + 1, block=0, steps_before_block=0)
            return replace(self.begin, block=self.begin.block + 1, steps_before_block=self.first_step + steps)
        if steps == 0:
            return replace(self.begin, segments=self.before, num_dealt=self.num_dealt, digest=self.digest)
        dealt = self.plan.rows[: self.plan.num_rows_before_step(steps)]
        return replace(
            self.begin,
            segments=(*self.before, Segment(options=self.options, steps=steps)),
            num_dealt=self.num_dealt + len(dealt),
            digest=(self.digest + digest_ids(self.pool.ids[dealt])) & DIGEST_MASK,
        )

    def task(self, step: int, micro_step: int, group: int) -> Task:
        """A batch of this run's plan.

        Args:
            step: In the plan.
            micro_step: In the step.
            group: Data-parallel group.
        """
        planned = self.shown.batch(step, micro_step, group)
        planned = replace(planned, step=self.first_step + step)
        return Task(planned=planned, epoch=self.begin.epoch, run=self, step=step)

    def size(self) -> Size:
        """What is still to be delivered of this run."""
        first = int(self.shown.step_start[self.start]) * self.shown.world_size
        rows = np.diff(self.shown.batch_start)[first:]
        return Size(
            steps=self.plan.num_steps - self.start,
            batches=self.num_batches,
            rows=int(rows.sum()),
            plain=bool((rows == self.shown.batch_num_rows[first:]).all()),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One batch to deliver, and where it stands.

    Attributes:
        planned: The batch; its ``step`` counts from the epoch's start.
        epoch: Epoch number.
        run: The run it belongs to.
        step: Step in the run's plan.
    """

    planned: PlannedBatch
    epoch: int
    run: BlockRun
    step: int

    @property
    def ends_step(self) -> bool:
        return self.planned.micro_step == self.planned.num_micro_steps - 1

    @property
    def ends_run(self) -> bool:
        return self.ends_step and self.step == self.run.plan.num_steps - 1
