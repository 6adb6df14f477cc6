"""Epochs that other processes count."""

import multiprocessing
import os
import pickle

import pytest

from loader.passes import Passes
from shardgen.errors import UserError


def test_each_worker_counts_its_own_passes():
    passes = Passes()
    assert [passes.begin(0), passes.begin(1), passes.begin(0)] == [0, 0, 1]
    assert passes.next_epoch == 2
    passes.reset(7, b"state")
    assert (passes.first_epoch, passes.next_epoch, passes.state(), passes.generation) == (7, 7, b"state", 1)
    assert passes.begin(1) == 0
    passes.reset(3)
    assert passes.state() == b""
    with pytest.raises(UserError, match="worker 5000"):
        passes.begin(5000)
    with pytest.raises(UserError, match="300000 bytes"):
        passes.reset(0, bytes(300_000))


def _child(passes, queue):
    queue.put((passes.begin(2), passes.first_epoch, passes.state()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_share_it(method):
    context = multiprocessing.get_context(method)
    passes, queue = Passes(), context.Queue()
    passes.reset(4, b"here")
    for before in range(2):
        child = context.Process(target=_child, args=(passes, queue))
        child.start()
        assert queue.get(timeout=60) == (before, 4, b"here")
        child.join(30)
    assert passes.next_epoch == 6


def test_a_copy_that_outlives_it_starts_with_its_epoch():
    passes = Passes()
    passes.reset(4)
    pickled = pickle.dumps(passes)
    fd = passes._fd
    del passes
    with pytest.raises(OSError):
        os.fstat(fd)  # nothing is kept open
    assert pickle.loads(pickled).next_epoch == 4
