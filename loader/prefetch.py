"""A background thread that stays a few items ahead of its consumer."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# How long a shutdown waits for the thread to notice; it is a daemon, so a stuck one stops nobody.
JOIN_SECONDS = 10.0
_alive: weakref.WeakSet[Prefetcher[Any]] = weakref.WeakSet()


class _Shared(Generic[T]):
    """What the thread sees. It must not see the prefetcher, or that would never be collected."""

    def __init__(self, source: Iterator[T], depth: int) -> None:
        self.source = source
        self.depth = depth
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.done = False
        self.stop = False


def _run(shared: _Shared[Any]) -> None:
    try:
        for item in shared.source:
            with shared.changed:
                shared.items.append(item)
                shared.changed.notify_all()
                while len(shared.items) >= shared.depth and not shared.stop:
                    shared.changed.wait()
                if shared.stop:
                    return
    except BaseException as error:
        shared.error = error
    finally:
        with shared.changed:
            shared.done = True
            shared.changed.notify_all()


class Prefetcher(Generic[T]):
    """Iterates over what a thread makes ahead; errors of the thread are raised here, in order.

    Args:
        source: What to iterate; only the thread touches it from now on.
        depth: Most items ready at a time.
        timeout: Longest wait for one item in seconds; 0 for no limit.
    """

    def __init__(self, source: Iterator[T], depth: int, timeout: float) -> None:
        self._shared = _Shared(source, depth)
        self._timeout = timeout
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_run, args=(self._shared,), name="loader-prefetch", daemon=True
        )
        self._thread.start()
        _alive.add(self)

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._pid != os.getpid():
            raise RuntimeError(
                "this pass belongs to the process that was forked: iterate the loader anew here"
            )
        shared = self._shared
        end = time.monotonic() + self._timeout if self._timeout else None
        with shared.changed:
            while not shared.items:
                if shared.error is not None:
                    error, shared.error = shared.error, None
                    raise error
                if shared.done or shared.stop:
                    raise StopIteration
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"no batch was ready within timeout={self._timeout:g} s: is the storage reachable? "
                        "raise timeout= if it is only slow"
                    )
                shared.changed.wait(left)
            item = shared.items.popleft()
            shared.changed.notify_all()
        return item

    @property
    def depth(self) -> int:
        """Items ready now."""
        return len(self._shared.items)

    def close(self) -> bool:
        """Stop the thread and wait a little until it has; whether it has. What it had ready is dropped."""
        _alive.discard(self)
        if self._pid != os.getpid():
            return True  # the thread lives in the parent, and so does whoever holds the lock
        shared = self._shared
        with shared.changed:
            shared.stop = True
            shared.items.clear()
            shared.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)
        return not self._thread.is_alive()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):
            self.close()


@atexit.register
def _close_all() -> None:
    # A thread that still runs while the interpreter is torn down can crash it.
    for prefetcher in list(_alive):
        prefetcher.close()
