"""Run tasks and finish shards, in this process or in several; the bytes do not depend on how."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardgen.arrange import Arrangement
from shardgen.errors import UserError
from shardgen.tasks import Fragments, Task, TaskResult

if TYPE_CHECKING:
    from shardgen.write import ShardInfo, WriteJob


class Pool(Protocol):
    """Something that runs functions of ``shardgen.write``."""

    slots: int

    def submit(self, name: str, *args: Any) -> concurrent.futures.Future[Any]: ...


def _call(name: str, args: tuple[Any, ...]) -> Any:
    from shardgen import write

    return getattr(write, name)(*args)


class InlinePool:
    """Runs everything at once, in this process."""

    slots = 1

    def submit(self, name: str, *args: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(_call(name, args))
        return future


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides


class ProcessPool:
    """Worker processes, forked from a server that has imported streaming once."""

    def __init__(self, workers: int) -> None:
        self.slots = 2 * workers  # one task waits at each worker
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shardgen.write"])
        self._executor = concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker
        )

    def submit(self, name: str, *args: Any) -> concurrent.futures.Future[Any]:
        return self._executor.submit(_call, name, args)

    def close(self, *, kill: bool) -> None:
        processes = list((self._executor._processes or {}).values()) if kill else []
        self._executor.shutdown(wait=not kill, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(10)


@contextmanager
def open_pool(workers: int) -> Iterator[Pool]:
    """A pool of ``workers`` processes; 1 stays in this process.

    Raises:
        UserError: A worker died.
    """
    if workers == 1:
        yield InlinePool()
        return
    pool = ProcessPool(workers)
    try:
        yield pool
    except BrokenProcessPool as error:
        pool.close(kill=True)
        raise UserError(
            "a worker process was killed (out of memory?): use fewer --workers or a smaller --memory"
        ) from error
    except BaseException:
        pool.close(kill=True)
        raise
    else:
        pool.close(kill=False)


@dataclass(kw_only=True)
class Progress:
    """Callbacks of a build; by default nothing is shown."""

    start: Callable[[str, int], None] = field(default=lambda name, total: None)
    advance: Callable[[int], None] = field(default=lambda amount: None)


def create_shard(directory: str, path: str, num_bytes: int) -> None:
    """Make a shard of its final size, so that a full disk shows before anything is encoded."""
    full = os.path.join(directory, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    descriptor = os.open(full, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)


@dataclass(kw_only=True)
class Written:
    """What a whole run of tasks gave.

    Attributes:
        results: By number of the task.
        shards: By number of the shard.
    """

    results: dict[int, TaskResult]
    shards: dict[int, ShardInfo]


def execute(
    job: WriteJob, tasks: Sequence[Task], arrangement: Arrangement, pool: Pool, progress: Progress
) -> Written:
    """Run all tasks; finish each shard when the last of its tasks has."""
    layout = arrangement.layout
    config = job.format.config_bytes()
    waiting = np.zeros(layout.num_shards, np.int64)  # tasks that have yet to write to a shard
    for task in tasks:
        waiting[list(task.shard_paths)] += 1
    fragments: dict[int, list[Fragments]] = {shard: [] for shard in range(layout.num_shards)}
    written = Written(results={}, shards={})
    running: dict[concurrent.futures.Future[Any], Task | int] = {}
    created: set[int] = set()

    def create(shard: int) -> None:
        if shard not in created:
            create_shard(job.directory, arrangement.shard_paths[shard], int(layout.shard_bytes[shard]))
            created.add(shard)

    def finish(shard: int) -> None:
        create(shard)
        header = layout.shard_header(shard, config)
        count = int(layout.shard_start[shard + 1] - layout.shard_start[shard])
        parts = Fragments.join(fragments.pop(shard))
        args = (job.directory, arrangement.shard_paths[shard], job.format, header, count, parts)
        running[pool.submit("finish_shard", *args)] = shard

    def collect(future: concurrent.futures.Future[Any]) -> None:
        what = running.pop(future)
        result = future.result()
        if isinstance(what, int):
            written.shards[what] = result
            return
        written.results[what.number] = result
        for shard in what.shard_paths:
            fragments[shard].append(result.fragments.of_shard(shard))
            waiting[shard] -= 1
            if not waiting[shard]:
                finish(shard)
        progress.advance(len(what.row_lengths))

    progress.start("writing", sum(len(task.row_lengths) for task in tasks))
    for shard in np.flatnonzero(waiting == 0).tolist():  # upstream's empty first shards
        finish(shard)
    for task in tasks:
        for shard in task.shard_paths:
            create(shard)
        running[pool.submit("run_task", job, task)] = task
        while len(running) >= pool.slots:
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                collect(future)
    while running:
        done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
        for future in done:
            collect(future)
    return written
