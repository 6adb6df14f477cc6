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

Batches of thousands of rows are not counted one by one: the sizes n_j go in steps s_j of at most 1/64 of
the size, and between two of them the limit is that of the middle, c_j. A batch that has n_j rows up to c_j
then takes a further row at a time while it stays below c_j. With s_j = 1 these are the sums above.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardgen.cells import Cells, FloatArray, IntArray

# Batch sizes and longest rows that are rarer than this are left out of the sums.
RARE = 1e-12
# Each damped step keeps at most a third of the error: closing rows make long and short first rows alternate.
FIRST_ROW_STEPS = 8
# Batch sizes are counted in steps of their size over this.
SIZE_STEPS = 64


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
    sizes = _sizes(fewest, int(most[0]))  # n_j, and one beyond: (T + 1,)
    steps = np.diff(sizes)
    middle = sizes[:-1] + (steps + 1) // 2
    at_limit = share(cells.count_allowing(middle)[None, :])  # F(c_j), (L, T)
    log = np.log(np.maximum(at_limit, np.finfo(float).tiny))
    fill = np.exp((sizes[:-1] - 1) * log)  # F(c_j)^(n_j - 1)
    through = np.exp(steps * log)  # F(c_j)^s_j
    several = (1.0 - through) / np.maximum(1.0 - at_limit, 1e-300)
    tries = np.where(steps == 1, 1.0, several)  # rows drawn after the first n_j that the limit still allows
    first = at_limit  # G(c_j)
    for _ in range(FIRST_ROW_STEPS):
        stays = first * fill  # P(N >= n_j, M <= c_j), (L, T)
        reach = np.concatenate((np.ones((len(lower), 1)), (stays * through)[:, :-1]), axis=1)  # P(N >= n_j)
        closes = (reach - stays).sum(axis=1, keepdims=True)
        slope = closes + _from_right(stays * tries)
        level = _from_right(stays * tries * at_limit)
        first = 0.5 * (first + at_limit * slope[:, :-1] - level[:, :-1])
    stays = first * fill
    added = stays * at_limit * tries  # rows that a batch takes on its way from n_j to n_(j+1)

    # E[N f(M_N)] = f(upper) E[N] - sum over cells x below upper of E[N; M_N <= x] (f(x + 1) - f(x)). With J
    # the first j whose c_j is below x and H_j(x) = G(x) F(x)^(n_j - 1), E[N; M_N <= x] is the sum over j < J
    # of n H_j(x) (1 - F(c_j)) for each row tried, plus n_J H_J(x), plus the rows added from J on.
    mean_rows = fewest + added.sum(axis=1)
    value = mean_rows[:, None] * cells.value[upper, :2]
    inside = np.searchsorted(-cells.rows[1:upper], -middle, side="right")  # cells up to c_j
    value -= added @ (cells.value[upper, :2] - cells.value[inside + 1, :2])

    reachable = (1.0 - RARE ** (1.0 / max(fewest - 1, 1))) / per_sample[0]
    begin = max(min(int(np.searchsorted(cells.count, count - reachable)), upper - 1), 1)
    rise = np.diff(cells.value[begin : upper + 1, :2], axis=0)  # (x, 2)
    below = share(cells.count[None, begin:upper])  # F(x), (L, x)
    column = np.searchsorted(middle, cells.rows[begin:upper], side="right")  # J
    shape = (below * slope[:, column] - level[:, column]) * _power(below, fewest - 1)  # H_0(x)
    inside = np.append(upper - begin, np.maximum(inside - (begin - 1), 0))
    alive = np.searchsorted(-most, -sizes, side="right")  # buckets with batches of n_j rows
    for j, (n, step) in enumerate(zip(sizes[:-1].tolist(), steps.tolist(), strict=True)):
        here, last, rest = alive[j], inside[j], inside[j + 1]
        value[:here] -= n * (shape[:here, rest:last] @ rise[rest:last])
        if rest:
            kept, share_below = shape[:here, :rest], below[:here, :rest]
            closing = (n + 0.5 * (step - 1)) * (1.0 - at_limit[:here, j, None])
            if step == 1:
                value[:here] -= closing * (kept @ rise[:rest])
                kept *= share_below
            else:
                stay = _power(share_below, step)
                tried = (1.0 - stay) / np.maximum(1.0 - share_below, 1e-300)
                value[:here] -= closing * ((kept * tried) @ rise[:rest])
                kept *= stay
    return mean_rows, value / mean_rows[:, None]


def _sizes(fewest: int, most: int) -> IntArray:
    """Batch sizes from ``fewest`` to beyond ``most``, int64, shape (T + 1,)."""
    sizes = [fewest]
    while sizes[-1] <= most:
        sizes.append(sizes[-1] + max(1, sizes[-1] // SIZE_STEPS))
    return np.array(sizes, np.int64)


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
