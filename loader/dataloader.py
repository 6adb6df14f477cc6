"""Iterates a dataset: prefetching, worker processes, position."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from loader.batch import BatchMeta
from loader.dataset import BucketedDataset
from loader.metrics import Meter
from loader.predownload import Predownloader, ahead
from loader.prefetch import Prefetcher
from loader.progress import Progress, Traversal
from loader.raw import RawBatch
from loader.reading import BatchReader, Order, finish, order_of
from loader.walk import Task
from shardgen.errors import UserError

_Made = tuple[Task, Any, BatchMeta, int]  # task, batch, its record, stored bytes


class _WorkerReads(Dataset[Any]):
    """What worker processes do: read rows. They know no plan, no epoch and no position."""

    def __init__(self, reader: BatchReader) -> None:
        self.reader = reader

    def __getitem__(self, order: Order) -> Any:
        return self.reader.read(order)


class _Orders:
    """Feeds a torch DataLoader with the orders of the running pass, and remembers whose they were."""

    def __init__(self, dataset: BucketedDataset) -> None:
        self.dataset = dataset
        self.tasks: Iterator[Task] = iter(())
        self.sent: deque[Task] = deque()

    def __iter__(self) -> Iterator[Order]:
        self.sent.clear()
        for task in self.tasks:
            self.sent.append(task)
            yield order_of(task, self.dataset.plans.corpus)


def _as_is(value: Any) -> Any:
    return value


class BucketedDataLoader:
    """This rank's batches, in plan order whatever the number of workers; resumable after any step.

    Deliberately not a ``torch.utils.data.DataLoader``, which accelerate and Lightning would shard or wrap
    again; with ``num_workers`` it holds one.
    """

    def __init__(
        self,
        dataset: BucketedDataset,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
        timeout: float = 60,
    ) -> None:
        """Args:
        dataset: What to iterate.
        num_workers: Processes that read; 0 reads in a thread of this one.
        prefetch: Batches made ahead (of each worker, as torch counts); 0 without workers reads on demand.
        pin_memory: Put batches into page-locked memory, where there is a GPU.
        persistent_workers: Keep the processes between passes.
        multiprocessing_context: ``"fork"``, ``"spawn"``, ``"forkserver"`` or a context.
        collate_fn: Called with a batch's decoded samples (a list of dicts of all stored columns) instead of
            making tensors; a dict it returns becomes a ``Batch`` with ``meta``. Runs in the workers.
        timeout: Longest wait for a batch in seconds; 0 for no limit.

        Raises:
            TypeError: ``dataset`` is no BucketedDataset.
            UserError: A value makes no sense.
        """
        if not isinstance(dataset, BucketedDataset):
            raise TypeError(f"BucketedDataLoader needs a BucketedDataset, not a {type(dataset).__name__}")
        for name, value, least in (
            ("num_workers", num_workers, 0),
            ("prefetch", prefetch, 1 if num_workers else 0),
            ("timeout", timeout, 0),
        ):
            if value < least:
                raise UserError(f"{name} {value} is below {least}")
        if persistent_workers and not num_workers:
            raise UserError("persistent_workers=True needs num_workers above 0")
        self.dataset = dataset
        self.num_workers = num_workers
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self.multiprocessing_context = multiprocessing_context
        self.collate_fn = collate_fn
        self.timeout = timeout
        self.batch_size = None
        self.last_meta: BatchMeta | None = None
        self._progress: Progress = dataset.new_progress()
        self._meter = Meter()
        self._pass: weakref.ref[_Pass] | None = None
        self._orders = _Orders(dataset)
        self._workers: DataLoader[Any] | None = None
        self._reader: BatchReader | None = None

    # --- passes -------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass: the loaded position if there is one, else the whole next epoch."""
        self.dataset.check_world()
        self._end_pass()
        traversal = self._progress.begin()
        self.dataset.note_iterated(self._progress)
        self._meter = Meter()
        predownloader = self.dataset.predownloader()
        running = _Pass(self, traversal, self._source(traversal, predownloader), predownloader)
        # The loader must not keep alive what its user has dropped: a `break` ends the pass.
        self._pass = weakref.ref(running)
        return running

    def _running(self) -> _Pass | None:
        return self._pass() if self._pass is not None else None

    def _end_pass(self) -> None:
        running, self._pass = self._running(), None
        if running is not None:
            running.close()

    def _source(self, traversal: Traversal, predownloader: Predownloader | None) -> Iterator[_Made]:
        if predownloader is not None:
            traversal.tasks = self._announced(traversal.tasks, predownloader)
        if self.num_workers:
            return self._from_workers(traversal)
        if self._reader is None:
            self._reader = self.dataset.reader(self.collate_fn)  # kept, and with it its maps
        made = _made_here(traversal, self._reader, self.dataset, self.pin_memory)
        return Prefetcher(made, self.prefetch, self.timeout) if self.prefetch else made

    def _announced(self, tasks: Iterator[Task], predownloader: Predownloader) -> Iterator[Task]:
        shard_of = self.dataset.batch_reader.reader.shard_of
        return ahead(
            tasks,
            self.dataset.predownload_batches,
            lambda task: predownloader.want(np.unique(shard_of(task.planned.sample_ids)).tolist()),
        )

    def _from_workers(self, traversal: Traversal) -> Iterator[_Made]:
        orders = self._orders
        orders.tasks = traversal.tasks
        if self._workers is None:
            self._workers = DataLoader(
                _WorkerReads(self.dataset.reader(self.collate_fn)),
                batch_size=None,
                sampler=orders,
                num_workers=self.num_workers,
                prefetch_factor=self.prefetch,
                persistent_workers=self.persistent_workers,
                multiprocessing_context=self.multiprocessing_context,
                collate_fn=_as_is,
                timeout=self.timeout,
            )
        corpus, collator = self.dataset.plans.corpus, self.dataset.batch_reader.collator
        for raw in self._workers:
            task = orders.sent.popleft()
            batch, meta = finish(raw, task, corpus, collator, pin_memory=self.pin_memory)
            yield task, batch, meta, _stored_bytes(raw)

    @property
    def epoch(self) -> int:
        """Epoch of the running pass; between passes, of the next one."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of ``epoch``; a loaded state is resumed first."""
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of this rank in the running pass, or in the next one."""
        return self._progress.num_batches()

    def num_steps(self, epoch: int | None = None) -> int:
        """Optimizer steps of a whole epoch; ``None`` for the current one."""
        return self._progress.num_steps(self.epoch if epoch is None else epoch)

    # --- state --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position after the last step whose last batch the training loop has taken; plain JSON types."""
        return self._progress.state().to_json()

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Make the next pass continue from a state.

        Raises:
            UserError: The state does not fit the data or the options; nothing is changed then.
        """
        self._progress.load(obj)

    # --- what it is doing ---------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Figures of the running or last pass on this rank; see :mod:`loader.metrics`."""
        values = self._meter.values()
        running = self._running()
        source = running.source if running is not None else None
        depth = source.depth if isinstance(source, Prefetcher) else len(self._orders.sent)
        values["queue_depth"] = float(depth)
        values["shards_resident"] = float(self.dataset.num_resident())
        return values

    @property
    def drop_last(self) -> bool:
        """Not here; accelerate's ``skip_first_batches`` asks for it when Trainer resumes."""
        raise AttributeError(
            "BucketedDataLoader has no drop_last: nothing is dropped, and no batches need skipping, because "
            "load_state_dict resumes in the middle of an epoch; with Trainer, use "
            "TrainingArguments(ignore_data_skip=True) and load the saved state when training begins"
        )

    def close(self) -> None:
        """End the running pass, and the worker processes."""
        self._end_pass()
        self._reader = None
        workers, self._workers = self._workers, None
        iterator: Any = workers._iterator if workers is not None else None
        if workers is not None and iterator is not None:
            iterator._shutdown_workers()
            workers._iterator = None

    def __enter__(self) -> BucketedDataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):
            self.close()


def _stored_bytes(raw: Any) -> int:
    return len(raw.tokens) if isinstance(raw, RawBatch) else 0


def _made_here(
    traversal: Traversal, reader: BatchReader, dataset: BucketedDataset, pin_memory: bool
) -> Iterator[_Made]:
    corpus = dataset.plans.corpus
    for task in traversal.tasks:
        raw = reader.read(order_of(task, corpus))
        batch, meta = finish(raw, task, corpus, reader.collator, pin_memory=pin_memory)
        yield task, batch, meta, _stored_bytes(raw)


class _Pass:
    """One iteration over a loader. It ends when it is exhausted, closed or dropped."""

    def __init__(
        self,
        loader: BucketedDataLoader,
        traversal: Traversal,
        source: Iterator[_Made],
        predownloader: Predownloader | None,
    ) -> None:
        self.loader = loader
        self.predownloader = predownloader
        self.traversal = traversal
        self.source = source
        self.meter = loader._meter
        self.over = False

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        if self.over:
            raise StopIteration
        progress = self.loader._progress
        if not progress.is_current(self.traversal):
            self.close()
            raise RuntimeError("a newer pass over this loader has begun: use its iterator")
        began = time.perf_counter()
        try:
            task, batch, meta, num_bytes = next(self.source)
        except BaseException:
            self.close()
            raise
        waited = time.perf_counter() - began
        progress.take(task, meta.sample_ids)
        self.loader.last_meta = meta
        planned = task.planned
        self.meter.note(meta, planned.num_rows * planned.padded_length, num_bytes, waited)
        return batch

    def close(self) -> None:
        """End the pass; the position stays after the last finished step."""
        if self.over:
            return
        self.over = True
        self.meter.end()
        if self.predownloader is not None:
            self.predownloader.close()
        close = getattr(self.source, "close", None)
        if close is not None and close() is False:
            self.loader._reader = None  # a thread is stuck in it
        self.loader._progress.end(self.traversal)

    def __del__(self) -> None:
        if hasattr(self, "over"):
            self.close()
