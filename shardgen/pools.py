"""Who encodes and finishes: this process, worker processes, or a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from shardgen.errors import UserError
from shardgen.options import BuildOptions
from shardgen.reading import RaggedColumnError

WORKER_EXIT_SECONDS = 5
# What one process builds while another starts (half a second); below it, more of them only cost.
BYTES_PER_WORKER = 32 << 20


class WorkerKilledError(UserError):
    """A worker process died; what is done so far can be resumed."""


class Pool(Protocol):
    """Something that runs the functions named in :func:`call`.

    Attributes:
        slots: Calls worth having under way at once.
        remote: Results of tasks come back as bytes, for the caller to write.
    """

    slots: int
    remote: bool

    def submit(self, key: object, name: str, *args: Any) -> None:
        """Start a call; ``key`` comes back with its result."""

    def next_done(self) -> tuple[Any, Any]:
        """Wait for a call to end: its key and result. Raises what the call raised."""


def call(name: str, args: tuple[Any, ...]) -> Any:
    """Run one of the functions that do the work, by its name."""
    from shardgen import finish, write

    functions: dict[str, Callable[..., Any]] = {
        "run_task": write.run_task,
        "encode_task": write.encode_task,
        "finish_shard": finish.finish_shard,
    }
    return functions[name](*args)


class InlinePool:
    """Runs everything at once, in this process."""

    slots = 1
    remote = False

    def __init__(self) -> None:
        self._done: deque[tuple[object, Any]] = deque()

    def submit(self, key: object, name: str, *args: Any) -> None:
        self._done.append((key, call(name, args)))

    def next_done(self) -> tuple[Any, Any]:
        return self._done.popleft()


def _die_with(parent: int) -> None:
    """End this process when the build is gone: an orphan would wait, or write, for ever."""
    try:
        descriptor = os.pidfd_open(parent)
        select.select([descriptor], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # an old kernel, or a sandbox without the call
        while os.path.exists(f"/proc/{parent}"):
            time.sleep(1)
    os._exit(1)


def _work(pipe: Connection, parent: int) -> None:
    """Body of a worker: one call after another until the pipe closes."""
    # The parent decides: Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with, args=(parent,), name="shardgen-parent", daemon=True).start()
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, call(name, args))
        except BaseException as error:  # goes to the parent, which raises it
            answer = (False, error)
        pipe.send(answer)


@dataclass
class _Call:
    key: object
    name: str
    args: tuple[Any, ...]


class ProcessPool:
    """This process and ``workers - 1`` others, forked from a server that has imported what they need once.

    One pipe to each and one call in each: no queues or locks that a killed process could keep. While
    the others start, this one works already.
    """

    remote = False

    def __init__(self, workers: int) -> None:
        self.slots = 2 * workers  # one call waits for each
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shardgen.finish", "shardgen.read_parquet"])
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[object, bool, Any]] = queue.SimpleQueue()
        self._num_busy = 0
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._threads = [
            threading.Thread(target=self._serve, args=(context,), name=f"shardgen-{number}", daemon=True)
            for number in range(workers - 1)
        ]
        for thread in self._threads:
            thread.start()

    def _serve(self, context: Any) -> None:
        """Start one process, hand calls to it and take its answers; body of a thread."""
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, os.getpid()), daemon=True)
        process.start()  # waits until the server has imported what it needs
        self._processes.append(process)
        theirs.close()
        with ours:
            while (what := self._calls.get()) is not None:
                try:
                    ours.send((what.name, what.args))
                    good, result = ours.recv()
                except (EOFError, OSError):
                    text = "a worker process was killed (out of memory?)"
                    killed = WorkerKilledError(f"{text}: use fewer --workers or a smaller --memory")
                    self._done.put((what.key, False, killed))
                    return
                self._done.put((what.key, good, result))

    def submit(self, key: object, name: str, *args: Any) -> None:
        self._num_busy += 1
        self._calls.put(_Call(key, name, args))

    def next_done(self) -> tuple[Any, Any]:
        key, good, result = self._take()
        self._num_busy -= 1
        if not good:
            raise result
        return key, result

    def _take(self) -> tuple[object, bool, Any]:
        """An answer of another process, or the result of doing a waiting call here."""
        with contextlib.suppress(queue.Empty):
            return self._done.get_nowait()
        try:
            what = self._calls.get_nowait()
        except queue.Empty:
            return self._done.get()
        assert what is not None
        return what.key, True, call(what.name, what.args)

    def close(self) -> None:
        """Let the others end; those in a call are cut off."""
        if self._num_busy:
            for process in self._processes:
                process.kill()
        with contextlib.suppress(queue.Empty):
            while True:  # what waits is not wanted any more
                self._calls.get_nowait()
        for _ in self._threads:
            self._calls.put(None)
        for process in list(self._processes):  # one that is still starting ends by itself
            process.join(WORKER_EXIT_SECONDS)
            if process.is_alive():
                process.kill()


class RayPool:
    """Tasks on a Ray cluster; their bytes come back through its object store. Shards are finished here."""

    remote = True

    def __init__(self, workers: int, address: str | None) -> None:
        try:
            import ray
        except ImportError:
            raise UserError("--engine ray needs Ray: pip install 'shardgen[ray]'") from None
        self._ray = ray
        self._own = not ray.is_initialized()
        if self._own:
            local = {} if address else {"num_cpus": workers, "include_dashboard": False}
            ray.init(address=address, log_to_driver=False, logging_level="ERROR", **local)
        self.slots = 2 * workers  # one task waits at each worker
        self._call = ray.remote(num_cpus=1)(call)
        self._running: dict[Any, object] = {}
        self._here = InlinePool()
        self._num_here = 0

    def submit(self, key: object, name: str, *args: Any) -> None:
        if name == "encode_task":
            self._running[self._call.remote(name, args)] = key
        else:
            self._here.submit(key, name, *args)
            self._num_here += 1

    def next_done(self) -> tuple[Any, Any]:
        if self._num_here:
            self._num_here -= 1
            return self._here.next_done()
        done, _ = self._ray.wait(list(self._running), num_returns=1)
        key = self._running.pop(done[0])
        try:
            return key, self._ray.get(done[0])
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UserError | RaggedColumnError | OSError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayError as error:
            raise WorkerKilledError(f"a Ray worker failed: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Let go of the cluster; one that was started for this build ends."""
        for reference in self._running:
            with contextlib.suppress(Exception):
                self._ray.cancel(reference, force=True)
        if self._own:
            self._ray.shutdown()


@contextmanager
def open_pool(options: BuildOptions, num_bytes: int) -> Iterator[Pool]:
    """The pool that the options ask for; one local worker is this process itself.

    Args:
        options: What to build, and with how many workers at most.
        num_bytes: Size of the source files; a small build gets fewer workers.
    """
    workers = min(options.workers, 1 + num_bytes // BYTES_PER_WORKER)
    if options.engine == "local" and workers == 1:
        yield InlinePool()
        return
    remote = options.engine == "ray"
    pool = RayPool(options.workers, options.ray_address) if remote else ProcessPool(workers)
    try:
        yield pool
    finally:
        pool.close()
