"""One item ahead in a second thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TypeVar, cast

T = TypeVar("T")


def prefetch(items: Iterator[T], depth: int = 1) -> Iterator[T]:
    """The same items in the same order, up to ``depth`` of them made ahead in another thread.

    An exception of the source comes out where its item would have been. Leaving the iteration early
    stops the thread before this returns.
    """
    ready: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(depth)  # item, error, end
    stop = threading.Event()

    def put(item: T | None, error: BaseException | None = None, end: bool = False) -> bool:
        while not stop.is_set():
            try:
                ready.put((item, error, end), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put(item):
                    return
            put(None, end=True)
        except BaseException as error:  # handed to the consumer, which raises it
            put(None, error)

    thread = threading.Thread(target=produce, name="shardgen-read", daemon=True)
    thread.start()
    try:
        while True:
            item, error, end = ready.get()
            if error is not None:
                raise error
            if end:
                return
            yield cast(T, item)
    finally:
        stop.set()
        thread.join()
