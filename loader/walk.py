"""Walk an epoch block by block: from a saved position to the batches that follow, and back to a state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from loader.options import EpochOptions, PlanOptions
from loader.plan import BlockPlan, apply_skip, plan_block
from loader.pool import Corpus, EpochPlanner, Pool
from loader.runs import DIGEST_MASK, BlockRun, Size, Task
from loader.state import ResumeState, Segment, digest_ids
from shardgen.errors import UserError


def longest_allowed(options: PlanOptions) -> int:
    """Longest sample in tokens that a batch can hold alone, static shapes considered; 0 when none."""
    budget = options.budget()
    if options.padding != "boundary":
        return budget.longest_allowed
    upper = np.array(options.boundaries[1:], np.int64)
    fits = budget.max_rows(upper) >= 1
    return int(upper[fits].max()) if fits.any() else 0


def _select(pool: Pool, rows: NDArray[np.int64]) -> Pool:
    return Pool(ids=pool.ids[rows], copies=pool.copies[rows], lanes=pool.lanes[rows])


class Plans:
    """Plans on demand: the same arguments give the same plan, and the newest few are kept.

    Args:
        corpus: Lengths and shard sizes.
        fingerprint: Of the dataset.
        epoch_options: Fixed within an epoch.
        skip: Sample ids to leave out, ascending, int64, shape (S,).
    """

    def __init__(
        self, corpus: Corpus, fingerprint: str, epoch_options: EpochOptions, skip: NDArray[np.int64]
    ) -> None:
        self.corpus = corpus
        self.fingerprint = fingerprint
        self.epoch_options = epoch_options
        self.skip = skip
        self._longest = int(corpus.lengths.max())
        self._allowed: dict[PlanOptions, int] = {}
        self._planners: dict[int, EpochPlanner] = {}
        self._starts: dict[tuple[ResumeState, PlanOptions], BlockRun] = {}
        self._sizes: dict[tuple[int, int, PlanOptions], Size] = {}

    def planner(self, epoch: int) -> EpochPlanner:
        """Planner of an epoch; the newest two are kept."""
        if epoch not in self._planners:
            while len(self._planners) > 1:
                self._planners.pop(next(iter(self._planners)))
            self._planners[epoch] = EpochPlanner(self.corpus, self.epoch_options, epoch)
        return self._planners[epoch]

    def run(self, state: ResumeState, options: PlanOptions) -> BlockRun:
        """The run that follows a state under today's options.

        Replays the segments of the state's block, so it costs one plan of a block for each of them. Equal
        options continue the last segment's plan; others plan anew what it left.

        Raises:
            UserError: The replay deals other samples than the state says.
        """
        key = (state, options)
        if key not in self._starts:
            run = self._replay(state, options)
            if not state.segments and state.block > 0:
                return run
            self._starts = {key: run}  # `len`, a load and the first `iter` all need it
        return self._starts[key]

    def _replay(self, state: ResumeState, options: PlanOptions) -> BlockRun:
        runs, left = self.finished(state)
        if runs and runs[-1].options == options:
            return replace(runs[-1], shown=self._shown(runs[-1].plan, options))
        run = self._begin(state, state.segments, left, (state.num_dealt, state.digest), options)
        return replace(run, shown=self._shown(run.plan, options))

    def finished(self, state: ResumeState) -> tuple[list[BlockRun], Pool]:
        """The plans of a state's segments, and the rows of its block that they left.

        The steps before ``start`` of each were done. What was skipped in them, the state does not know.

        Raises:
            UserError: The replay deals other samples than the state says.
        """
        planner = self.planner(state.epoch)
        if state.block >= planner.num_blocks:
            raise UserError(
                f"the state is in block {state.block} of an epoch with {planner.num_blocks} blocks: damaged?"
            )
        left, dealt = planner.pool(state.block), (0, 0)
        runs = []
        for number, segment in enumerate(state.segments):
            run = self._begin(state, state.segments[:number], left, dealt, segment.options)
            if segment.steps > run.plan.num_steps:
                raise UserError(
                    f"the state counts {segment.steps} steps in segment {number} but its plan has "
                    f"{run.plan.num_steps}: it comes from another planner, other data or is damaged"
                )
            runs.append(replace(run, start=segment.steps))
            rows = run.plan.rows[: run.plan.num_rows_before_step(segment.steps)]
            dealt = dealt[0] + len(rows), (dealt[1] + digest_ids(run.pool.ids[rows])) & DIGEST_MASK
            fit = self.fitting(left, segment.options)
            left = left.without(rows if fit is None else fit[rows])
        if dealt != (state.num_dealt, state.digest):
            raise UserError(
                f"replaying the state deals {dealt[0]} samples with digest {dealt[1]:016x}, but it was "
                f"saved after {state.num_dealt} with {state.digest:016x}: another planner, other data or a "
                "damaged state"
            )
        return runs, left

    def _begin(
        self,
        state: ResumeState,
        before: tuple[Segment, ...],
        left: Pool,
        dealt: tuple[int, int],
        options: PlanOptions,
    ) -> BlockRun:
        """Plan what is left of a state's block, after the segments ``before`` with their count and digest."""
        fit = self.fitting(left, options)
        pool = left if fit is None else _select(left, fit)
        # Only the very first plan of an epoch may refuse what a later one has to cope with.
        resumed = bool(before) or state.block > 0
        plan = plan_block(self.corpus, pool, options, self.epoch_options, state.epoch, resumed=resumed)
        return BlockRun(
            begin=replace(state, segments=(), num_dealt=0, digest=0),
            before=before,
            num_dealt=dealt[0],
            digest=dealt[1],
            options=options,
            pool=pool,
            plan=plan,
            shown=plan,
            start=0,
            is_last=state.block == self.planner(state.epoch).num_blocks - 1,
        )

    def fitting(self, pool: Pool, options: PlanOptions) -> NDArray[np.int64] | None:
        """Entries that some batch can hold, int64, ascending; ``None`` for all.

        The others are all named by ``skip`` (else the options were refused), and there is no plan with them.
        """
        if options not in self._allowed:
            self._allowed[options] = longest_allowed(options)
        allowed = self._allowed[options]
        if self._longest <= allowed:
            return None
        return np.flatnonzero(self.corpus.lengths[pool.ids] <= allowed)

    def _shown(self, plan: BlockPlan, options: PlanOptions) -> BlockPlan:
        return apply_skip(plan, self.corpus, options, self.skip) if len(self.skip) else plan

    def runs(self, state: ResumeState, options: PlanOptions) -> Iterator[BlockRun]:
        """Runs from a state to the end of its epoch."""
        epoch = state.epoch
        while state.epoch == epoch:
            run = self.run(state, options)
            yield run
            state = run.state_after(run.plan.num_steps)

    def size(self, state: ResumeState, options: PlanOptions) -> Size:
        """From a state to the end of its epoch.

        Plans the blocks it has not planned before; the sizes of whole blocks are kept.
        """
        total, block = Size(), state.block
        if state.segments:
            total, block = self.run(state, options).size(), state.block + 1
        for whole in range(block, self.planner(state.epoch).num_blocks):
            total += self.block_size(state.epoch, whole, options)
        return total

    def block_size(self, epoch: int, block: int, options: PlanOptions) -> Size:
        """Size of a whole block that one set of options plans."""
        key = (epoch, block, options)
        if key not in self._sizes:
            self._sizes[key] = self.run(self.at(epoch, block), options).size()
        return self._sizes[key]

    def at(self, epoch: int, block: int = 0, steps_before_block: int = 0) -> ResumeState:
        """State at the start of a block."""
        return ResumeState(
            fingerprint=self.fingerprint,
            epoch_options=self.epoch_options,
            epoch=epoch,
            block=block,
            steps_before_block=steps_before_block,
        )


def tasks(plans: Plans, state: ResumeState, options: PlanOptions, group: int) -> Iterator[Task]:
    """One group's batches from a state to the end of its epoch, in order.

    Blocks are planned when they are reached; nothing of an earlier one is kept by this iterator.
    """
    for run in plans.runs(state, options):
        shown = run.shown
        for step in range(run.start, shown.num_steps):
            for micro_step in range(int(shown.step_start[step + 1] - shown.step_start[step])):
                yield run.task(step, micro_step, group)


__all__ = ["BlockRun", "Plans", "Size", "Task", "longest_allowed", "tasks"]
