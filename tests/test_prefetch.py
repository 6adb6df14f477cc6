"""Reading ahead changes neither items nor order, and leaves no thread behind."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgen.prefetch import prefetch


@given(st.lists(st.one_of(st.integers(), st.none())), st.integers(1, 3))
def test_the_same_items_in_the_same_order(items, depth):
    assert list(prefetch(iter(items), depth)) == items


def test_an_exception_comes_where_its_item_would():
    def source():
        yield 1
        yield 2
        raise KeyError("third")

    found = []
    with pytest.raises(KeyError, match=r"third"):
        for item in prefetch(source()):
            found.append(item)
    assert found == [1, 2]


def test_it_reads_ahead_but_no_further_than_asked():
    made = []
    second = threading.Event()

    def source():
        for i in range(10):
            made.append(i)
            if i == 1:
                second.set()
            yield i

    items = prefetch(source(), 1)
    assert next(items) == 0
    assert second.wait(10)  # the second is made although nobody asked for it
    items.close()
    assert len(made) <= 3  # one handed out, one waiting, one in the making


def test_leaving_early_ends_the_thread_and_closes_the_source():
    before = threading.active_count()

    def endless():
        while True:
            yield 0

    for _ in prefetch(endless()):
        break
    # `for` drops the generator, whose clean-up joins the thread
    assert threading.active_count() == before
