"""Expected batches of a bucket with a lookahead above 1: windows of sorted rows.

A bucket's rows fall at random into windows worth about W batches. A window is sorted by length and cut into
full batches, every other one from its short end; what fills no batch goes into the windows of a next round.

A window is the sorted bucket with each row kept with chance 1 / windows. So a batch has as many rows as the
length of its longest allows, the next one opens a gamma-distributed number of ranks further, and its other
rows lie evenly in between. We follow a few windows from batch to batch with fixed, stratified chances: no row
is ever drawn, so the work depends on W alone, and equal questions have equal answers.
"""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np

from shardgen.batching import window_counts
from shardgen.cells import Cells, FloatArray, IntArray

# Batches to follow per bucket and direction: the error of the expected padding falls with their square root.
NUM_BATCHES = 512
MIN_CHAINS = 2
# More leaves next to no padding to estimate, and takes as many steps.
MAX_LOOKAHEAD = 4096
# Ranks are compared in steps of one row over this.
RANK_STEPS = 65536


def windowed_rows(
    cells: Cells, upper: IntArray, lower: IntArray, lookahead: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """What to expect of buckets.

    Args:
        cells: The lengths.
        upper: The last cell of each bucket, shape (L,).
        lower: The cell before the first of each, below ``upper``, shape (L,).
        lookahead: Batches per window, above 1.

    Returns:
        Rows of a batch, padded tokens of a row, and cost of a row without the overhead of its batch,
        each float64 of shape (L,).
    """
    longest_first = np.arange(int(upper.max()), int(lower.min()), -1)  # cells, (x,)
    value, rows = cells.value[longest_first], cells.mean_rows[longest_first]  # (x, 3), (x,)
    inside = (longest_first > lower[:, None]) & (longest_first <= upper[:, None])
    amount = np.diff(cells.count)[longest_first - 1] * inside  # rows of each cell, (L, x)
    total = amount.sum(axis=1)
    spent = amount @ value  # every row alone, (L, 3); padding is added to it
    # Windows also depend on the mean rows per batch of all buckets together. What a round leaves is taken as
    # half a batch per window of any bucket, so that the estimate of one needs not know the others.
    weight = np.diff(cells.count) * cells.value[1:, 2]
    lookahead = min(lookahead, MAX_LOOKAHEAD)
    num_chains = max(MIN_CHAINS, NUM_BATCHES // lookahead)
    todo = np.arange(len(lower))
    while len(todo):
        chances = _chances(num_chains)
        batches = amount @ value[:, 2]
        num_rows = amount.sum(axis=1)
        mean_rows = float(weight @ cells.mean_rows[1:] / weight.sum())
        counts = window_counts(num_rows, batches, lookahead, mean_rows=mean_rows)
        weight = weight * (cells.mean_rows[1:] / mean_rows) ** 0.75  # the windows, as window_counts has them
        windows = counts[:, None].astype(np.float64)  # (L, 1)
        several = windows[:, 0] > 1.0
        padding, kept = _cut_from_long_end(_Windows(amount / windows, windows, value, rows), chances)
        spent[todo] += np.where(several[:, None], 0.5, 1.0) * windows * padding
        todo, amount, windows, kept = todo[several], amount[several], windows[several], kept[several]
        if len(todo):
            padding, kept_short = _cut_from_short_end(
                _Windows(amount / windows, windows, value, rows), chances
            )
            spent[todo] += 0.5 * windows * padding
            amount = amount * (0.5 * (kept + kept_short))
        num_chains = max(MIN_CHAINS, num_chains // 4)  # rounds matter less and less
    spent = np.minimum(spent, total[:, None] * cells.value[upper])  # no row costs more than the longest
    return total / spent[:, 2], spent[:, 0] / total, spent[:, 1] / total


class _Windows:
    """One expected window of each of L buckets. Its rows have ranks from the longest on, not always whole.

    Attributes:
        amount: Rows of a window by cell, longest first, shape (L, x).
        step: Distance of neighbouring rows of the bucket in ranks of a window, ``1 / windows``, shape (L, 1).
        spread: Deviation of ranks over that of a thin random sample, shape (L, 1); 0 when a window holds all
            rows.
        size: Rows of a window, shape (L, 1).
    """

    def __init__(self, amount: FloatArray, windows: FloatArray, value: FloatArray, rows: FloatArray) -> None:
        self.amount, self.value, self.rows = amount, value, rows
        self.step = 1.0 / windows
        self.spread = np.sqrt(1.0 - self.step)
        self.end = np.cumsum(amount, axis=1)  # (L, x)
        self.start = np.concatenate((np.zeros((len(amount), 1)), self.end[:, :-1]), axis=1)
        self.size = self.end[:, -1:]
        self.before = np.cumsum(amount[..., None] * value, axis=1) - amount[..., None] * value  # (L, x, 3)
        self.first_cell = (amount > 0.0).argmax(axis=1)[:, None]
        # All buckets share one table, each in its own range, so that one search serves them all. In whole
        # numbers, so that what is found for a bucket does not hang on its company.
        self.row = np.arange(len(amount))[:, None]
        self.range = (_whole(self.size.max() + rows.max()) + 1) * self.row
        self.end_table = (_whole(self.end) + self.range).ravel()
        # Where a batch that opens in a cell ends at least; never falls.
        self.soonest_table = (_whole(self.start + rows) + self.range).ravel()

    def search(self, table: IntArray, rank: FloatArray, offset: int = 0) -> IntArray:
        """Entries up to each rank in the bucket's part of a table, less ``offset``, (L, R)."""
        num_cells = len(self.rows)
        found = np.searchsorted(table, (_whole(rank) + self.range).ravel(), side="right")
        found = found.reshape(rank.shape) - self.row * num_cells - offset
        cell: IntArray = np.clip(found, self.first_cell, num_cells - 1)
        return cell

    def cell_at(self, rank: FloatArray) -> IntArray:
        return self.search(self.end_table, rank)

    def values_before(self, rank: FloatArray, cell: IntArray) -> FloatArray:
        """Values of all rows before each rank, (L, R, 3)."""
        within = rank - self.start[self.row, cell]
        values: FloatArray = self.before[self.row, cell] + within[..., None] * self.value[cell]
        return values

    def padding(
        self, others: FloatArray, opens: IntArray, values: FloatArray, ranks: FloatArray
    ) -> FloatArray:
        """What rows cost above their own values when padded to the row that opens the batch, (L, R, 3).

        Args:
            others: Rows of the batch but the one that opens it, shape (L, R).
            opens: Cell of that row.
            values: Values of all rows of the range in which the others lie evenly, shape (L, R, 3).
            ranks: Ranks of that range, (L, R).
        """
        others = np.clip(others, 0.0, np.maximum(ranks, 0.0) / self.step)
        mean = values / np.where(others > 0.0, ranks, 1.0)[..., None]
        padding: FloatArray = others[..., None] * np.maximum(self.value[opens] - mean, 0.0)
        return padding


def _cut_from_long_end(window: _Windows, chances: IntArray) -> tuple[FloatArray, FloatArray]:
    """Padding of a window's batches, (L, 3), and the share of each cell's rows that fill none, (L, x).

    A single window, which nothing follows, also pays for its last rows.
    """
    single, size = window.spread == 0.0, window.size
    rank = _first_rank(window.step, chances[0])
    padding, stop = np.zeros((*rank.shape, 3)), size + np.zeros_like(rank)
    cell = window.cell_at(rank)
    before, t = window.values_before(rank, cell), 0
    while (rank < size).any():
        t += 1
        rows = window.rows[cell]
        following = rank + _wait(rows, window.spread, chances[t % len(chances)])
        unfilled = (following > size + 1.0 - window.step) & (rank < size)
        stop = np.where(unfilled & ~single, rank, stop)
        others = np.where(unfilled, np.where(single, size - rank - 1.0, 0.0), rows - 1.0)
        others = np.where(rank < size, others, 0.0)
        following = np.minimum(following, size)
        after_cell = window.cell_at(following)
        after = window.values_before(following, after_cell)
        values = after - before - window.step[..., None] * window.value[cell]
        padding += window.padding(others, cell, values, following - rank - window.step)
        rank, cell, before = following, after_cell, after
    return padding.mean(axis=1), 1.0 - _share_before(window, stop, np.ones_like(stop))


def _cut_from_short_end(window: _Windows, chances: IntArray) -> tuple[FloatArray, FloatArray]:
    """As above for windows cut from their short end: the last row whose full batch still fits opens it.

    The rows that lie between its end and the batch before fill none, nor do the longest rows of the window.
    """
    longest = _first_rank(window.step, chances[0])  # (L, R)
    stop = window.size + np.zeros_like(longest)  # the next batch's rows lie before this rank
    padding = np.zeros((*stop.shape, 3))
    gaps: list[tuple[FloatArray, ...]] = []  # ranks from and to, and how densely rows are left there

    def opening(end: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The last rank whose full batch ends by ``end``, and by how much it could end later."""
        cell = window.search(window.soonest_table, end, offset=1)
        last, by_count = window.end[window.row, cell], end - window.rows[cell]
        return np.minimum(last, by_count), np.maximum(by_count - last, 0.0)

    t = 0
    while (stop > 0.0).any():
        t += 1
        # Chance moves the end of the batch instead of its many rows.
        expected = np.maximum(stop - opening(stop)[0], 1.0)
        end = np.maximum(stop + expected - _wait(expected, window.spread, chances[t % len(chances)]), 0.0)
        opens, slack = opening(end)
        # Where longer rows allow fewer, the batch opens at the last of these; else wherever the count says.
        before_it = window.step + _first_rank(window.step, chances[(t + 1) % len(chances), ::-1])
        others_from = np.where(slack > 0.0, opens, opens + window.step)
        opens = np.maximum(np.where(slack > 0.0, opens - before_it, opens), longest)
        others_from = np.maximum(others_from, opens + window.step)
        some = stop > 0.0
        cell = window.cell_at(opens)
        rows = window.rows[cell]
        # The longest row is the first, not the one at its expected rank.
        count = end - longest + 1.0 - window.step
        filled = some & ((opens > longest) | (rows <= count + 0.5))
        until = np.where(filled, stop - np.maximum(end - opens - rows, 0.0), 0.0).clip(0.0)
        few = np.minimum(count, rows - 1.0).clip(0.0) / np.maximum(stop, 1e-9)
        gaps.append((until, stop, some * np.where(filled, 1.0, few)))
        values = window.values_before(until, window.cell_at(until))
        values = values - window.values_before(others_from, window.cell_at(others_from))
        padding += window.padding(np.where(filled, rows - 1.0, 0.0), cell, values, until - others_from)
        stop = np.where(filled, np.minimum(opens, stop - 0.5).clip(0.0), 0.0)
    begin, finish, density = (np.concatenate(parts, axis=1) for parts in zip(*gaps, strict=True))
    left = _share_before(window, finish, density) - _share_before(window, begin, density)
    return padding.mean(axis=1), np.clip(left * len(gaps), 0.0, 1.0)


def _share_before(window: _Windows, stop: FloatArray, density: FloatArray) -> FloatArray:
    """Mean share of each cell's rows, (L, x), that lie before ranks (L, R), of which ``density`` count."""
    num_buckets, num_cells = window.amount.shape
    cell = window.cell_at(stop)
    part = (stop - window.start[window.row, cell]) / np.maximum(window.amount[window.row, cell], 1e-300)
    flat = (window.row * num_cells + cell).ravel()

    def by_cell(weight: FloatArray) -> FloatArray:
        sums = np.bincount(flat, weight.ravel(), num_buckets * num_cells).astype(np.float64)
        return sums.reshape(num_buckets, num_cells)

    whole = density.sum(axis=1, keepdims=True) - np.cumsum(by_cell(density), axis=1)  # stops in later cells
    share: FloatArray = (whole + by_cell(density * np.clip(part, 0.0, 1.0))) / stop.shape[1]
    return share


def _whole(rank: FloatArray) -> IntArray:
    whole: IntArray = np.rint(rank * RANK_STEPS).astype(np.int64)
    return whole


def _first_rank(step: FloatArray, chance: IntArray) -> FloatArray:
    """Ranks to the next row, (L, R): geometric, for rows kept with chance ``step`` of (L, 1)."""
    beyond = -np.log1p(-(chance + 0.5) / len(chance))  # (R,)
    with np.errstate(divide="ignore"):
        rank: FloatArray = np.floor(beyond / -np.log1p(-step)) * step
    return rank


def _wait(events: FloatArray, spread: FloatArray, chance: IntArray) -> FloatArray:
    """Gamma-distributed waits for ``events`` from normal deviates, by Wilson and Hilferty's cube (1931)."""
    ninth = spread * spread / (9.0 * events)
    root = np.maximum(1.0 - ninth + _normal(len(chance))[chance] * np.sqrt(ninth), 0.0)
    wait: FloatArray = events * root**3
    return wait


@lru_cache(maxsize=16)
def _normal(num_strata: int) -> FloatArray:
    """Normal deviates of the middles of equal strata."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / num_strata) for i in range(num_strata)])


@lru_cache(maxsize=16)
def _chances(num_chains: int) -> IntArray:
    """Strata 0..R-1 of every step, shuffled: each chance occurs once in a step, shape (steps, R)."""
    return np.random.Generator(np.random.PCG64(0)).random((256, num_chains)).argsort(axis=1)
