"""Static shapes: every batch of a bucket is (rows, boundary), and what is missing is filled.

A bucket with boundary b and n = max_rows(b) costs ceil(samples / n) batches of (n, b), whatever the order of
its rows. The boundaries are an exact dynamic programme over all distinct lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardgen.buckets import TokenBudget
from shardgen.cells import FloatArray, IntArray
from shardgen.lengths import Histogram

# Upper boundaries that are searched together.
CHUNK = 64


def static_batches(
    num_samples: FloatArray, upper: IntArray, budget: TokenBudget
) -> tuple[FloatArray, FloatArray]:
    """Padded tokens and cost of buckets with static shapes.

    Args:
        num_samples: Samples of each bucket, shape (K,) or any that broadcasts against ``upper``.
        upper: Boundary of each bucket in tokens, at which the budget allows a row.
        budget: The limits of a batch.

    Returns:
        Both float64: exact below 2^53.
    """
    rows = budget.max_rows(upper).astype(np.float64)
    length = budget.padded_length(upper).astype(np.float64)
    batches = np.ceil(num_samples / rows)
    return batches * rows * length, batches * budget.cost_model.cost(rows, length)


def static_partitions(histogram: Histogram, budget: TokenBudget) -> Iterator[tuple[IntArray, float]]:
    """The best 1, 2, ... buckets, until every distinct length has its own.

    Yields:
        Distinct lengths up to and including each bucket, int64, shape (K,), and the cost.
    """
    num_distinct = len(histogram.lengths)
    up_to = np.append(0.0, np.cumsum(histogram.counts.astype(np.float64)))  # (D + 1,)
    rows = budget.max_rows(histogram.lengths).astype(np.float64)
    price = budget.cost_model.cost(rows, budget.padded_length(histogram.lengths))  # of a batch, (D,)
    # cost[j] of the first j distinct lengths; infinite where they are too few for the buckets.
    cost = np.append(np.inf, np.ceil(up_to[1:] / rows) * price)
    came_from: list[IntArray] = []
    for num_buckets in range(1, num_distinct + 1):
        if num_buckets > 1:
            cost, before = _add_bucket(cost, up_to, rows, price, num_buckets)
            came_from.append(before)
        ends = [num_distinct]
        for before in reversed(came_from):
            ends.append(int(before[ends[-1]]))
        yield np.array(ends[::-1], np.int64), float(cost[-1])


def _add_bucket(
    cost: FloatArray, up_to: FloatArray, rows: FloatArray, price: FloatArray, num_buckets: int
) -> tuple[FloatArray, IntArray]:
    """Best cost with one more bucket: the minimum over i < j of ``cost[i] + ceil((up_to[j] - up_to[i]) / n) *
    price``.

    Without the rounding the choices i are straight lines in the price of a row, and rounding adds at most one
    batch. So for a chunk of ends j only those i matter whose line comes within one batch of a good one at
    either end of the chunk's prices; there are few, and they are compared exactly.
    """
    best = np.full_like(cost, np.inf)
    before = np.zeros(len(cost), np.int64)
    first = num_buckets - 1  # every bucket holds a length at least
    for begin in range(num_buckets, len(cost), CHUNK):
        ends = np.arange(begin, min(begin + CHUNK, len(cost)))
        n, batch = rows[ends - 1], price[ends - 1]
        low, high = float((batch / n).min()), float((batch / n).max())
        lines = cost[first:begin]
        fixed = int(np.argmin(lines - up_to[first:begin] * (0.5 * (low + high))))  # good throughout the chunk
        ahead = up_to[first:begin] - up_to[first + fixed]
        gain = lines - lines[fixed] - np.maximum(ahead * low, ahead * high)
        near = np.append(first + np.flatnonzero(gain < float(batch.max())), np.arange(begin, ends[-1]))
        batches = np.ceil((up_to[ends, None] - up_to[near]) / n[:, None])  # (ends, near)
        total = cost[near] + batches * batch[:, None]
        total[near >= ends[:, None]] = np.inf
        chosen = total.argmin(axis=1)
        best[ends] = total[np.arange(len(ends)), chosen]
        before[ends] = near[chosen]
    return best, before
