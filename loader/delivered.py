"""What was really delivered, against what the plan gave."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from loader.runs import BlockRun

_NAMED_IDS = 10


@dataclass
class Delivered:
    """What one group really received of a run, against what its plan gave it.

    Args:
        run: The run.
        group: Number of the group.
    """

    run: BlockRun
    group: int
    _ids: NDArray[np.int64] = field(init=False)
    _due: NDArray[np.int64] = field(init=False)
    _got: NDArray[np.int64] = field(init=False)
    _foreign: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        plan = self.run.shown
        batches = np.arange(int(plan.step_start[self.run.start]) * plan.world_size, len(plan.batch_start) - 1)
        mine = batches[batches % plan.world_size == self.group]
        num_rows = plan.batch_start[mine + 1] - plan.batch_start[mine]
        batch_of_row = np.repeat(mine, num_rows)
        # (rows of all batches,) positions: each batch's first row plus its place inside the batch
        place = np.arange(len(batch_of_row)) - np.repeat(np.cumsum(num_rows) - num_rows, num_rows)
        share = plan.sample_ids[plan.batch_start[batch_of_row] + place]
        self._ids, self._due = np.unique(share, return_counts=True)
        self._got = np.zeros_like(self._due)

    def mark(self, sample_ids: NDArray[np.int64]) -> None:
        """Note the ids of a batch that was delivered."""
        if len(self._ids) == 0:
            self._foreign += sample_ids.tolist()
            return
        at = np.minimum(np.searchsorted(self._ids, sample_ids), len(self._ids) - 1)
        known = self._ids[at] == sample_ids
        np.add.at(self._got, at[known], 1)
        self._foreign += sample_ids[~known].tolist()

    def check(self) -> None:
        """Compare at the end of the run.

        Raises:
            RuntimeError: Naming up to 10 ids that were lost, repeated or not due.
        """
        wrong = self._ids[self._got != self._due].tolist() + self._foreign
        if wrong:
            raise RuntimeError(
                f"epoch {self.run.begin.epoch}, block {self.run.begin.block}: {len(wrong)} samples were "
                f"not delivered as planned (lost, repeated or foreign), among them {wrong[:_NAMED_IDS]}: "
                "the batches of this block cannot be trusted; please report this with the loader's options"
            )
