"""Who runs the functions of ``shardgen.write``: this process, worker processes, or a Ray cluster."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol

from shardgen.errors import UserError
from shardgen.options import BuildOptions
from shardgen.reading import RaggedColumnError

WORKER_EXIT_SECONDS = 5
Future = concurrent.futures.Future


class WorkerKilledError(UserError):
    """A worker process died; what is done so far can be resumed."""


class Pool(Protocol):
    """Something that runs functions of ``shardgen.write``.

    Attributes:
        slots: Calls worth having under way at once.
        remote: Results of tasks come back as bytes, for the caller to write.
    """

    slots: int
    remote: bool

    def submit(self, name: str, *args: Any) -> Future[Any]: ...


def call(name: str, args: tuple[Any, ...]) -> Any:
    """Run a function of ``shardgen.write``."""
    from shardgen import write

    return getattr(write, name)(*args)


class InlinePool:
    """Runs everything at once, in this process."""

    slots = 1
    remote = False

    def submit(self, name: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(call(name, args))
        return future


def _start_worker(parent: int) -> None:
    # The parent decides: Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_die_with, args=(parent,), name="shardgen-parent", daemon=True).start()


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


class ProcessPool:
    """Worker processes, forked from a server that has imported what they need once."""

    remote = False

    def __init__(self, workers: int) -> None:
        self.slots = 2 * workers  # one task waits at each worker
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["shardgen.write", "shardgen.read_parquet"])
        self._executor = concurrent.futures.ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker, initargs=(os.getpid(),)
        )

    def submit(self, name: str, *args: Any) -> Future[Any]:
        return self._executor.submit(call, name, args)

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def kill(self) -> None:
        """Stop at once: running tasks are cut off."""
        processes = list((self._executor._processes or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(WORKER_EXIT_SECONDS)
            if process.is_alive():
                process.kill()
                process.join(WORKER_EXIT_SECONDS)


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
            ray.init(
                address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False, **local
            )
        self.slots = 2 * workers
        self._call = ray.remote(num_cpus=1, max_retries=2)(call)

    def submit(self, name: str, *args: Any) -> Future[Any]:
        if name != "encode_task":
            return InlinePool().submit(name, *args)
        future: Future[Any] = self._call.remote(name, args).future()
        return future

    def close(self) -> None:
        if self._own:
            self._ray.shutdown()


@contextmanager
def open_pool(options: BuildOptions) -> Iterator[Pool]:
    """The pool that the options ask for; one local worker is this process itself.

    Raises:
        WorkerKilledError: A worker died.
    """
    if options.engine == "ray":
        yield from _open_ray(options)
        return
    if options.workers == 1:
        yield InlinePool()
        return
    pool = ProcessPool(options.workers)
    try:
        yield pool
    except BrokenProcessPool as error:
        pool.kill()
        raise WorkerKilledError(
            "a worker process was killed (out of memory?): use fewer --workers or a smaller --memory"
        ) from error
    except BaseException:
        pool.kill()
        raise
    pool.close()


def _open_ray(options: BuildOptions) -> Iterator[Pool]:
    pool = RayPool(options.workers, options.ray_address)
    try:
        yield pool
    except (UserError, RaggedColumnError, OSError):
        raise
    except Exception as error:
        cause = getattr(error, "cause", None)  # Ray wraps what a task raised
        if isinstance(cause, UserError | RaggedColumnError):
            raise cause from None
        if type(error).__module__.startswith("ray"):
            text = str(error).splitlines()[0]
            raise WorkerKilledError(f"a Ray task failed: {text}: see the cluster's logs") from error
        raise
    finally:
        pool.close()
