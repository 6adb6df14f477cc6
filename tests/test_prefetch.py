"""The background thread: bounded, ordered, honest about errors, and gone when it is not wanted."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from loader.prefetch import Prefetcher


def threads():
    return [t for t in threading.enumerate() if t.name == "loader-prefetch"]


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_order_and_end():
    prefetcher = Prefetcher(iter(range(100)), 3, 5)
    assert list(prefetcher) == list(range(100))
    assert list(prefetcher) == []


def test_never_more_than_depth_ready():
    made = []

    def source():
        for number in range(10):
            made.append(number)
            yield number

    prefetcher = Prefetcher(source(), 2, 5)
    until(lambda: prefetcher.depth == 2)
    time.sleep(0.05)
    assert made == [0, 1]
    next(prefetcher)
    until(lambda: made == [0, 1, 2])
    prefetcher.close()


def test_errors_come_after_what_was_ready_before_them():
    def source():
        yield 1
        yield 2
        raise KeyError("broken")

    prefetcher = Prefetcher(source(), 5, 5)
    until(lambda: prefetcher.depth == 2)
    assert [next(prefetcher), next(prefetcher)] == [1, 2]
    with pytest.raises(KeyError, match="broken"):
        next(prefetcher)
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_timeout():
    stuck = threading.Event()

    def source():
        stuck.wait(5)
        yield 1

    prefetcher = Prefetcher(source(), 1, 0.05)
    with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
        next(prefetcher)
    stuck.set()
    prefetcher.close()


def test_close_stops_a_full_and_a_waiting_thread_and_closes_the_source():
    closed = []

    def source():
        try:
            yield from range(10**9)
        finally:
            closed.append(True)

    prefetcher = Prefetcher(source(), 2, 5)
    next(prefetcher)
    assert prefetcher.close()
    assert not threads()
    prefetcher.close()
    del prefetcher
    gc.collect()
    assert closed == [True]
    with pytest.raises(StopIteration):
        next(Prefetcher(iter(()), 1, 5))


def test_dropping_it_stops_the_thread():
    prefetcher = Prefetcher(iter(range(10**9)), 2, 5)
    next(prefetcher)
    del prefetcher
    assert not threads()


def test_interpreter_exit_with_a_running_thread():
    program = (
        "from loader.prefetch import Prefetcher\n"
        "import itertools, time\n"
        "def source():\n"
        "    for i in itertools.count():\n"
        "        time.sleep(0.001)\n"
        "        yield bytes(1000)\n"
        "kept = Prefetcher(source(), 3, 5)\n"
        "next(kept)\n"
        "print('done')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=os.getcwd()
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
