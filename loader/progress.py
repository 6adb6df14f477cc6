"""Where a training loop stands: epochs, the batches it has taken, and the state that says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from loader.delivered import Delivered
from loader.options import PlanOptions
from loader.state import ResumeState, fixed_differences
from loader.walk import BlockRun, Plans, Task, tasks
from shardgen.errors import UserError


class Traversal:
    """One pass over an epoch, or over what is left of it."""

    def __init__(self, progress: Progress, start: ResumeState) -> None:
        self.progress = progress
        self.start = start
        self.tasks: Iterator[Task] = tasks(progress.plans, start, progress.options, progress.group)

    @property
    def epoch(self) -> int:
        return self.start.epoch


class Progress:
    """Counts what the training loop has taken, and says where the next pass begins.

    The position moves when the last micro-step of a step is taken, whatever was prepared ahead.

    Args:
        plans: The plans of the dataset.
        options: Today's options.
        group: This rank's data-parallel group.
    """

    def __init__(self, plans: Plans, options: PlanOptions, group: int) -> None:
        self.plans = plans
        self.options = options
        self.group = group
        self._next_epoch = 0
        self._epoch_was_set = False
        self._loaded: ResumeState | None = None
        self._traversal: Traversal | None = None
        self._place: ResumeState | tuple[BlockRun, int] = plans.at(0)
        self._delivered: Delivered | None = None
        self._finished: dict[int, int] = {}
        self._warned_of_fillers = False

    # --- passes -------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Epoch of the running pass; between passes, that of the next one."""
        return self._here().epoch

    def _here(self) -> ResumeState:
        """Where the running pass began; between passes, where the next one begins."""
        if self._traversal is None or self._loaded is not None:
            return self.next_start()
        # Frameworks that count batches never ask for the end of a pass; they set the next epoch.
        is_over = not isinstance(self._place, ResumeState) and _ends_epoch(*self._place)
        return self.next_start() if is_over and self._epoch_was_set else self._traversal.start

    @property
    def has_loaded(self) -> bool:
        """Whether a loaded state waits for its pass."""
        return self._loaded is not None

    def next_start(self) -> ResumeState:
        """Where the next pass begins."""
        return self._loaded or self.plans.at(self._next_epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``, unless a loaded state waits to be resumed."""
        if epoch < 0:
            raise UserError(f"epoch {epoch} is negative: epochs count from 0")
        if self._loaded is not None:
            if epoch != self._loaded.epoch:
                warnings.warn(
                    f"set_epoch({epoch}) is ignored: a state in epoch {self._loaded.epoch} was loaded and "
                    "is resumed first; iterate it, then call set_epoch",
                    stacklevel=3,
                )
            return
        self._next_epoch = epoch
        self._epoch_was_set = True
        if self._traversal is None:
            self._place = self.plans.at(epoch)

    def begin(self) -> Traversal:
        """Start the next pass; one still running is over."""
        start = self.next_start()
        # A plan that is refused is refused before step 0, the later blocks' tails included.
        if self.options.tail == "error":
            self.plans.size(start, self.options)
        else:
            self.plans.run(start, self.options)
        self._loaded = None
        self._place = start
        self._next_epoch = start.epoch + 1
        self._epoch_was_set = False
        self._delivered = None
        self._traversal = Traversal(self, start)
        return self._traversal

    def end(self, traversal: Traversal) -> None:
        """Note that a pass was finished or given up."""
        if self._traversal is traversal:
            self._traversal = None
            self._delivered = None

    def is_current(self, traversal: Traversal) -> bool:
        return self._traversal is traversal

    def take(self, task: Task, sample_ids: Any) -> None:
        """Note that the training loop takes a batch, and check the run's ids with its last one.

        Args:
            task: What the plan gave.
            sample_ids: Ids of the rows really delivered, int64, shape (rows,).
        """
        if task.planned.filler and not self._warned_of_fillers:
            self._warned_of_fillers = True
            warnings.warn(
                f"epoch {task.epoch} needs {task.run.shown.num_fillers} filler batches in block "
                f"{task.run.begin.block}, so that all ranks get equally many: they hold no samples, their "
                "labels are -100 and meta.filler is True",
                stacklevel=4,
            )
        if self._delivered is None or self._delivered.run is not task.run:
            self._delivered = Delivered(run=task.run, group=self.group)
        self._delivered.mark(sample_ids)
        if task.ends_step:
            self._place = (task.run, task.step + 1)
        if task.ends_run:
            self._delivered.check()
            if task.run.is_last:
                self._finished[task.epoch] = task.run.first_step + task.run.plan.num_steps

    # --- sizes --------------------------------------------------------------------------------------

    def num_batches(self) -> int:
        """Batches of the running pass, from its start; between passes, of the next one."""
        return self.plans.size(self._here(), self.options).batches

    def num_steps(self, epoch: int) -> int:
        """Steps of a whole epoch, those done before a resume included."""
        here = self._loaded or (self._traversal.start if self._traversal else self.state())
        if here.epoch == epoch:
            return here.step + self.plans.size(here, self.options).steps
        if epoch in self._finished:
            return self._finished[epoch]
        return self.plans.size(self.plans.at(epoch), self.options).steps

    # --- state --------------------------------------------------------------------------------------

    def state(self) -> ResumeState:
        """Position after the last finished step."""
        if self._loaded is not None:
            return self._loaded
        if isinstance(self._place, ResumeState):
            return self._place
        run, steps = self._place
        return run.state_after(steps)

    def load(self, obj: Mapping[str, Any]) -> None:
        """Make the next pass continue from a saved state.

        Raises:
            UserError: The state does not fit the data or the options; nothing is changed then.
        """
        state = ResumeState.from_json(obj)
        if state.step == 0:
            # Nothing of the epoch was delivered, so nothing of it is fixed yet.
            differing = fixed_differences(state, self.plans.fingerprint, self.plans.epoch_options)
            if differing:
                warnings.warn(
                    f"the state was saved before epoch {state.epoch} with other values "
                    f"({'; '.join(differing)}); the epoch uses today's",
                    stacklevel=3,
                )
            state = self.plans.at(state.epoch)
        else:
            state.check_fixed(self.plans.fingerprint, self.plans.epoch_options)
        self.plans.run(state, self.options)  # replays, so that a wrong state is refused here
        self._loaded = state
        self._delivered = None

    def state_at(
        self, num_samples: int, from_beginning: bool, start: ResumeState | None = None
    ) -> ResumeState:
        """State after so many samples over all ranks; between two steps the earlier one.

        Args:
            num_samples: Samples since the epoch's start, or since this pass began.
            from_beginning: Which of the two.
            start: Where the pass began; this position's own by default.

        Raises:
            UserError: Rows and samples do not correspond: fillers, static shapes or the packed layout.
        """
        if num_samples < 0:
            raise UserError(f"num_samples is {num_samples}: it must be a whole number from 0")
        start = start or self._loaded or (self._traversal.start if self._traversal else None)
        if start is None:
            place = self._place
            start = place if isinstance(place, ResumeState) else place[0].state_after(place[0].start)
        if self.options.layout == "packed":
            raise UserError(
                "a position cannot be told from a number of rows with layout='packed': save "
                "loader.state_dict()"
            )
        before = self._rows_before(start)
        wanted = num_samples if from_beginning else before + num_samples
        if wanted <= before:
            return start
        left = wanted - before
        for run in self.plans.runs(start, self.options):
            shown = run.shown
            first_batch = shown.step_start[run.start :] * shown.world_size
            rows = shown.batch_start[first_batch].astype(np.int64)
            rows -= rows[0]  # (steps left + 1,) rows delivered before each step
            steps = int(np.searchsorted(rows, left, side="right")) - 1
            upto = int(first_batch[steps])
            counted = shown.batch_num_rows[int(first_batch[0]) : upto]
            _check_plain(bool((np.diff(shown.batch_start)[int(first_batch[0]) : upto] == counted).all()))
            if left < rows[-1] or run.is_last:
                return run.state_after(run.start + steps)
            left -= int(rows[-1])
        raise AssertionError("an epoch has a last block")

    def _rows_before(self, state: ResumeState) -> int:
        """Samples of the epoch delivered before a state, without skipped ones."""
        skip = self.plans.skip
        planner = self.plans.planner(state.epoch)
        total = 0
        for block in range(state.block):
            ids = planner.pool(block).ids
            total += len(ids) - int(np.isin(ids, skip).sum())
        if state.segments:
            left = self.plans.run(state, self.options)
            ids = planner.pool(state.block).ids
            rest = left.size().rows
            total += len(ids) - int(np.isin(ids, skip).sum()) - rest
        return total


def _ends_epoch(run: BlockRun, steps: int) -> bool:
    return run.is_last and steps == run.plan.num_steps


def _check_plain(plain: bool) -> None:
    if not plain:
        raise UserError(
            "a position cannot be told from a number of rows where batches hold filler rows: save "
            "loader.state_dict()"
        )
