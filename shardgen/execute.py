"""Run tasks and finish shards; the bytes do not depend on who runs them, or in which order."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shardgen.pools import Pool
from shardgen.staging import fsync_file
from shardgen.tasks import Fragments, ShardInfo, Task, TaskResult

if TYPE_CHECKING:
    from shardgen.journal import Journal
    from shardgen.prepare import Prepared
    from shardgen.progress import Progress
    from shardgen.write import WriteJob

UPLOADS = 4


def create_shard(directory: str, path: str, num_bytes: int) -> None:
    """Make a shard of its final size: a full disk shows now, and writes are faster (3 GB/s, not 0.4)."""
    full = os.path.join(directory, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    descriptor = os.open(full, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        raise OSError(error.errno, error.strerror, full) from error
    finally:
        os.close(descriptor)


@dataclass(kw_only=True)
class Written:
    """What a whole run of tasks gave.

    Attributes:
        results: By number of the task.
        shards: By number of the shard.
    """

    results: dict[int, TaskResult] = field(default_factory=dict)
    shards: dict[int, ShardInfo] = field(default_factory=dict)


class Run:
    """One run over all tasks; those that the journal has are taken from it."""

    def __init__(
        self,
        job: WriteJob,
        prepared: Prepared,
        pool: Pool,
        journal: Journal,
        progress: Progress,
        upload: Callable[[str], None] | None,
    ) -> None:
        self._job, self._prepared, self._pool = job, prepared, pool
        self._journal, self._progress, self._upload = journal, progress, upload
        self._layout = prepared.arrangement.layout
        self._paths = prepared.arrangement.shard_paths
        self._config = job.format.config_bytes()
        self._waiting = np.zeros(self._layout.num_shards, np.int64)  # tasks yet to write to each shard
        self._fragments: dict[int, list[Fragments]] = {}
        self._num_running = 0
        self._created: set[int] = set()
        # The disk or the network works while the next shards are encoded.
        self._settler = ThreadPoolExecutor(UPLOADS if upload else 1, thread_name_prefix="shardgen-settle")
        self._settling: list[Future[None]] = []
        self.written = Written()

    def __call__(self) -> Written:
        """Do the work; on the disk when this returns."""
        try:
            return self._run()
        finally:
            self._settler.shutdown(cancel_futures=True)

    def _run(self) -> Written:
        tasks = self._prepared.tasks
        for task in tasks:
            self._waiting[list(task.shard_paths)] += 1
        self._progress.start("writing", sum(len(task.row_lengths) for task in tasks))
        self._take_up()
        for shard in np.flatnonzero(self._waiting == 0).tolist():  # upstream's empty first shards, too
            if shard not in self.written.shards:
                self._finish(shard)
        name = "encode_task" if self._pool.remote else "run_task"
        for task in tasks:
            if task.number in self.written.results:
                continue
            for shard in task.shard_paths:
                self._create(shard)
            self._submit((task.number,), name, self._job, task)
            while self._num_running >= self._pool.slots:
                self._collect()
        while self._num_running:
            self._collect()
        for settled in self._settling:
            settled.result()
        return self.written

    def _take_up(self) -> None:
        """Take over what an earlier run finished, as far as it is still on disk as it left it.

        A finished shard needs all of its tasks, and a task needs its bytes in every shard that is not
        finished (the others may have been compressed or uploaded since); so drop until nothing changes.
        """
        from shardgen.finish import holds, is_finished

        directory, tasks = self._job.directory, self._prepared.tasks
        results = self._journal.tasks()
        shards = {
            shard: info
            for shard, info in self._journal.shards().items()
            if self._upload is not None or is_finished(directory, self._paths[shard], info)
        }
        checked: dict[tuple[int, int], bool] = {}

        def kept(number: int, shard: int) -> bool:
            if (number, shard) not in checked:
                path = os.path.join(directory, self._paths[shard])
                checked[number, shard] = holds(path, results[number].fragments.of_shard(shard))
            return checked[number, shard]

        dropped = True
        while dropped:
            missing = {shard for task in tasks if task.number not in results for shard in task.shard_paths}
            lost_shards = missing & set(shards)
            lost_tasks = [
                n for n in results if not all(s in shards or kept(n, s) for s in tasks[n].shard_paths)
            ]
            for shard in lost_shards:
                del shards[shard]
            for number in lost_tasks:
                del results[number]
            dropped = bool(lost_shards or lost_tasks)
        self.written.shards.update(shards)
        for number, result in results.items():
            self._note(tasks[number], result)
        if results:
            self._progress.note(f"resuming: {len(results)} of {len(tasks)} partitions are done")

    def _note(self, task: Task, result: TaskResult) -> None:
        self.written.results[task.number] = result
        for shard in task.shard_paths:
            self._fragments.setdefault(shard, []).append(result.fragments.of_shard(shard))
            self._waiting[shard] -= 1
        self._progress.advance(len(task.row_lengths))

    def _create(self, shard: int) -> None:
        if shard not in self._created:
            create_shard(self._job.directory, self._paths[shard], int(self._layout.shard_bytes[shard]))
            self._created.add(shard)

    def _finish(self, shard: int) -> None:
        self._create(shard)
        layout = self._layout
        header = layout.shard_header(shard, self._config)
        count = int(layout.shard_start[shard + 1] - layout.shard_start[shard])
        parts = Fragments.join(self._fragments.pop(shard, []))
        job = self._job
        self._submit(
            shard, "finish_shard", job.directory, self._paths[shard], job.format, header, count, parts
        )

    def _collect(self) -> None:
        """Wait for something to end and take its result."""
        what, result = self._pool.next_done()
        self._num_running -= 1
        if isinstance(what, int):
            self._take_shard(what, result)
            return
        task = self._prepared.tasks[what[0]]
        if self._pool.remote:
            from shardgen.write import write_pieces

            result = write_pieces(self._job, task, result)
        self._journal.save_task(result)
        self._note(task, result)
        for shard in task.shard_paths:
            if not self._waiting[shard]:
                self._finish(shard)

    def _submit(self, key: int | tuple[int], name: str, *args: Any) -> None:
        """Start a call: keys are a shard's number, or that of a task in a tuple."""
        self._pool.submit(key, name, *args)
        self._num_running += 1

    def _take_shard(self, shard: int, info: ShardInfo) -> None:
        self.written.shards[shard] = info
        self._settling.append(self._settler.submit(self._settle, shard, info))
        for settled in self._settling:
            if settled.done():
                settled.result()  # an upload that failed ends the build now, not at its end

    def _settle(self, shard: int, info: ShardInfo) -> None:
        """Force a finished shard to the disk, or send it away, and only then note that it is done."""
        stored = info.entry["zip_data"] or info.entry["raw_data"]
        path = f"{os.path.dirname(self._paths[shard])}/{stored['basename']}"
        if self._upload is not None:
            self._upload(path)
        else:
            fsync_file(os.path.join(self._job.directory, path))
        self._journal.save_shard(shard, info)
