"""Shards of coming batches, made present in the background."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

# Enough to fill a network link that one object-store stream does not.
NUM_THREADS = 4
JOIN_SECONDS = 10.0


def ahead(source: Iterator[T], depth: int, announce: Callable[[T], None]) -> Iterator[T]:
    """The same items; each is announced when it is at most ``depth`` items away.

    Args:
        source: Items.
        depth: How far to look ahead.
        announce: Called once with each item, in order.
    """
    waiting: deque[T] = deque()
    for item in source:
        announce(item)
        waiting.append(item)
        if len(waiting) > depth:
            yield waiting.popleft()
    yield from waiting


class _Shared:
    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.wanted: deque[int] = deque()
        self.known: set[int] = set()
        self.stop = False


def _run(shared: _Shared, prepare: Callable[[int], None]) -> None:
    while True:
        with shared.changed:
            while not shared.wanted:
                if shared.stop:
                    return
                shared.changed.wait()
            shard = shared.wanted.popleft()
        try:
            prepare(shard)
        except Exception:
            # Whoever needs the shard tries again and raises in the training loop; a thread that nobody
            # waits for has no one to tell.
            pass
        finally:
            with shared.changed:
                shared.known.discard(shard)


class Predownloader:
    """Threads that prepare shards in the order in which they are asked for.

    Args:
        prepare: For each thread, a function that makes a shard present, or returns when another process is
            at it; with its own client of the remote.
    """

    def __init__(self, prepare: list[Callable[[int], None]]) -> None:
        self._shared = _Shared()
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(
                target=_run, args=(self._shared, function), name="loader-predownload", daemon=True
            )
            for function in prepare
        ]
        for thread in self._threads:
            thread.start()

    def want(self, shards: list[int]) -> None:
        """Ask for shards; those that already wait are not asked for twice."""
        shared = self._shared
        with shared.changed:
            for shard in shards:
                if shard not in shared.known:
                    shared.known.add(shard)
                    shared.wanted.append(shard)
            shared.changed.notify_all()

    def close(self) -> None:
        """Stop after the downloads under way; what waits is forgotten."""
        if self._pid != os.getpid():
            return
        with self._shared.changed:
            self._shared.stop = True
            self._shared.wanted.clear()
            self._shared.changed.notify_all()
        end = time.monotonic() + JOIN_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def __del__(self) -> None:
        if hasattr(self, "_threads"):
            self.close()
