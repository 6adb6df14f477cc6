"""Expected batches of a shuffled bucket (lookahead 1), by exact order statistics.

Rows are draws from the bucket's lengths, with distribution function F. A batch grows while
``rows <= max_rows(longest so far)``. With ``c(n)`` the longest length of which n rows are allowed, and G the
distribution of a batch's first row, the number N of rows and the longest M_n of the first n follow

    P(N >= n)           = G(c(n)) F(c(n))^(n-1)
    P(N >= n, M_n <= x) = G(x) F(x)^(n-1)                for x <= c(n).

G is not F: the row that closes a batch opens the next one, and it is the long rows that close batches. A row
y closes a batch of n rows when M_n or y exceeds ``c(n+1)``, so G is the fixed point, iterated from F, of

    G(x) = F(x) h + sum over n with c(n+1) < x of P(M_n <= c(n+1)) (F(x) - F(c(n+1))),
    h    = sum over n of P(N >= n) - P(M_n <= c(n+1)).

Costs follow by renewal: the cost of a row is E[N f(M_N)] / E[N], where f is the cost of a padded row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardgen.cells import Cells, FloatArray, IntArray

# Batch sizes and longest rows that are rarer than this are left out of the sums.
RARE = 1e-12
# Each damped step keeps at most a third of the error: closing rows make long and short first rows alternate.
FIRST_ROW_STEPS = 6


def shuffled_rows(cells: Cells, upper: int, lower: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """What to expect of buckets with one upper boundary.

    Args:
        cells: The lengths.
        upper: The last cell of every bucket.
        lower: The cell before the first of each bucket, ascending, below ``upper``, shape (L,).

    Returns:
        Rows of a batch, padded tokens of a row, and cost of a row without the overhead of its batch,
        each float64 of shape (L,).
    """
    total = cells.count[upper] - cells.count[lower]
    fewest = int(cells.rows[upper])
    mean_rows = np.minimum(total, fewest)
    value = np.empty((len(lower), 2))  # (L, padded and cost)
    value[:] = cells.value[upper, :2]
    several = int(np.searchsorted(-total, -fewest, side="left"))  # the others fit one batch
    if several:
        mean_rows[:several], value[:several] = _several_batches(cells, upper, lower[:several])
    return mean_rows, value[:, 0], value[:, 1]


def _several_batches(cells: Cells, upper: int, lower: IntArray) -> tuple[FloatArray, FloatArray]:
    """Rows of a batch, shape (L,), and value of a row, shape (L, 2), of buckets above one batch."""
    fewest = int(cells.rows[upper])
    count, total = cells.count[upper], cells.count[upper] - cells.count[lower]
    # Without replacement the chance of n rows up to x is a product of (up to x - i) / (total - i). Its middle
    # factor to the power n agrees to second order, and is one distribution function for all n near `fewest`.
    per_sample = 1.0 / (total - 0.5 * (fewest - 1))

    def share(up_to: FloatArray) -> FloatArray:
        """F, shape (L, ...), at lengths with ``up_to`` samples up to them, shape (1 or L, ...)."""
        up_to_share: FloatArray = np.clip(1.0 - (count - up_to) * per_sample[:, None], 0.0, 1.0)
        return up_to_share

    most = _most_rows(cells, lower, fewest, share)  # (L,), not rising
    sizes = np.arange(fewest, most[0] + 2)  # n, and one beyond: (T + 1,)
    at_limit = share(cells.count_allowing(sizes)[None, :])  # F(c(n)), (L, T + 1)
    log = np.log(np.maximum(at_limit, np.finfo(float).tiny))
    fill = np.exp((sizes[:-1] - 1) * log[:, :-1])  # F(c(n))^(n-1), (L, T)
    fill_next = np.exp((sizes[:-1] - 1) * log[:, 1:])  # F(c(n+1))^(n-1)
    first = at_limit  # G(c(n))
    for _ in range(FIRST_ROW_STEPS):
        stays = first[:, 1:] * fill_next  # P(M_n <= c(n+1)), (L, T)
        closes = (first[:, :-1] * fill - stays).sum(axis=1, keepdims=True)
        slope = closes + _from_right(stays)
        level = _from_right(stays * at_limit[:, 1:])
        first = 0.5 * (first + at_limit * slope - level)  # (L, T + 1)
    reach = first[:, :-1] * fill  # P(N >= n), (L, T)
    reach[:, 0] = 1.0

    # E[N f(M_N)] = f(upper) E[N] - sum over cells x below upper of E[N; M_N <= x] (f(x + 1) - f(x)), where
    # E[N; M_N <= x] = sum over n < m(x) of n H(n, x) (1 - F(c(n+1))) + m H(m, x) + sum over n > m(x) of P(N
    # >= n) with m(x) = max_rows(x) and H(n, x) = G(x) F(x)^(n-1).
    mean_rows = fewest - 1 + reach.sum(axis=1)
    value = mean_rows[:, None] * cells.value[upper, :2]
    inside = np.searchsorted(-cells.rows[1:upper], -sizes, side="right")  # cells with m(x) >= n, (T + 1,)
    value -= reach @ (cells.value[upper, :2] - cells.value[inside[:-1] + 1, :2])

    begin = int(
        np.searchsorted(cells.count, count - (1.0 - RARE ** (1.0 / max(fewest - 1, 1))) / per_sample[0])
    )
    begin = max(min(begin, upper - 1), 1)
    step = np.diff(cells.value[begin : upper + 1, :2], axis=0)  # (x, 2)
    below = share(cells.count[None, begin:upper])  # F(x), (L, x)
    column = np.clip(cells.rows[begin:upper] - fewest, 0, len(sizes) - 1)
    shape = (below * slope[:, column] - level[:, column]) * _power(below, fewest - 1)  # H(fewest, x)
    inside = np.maximum(inside - (begin - 1), 0)
    alive = np.searchsorted(-most, -sizes, side="right")  # buckets with batches of n rows
    for j, n in enumerate(sizes[:-1].tolist()):
        here, rest, last = alive[j], inside[j + 1], inside[j]
        sums = shape[:here, rest:last] @ step[rest:last]
        if rest:
            sums += (1.0 - at_limit[:here, j + 1, None]) * (shape[:here, :rest] @ step[:rest])
            shape[:here, :rest] *= below[:here, :rest]
        value[:here] -= n * sums
    return mean_rows, value / mean_rows[:, None]


def _most_rows(
    cells: Cells, lower: IntArray, fewest: int, share: Callable[[FloatArray], FloatArray]
) -> IntArray:
    """Rows of the largest batch of each bucket that is not too rare, shape (L,): bisect F(c(n))^(n-1)."""
    low = np.full(len(lower), fewest)
    high = np.maximum(cells.rows_at[cells.ends[lower]], fewest)  # those of the shortest sample
    while (low < high).any():
        middle = (low + high + 1) // 2
        at_limit = share(cells.count_allowing(middle)[:, None])[:, 0]
        alive = (middle - 1) * np.log(np.maximum(at_limit, np.finfo(float).tiny)) > np.log(RARE)
        low, high = np.where(alive, middle, low), np.where(alive, high, middle - 1)
    return low


def _from_right(terms: FloatArray) -> FloatArray:
    """Sums of each term and those right of it, with a 0 appended: (L, T) -> (L, T + 1)."""
    sums = np.zeros((terms.shape[0], terms.shape[1] + 1))
    np.cumsum(terms[:, ::-1], axis=1, out=sums[:, -2::-1])
    return sums


def _power(base: FloatArray, exponent: int) -> FloatArray:
    """Integer power by squaring: several times faster than ``**`` on arrays."""
    result = np.ones_like(base)
    square = base.copy()
    while exponent:
        if exponent & 1:
            result *= square
        exponent >>= 1
        if exponent:
            square *= square
    return result
