"""Windows against a plain loop over rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loader import windows
from loader.keys import hash_ids, pick
from loader.windows import Rows, cut
from shardgen.batching import window_counts
from shardgen.buckets import TokenBudget


def naive_batches(rows: Rows, rows_at: np.ndarray, lookahead: int) -> list[list[int]]:
    """Full batches as lists of row numbers, window by window."""
    groups = int(rows.group.max()) + 1
    share = 1 << 20
    fill = [
        sum(share // int(rows_at[n]) for n in rows.length[rows.group == g]) / share for g in range(groups)
    ]
    counts = [int((rows.group == g).sum()) for g in range(groups)]
    num_windows = window_counts(np.array(counts), np.array(fill), lookahead)
    result, number = [], 0
    for g in range(groups):
        members = np.flatnonzero(rows.group == g)
        window = pick(rows.hash[members], int(num_windows[g]))
        for w in range(int(num_windows[g])):
            inside = sorted(
                members[window == w].tolist(),
                key=lambda r: (-rows.length[r], int(rows.hash[r]) & 0xFFFFFFFF, r),
            )
            full = [k for k, r in enumerate(inside) if k + rows_at[rows.length[r]] <= len(inside)]
            if number % 2 == 0:  # from the long end, row by row
                start = 0
                while start in full:
                    n = int(rows_at[rows.length[inside[start]]])
                    result.append(inside[start : start + n])
                    start += n
            else:  # from the short end: the last full batch that ends in time
                end = len(inside)
                while fit := [k for k in full if k + rows_at[rows.length[inside[k]]] <= end]:
                    n = int(rows_at[rows.length[inside[fit[-1]]]])
                    result.append(inside[fit[-1] : fit[-1] + n])
                    end = fit[-1]
            number += 1
    return result


def naive_running(rows: Rows, rows_at: np.ndarray) -> list[list[int]]:
    result = []
    for g in range(int(rows.group.max()) + 1):
        members = sorted(np.flatnonzero(rows.group == g).tolist(), key=lambda r: int(rows.hash[r]))
        batch, longest = [], 0
        for r in members:
            longest = max(longest, int(rows.length[r]))
            if batch and len(batch) + 1 > rows_at[longest]:
                result.append(batch)
                batch, longest = [], int(rows.length[r])
            batch.append(r)
        if batch and len(batch) == rows_at[longest]:
            result.append(batch)
    return result


@st.composite
def pools(draw):
    length = np.array(draw(st.lists(st.integers(1, 60), min_size=1, max_size=120)))
    group = np.array(draw(st.lists(st.integers(0, 2), min_size=len(length), max_size=len(length))))
    key = draw(st.integers(0, 1 << 32))
    return Rows(length=length, hash=hash_ids(np.arange(len(length)), key), group=group)


@settings(max_examples=300, deadline=None)
@given(pools(), st.integers(60, 400), st.sampled_from([1, 2, 3, 8]), st.sampled_from([None, 1, 3]))
def test_cuts_are_those_of_a_plain_loop(rows, budget, lookahead, max_batch_size):
    limits = TokenBudget(tokens=budget, max_batch_size=max_batch_size)
    rows_at = limits.max_rows(np.arange(61))
    cuts = cut(rows, rows_at, lookahead)
    assert sorted(cuts.order.tolist()) == list(range(len(rows.length)))
    got = [cuts.order[a:b].tolist() for a, b in zip(cuts.start, cuts.stop, strict=True)]
    expected = naive_running(rows, rows_at) if lookahead == 1 else naive_batches(rows, rows_at, lookahead)
    assert sorted(got) == sorted(expected)


def test_equal_lengths_meet_at_random():
    """Of rows of one length neither the row number nor anything else decides who shares a batch."""
    count = 4096
    rows = Rows(
        length=np.full(count, 10), hash=hash_ids(np.arange(count), 1), group=np.zeros(count, np.int64)
    )
    cuts = cut(rows, TokenBudget(tokens=80).max_rows(np.arange(11)), 64)
    pairs = [abs(a - b) for s in cuts.start for a, b in [cuts.order[s : s + 2]]]
    assert 0.25 * count < np.mean(pairs) < 0.42 * count  # a third, for two random rows


def test_wide_rows_take_another_road_to_the_same_order(monkeypatch):
    """Where lengths leave no room for random bits in one packed word, rows are sorted column by column."""
    count = 3000
    order = np.argsort(hash_ids(np.arange(count), 4))
    rows = Rows(length=order + 1, hash=hash_ids(np.arange(count), 9), group=order % 3)
    rows_at = TokenBudget(tokens=20_000).max_rows(np.arange(count + 1))
    packed = cut(rows, rows_at, 8)
    monkeypatch.setattr(windows, "_MIN_TIE_BITS", 65)
    by_column = cut(rows, rows_at, 8)
    assert len(packed.start) > 100
    for name in ("order", "start", "stop"):
        assert np.array_equal(getattr(packed, name), getattr(by_column, name))
