"""Iterating a dataset without our loader, and the state methods that upstream's users call."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from loader.batch import Batch
from loader.passes import Passes
from loader.progress import Progress
from loader.reading import BatchReader, finish, order_of
from loader.state import ResumeState
from loader.walk import Plans, Task, tasks
from loader.world import World, detect
from shardgen.errors import UserError

if TYPE_CHECKING:
    from loader.options import PlanOptions


class SelfIterating:
    """What a dataset does when it is iterated itself: in this process, or by another loader's workers."""

    world: World
    foreign_loader: bool
    plans: Plans
    plan_options: PlanOptions
    batch_reader: BatchReader
    replication: int | None
    _progress: Progress
    _passes: Passes
    _loaders: weakref.WeakSet[Progress]
    _last_progress: weakref.ref[Progress] | None

    # --- iterating outside our loader -------------------------------------------------------------------

    def check_world(self) -> None:
        """Refuse to go on when the ranks are not those of the construction."""
        now = detect(self.replication)
        if (now.rank, now.num_ranks) != (self.world.rank, self.world.num_ranks):
            raise UserError(
                f"the dataset was made on rank {self.world.rank} of {self.world.num_ranks} and is iterated "
                f"on rank {now.rank} of {now.num_ranks}: make it after init_process_group, on each rank"
            )

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next epoch; inside a worker process, that worker's share of them.

        Raises:
            UserError: Several ranks, and neither our loader nor ``foreign_loader=True``.
        """
        if self.world.num_ranks > 1 and not self.foreign_loader:
            raise UserError(
                f"this dataset was made for rank {self.world.rank} of {self.world.num_ranks} and already "
                "gives each rank its own batches: iterate BucketedDataLoader(dataset), or, if another "
                "loader must do it and will not shard or dispatch again, say foreign_loader=True"
            )
        worker = get_worker_info()
        return self._iterate_here() if worker is None else self._iterate_share(worker.id, worker.num_workers)

    def _iterate_here(self) -> Iterator[Any]:
        self.check_world()
        if self._passes.next_epoch != self._passes.first_epoch:  # workers have gone on meanwhile
            self._progress.set_epoch(self._passes.next_epoch)
        traversal = self._progress.begin()
        self._passes.reset(traversal.epoch + 1)
        try:
            for task in traversal.tasks:
                batch = self._make(task)
                self._progress.take(
                    task, task.planned.sample_ids if batch.meta is None else batch.meta.sample_ids
                )
                yield batch
        finally:
            self._progress.end(traversal)

    def _iterate_share(self, worker: int, num_workers: int) -> Iterator[Any]:
        passes = self._passes
        before = passes.begin(worker)
        start = self.plans.at(passes.first_epoch + before)
        state = passes.state()
        if before == 0 and state:
            start = ResumeState.from_json(json.loads(state))
        for number, task in enumerate(tasks(self.plans, start, self.plan_options, self.world.group)):
            if number % num_workers == worker:
                yield self._make(task)

    def _make(self, task: Task) -> Batch:
        reader = self.batch_reader
        raw = reader.read(order_of(task, self.plans.corpus))
        batch, _ = finish(raw, task, self.plans.corpus, reader.collator, pin_memory=False)
        assert isinstance(batch, Batch)
        return batch

    def __len__(self) -> int:
        """Batches that the next pass gives this rank; ``num_samples`` counts samples."""
        return self._progress.num_batches()

    @property
    def next_epoch(self) -> int:
        """Epoch of the next pass."""
        return max(self._passes.next_epoch, self._progress.next_start().epoch)

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._progress.set_epoch(epoch)
        self._passes.reset(epoch)

    # --- state ------------------------------------------------------------------------------------------

    def state_dict(self, num_samples: int | None = None, from_beginning: bool = True) -> dict[str, Any]:
        """Position as plain JSON types.

        Args:
            num_samples: Samples over all ranks since the epoch's start, as Composer counts them; between two
                steps it means the earlier one. ``None``: what this process has iterated.
            from_beginning: Whether ``num_samples`` counts from the epoch's start, or from this pass's.

        Raises:
            UserError: Samples and rows do not correspond (fillers, static shapes, packed layout).
        """
        progress = self._active()
        if num_samples is None:
            return progress.state().to_json()
        start = None
        if self._passes.next_epoch > self._passes.first_epoch:  # another loader's workers iterate
            start = self.plans.at(self._passes.next_epoch - 1)
            if self._passes.next_epoch == self._passes.first_epoch + 1 and self._passes.state():
                start = ResumeState.from_json(json.loads(self._passes.state()))
        return progress.state_at(num_samples, from_beginning, start).to_json()

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Make the next pass continue from a state; loaders of this dataset follow.

        Raises:
            UserError: The state does not fit; nothing is changed then.
        """
        self._progress.load(obj)
        for progress in list(self._loaders):
            progress.load(obj)
        state = self._progress.next_start()
        self._passes.reset(state.epoch, json.dumps(state.to_json()).encode())

    def note_iterated(self, progress: Progress) -> None:
        """Remember whose position :meth:`state_dict` is asked for."""
        self._last_progress = weakref.ref(progress)

    def _active(self) -> Progress:
        """Progress of the loader that iterated last, else this dataset's own."""
        last = self._last_progress() if self._last_progress is not None else None
        return last or self._progress

    def new_progress(self) -> Progress:
        """A position for one more loader; a state loaded before counts for it too."""
        progress = Progress(self.plans, self.plan_options, self.world.group)
        if self._progress.has_loaded:
            progress.load(self._progress.state().to_json())
        self._loaders.add(progress)
        return progress
