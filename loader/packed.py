"""Fill batches across buckets for attention over variable lengths: nothing is padded.

Inside a window of many batches the rows go, longest first, to the lightest batches: each batch gets its
share of every length, where best fit alone would make batches of one length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.deal import Dealt, Layout
from loader.options import PlanOptions
from loader.windows import Cuts, Rows

# A batch below this share of the budget is dissolved and its rows go to the next round.
_FULL = 0.99
# With fewer rows per batch than this, equal shares leave holes: best fit over more rows is used.
_FEW_ROWS = 12
_BEST_FIT_ROWS = 1024
_NEVER = np.iinfo(np.int64).max
_WHOLE = 1 << 24


def row_cost(length: NDArray[np.int64], options: PlanOptions) -> NDArray[np.int64]:
    """Scaled cost of each row alone, without the overhead of its batch; a packed batch costs their sum."""
    cost = options.cost_model()
    return np.asarray(cost.scaled(1, length) - cost.scaled(0, length))


@dataclass
class _Bins:
    """Open batches of many windows: free tokens, cost and rows, each of shape (num_windows, num_bins)."""

    tokens: NDArray[np.int64]
    cost: NDArray[np.int64]
    rows: NDArray[np.int64]

    @classmethod
    def open(cls, num_windows: int, num_bins: int, options: PlanOptions) -> _Bins:
        shape = (num_windows, num_bins)
        cost_model = options.cost_model()
        cost = _NEVER >> 1
        if options.cost_budget is not None:
            cost = (options.cost_budget - cost_model.overhead_tokens) * cost_model.scale
        return cls(
            tokens=np.full(shape, options.token_budget),
            cost=np.full(shape, cost),
            rows=np.full(shape, options.max_batch_size or _NEVER >> 1),
        )

    def put(
        self,
        window: NDArray[np.int64],
        bin_: NDArray[np.int64],
        length: NDArray[np.int64],
        cost: NDArray[np.int64],
    ) -> NDArray[np.bool_]:
        """Put one row into each named batch, all distinct, that has room for it; says where it went in."""
        fits = (self.tokens[window, bin_] >= length) & (self.cost[window, bin_] >= cost)
        fits &= self.rows[window, bin_] >= 1
        at = window[fits], bin_[fits]
        self.tokens[at] -= length[fits]
        self.cost[at] -= cost[fits]
        self.rows[at] -= 1
        return np.asarray(fits)


def cut_packed(rows: Rows, options: PlanOptions, lookahead: int) -> Cuts:
    """Full batches over rows, bucket boundaries ignored; ``rows.group`` is the lane.

    Args:
        rows: The rows to place.
        options: Budgets and cost model.
        lookahead: Batches of a window.
    """
    cost = row_cost(rows.length, options)
    share = _share(rows.length, cost, options)
    num_lanes = int(rows.group.max()) + 1
    in_lane = np.bincount(rows.group, weights=share, minlength=num_lanes)  # exact: whole numbers below 2^53
    per_batch = len(share) * _WHOLE / float(share.sum())
    few = per_batch < _FEW_ROWS
    width = max(lookahead, round(_BEST_FIT_ROWS / per_batch)) if few else lookahead
    width = max(1, min(width, int(in_lane.min() / _WHOLE)))
    # Windows of equal content in hash order; what makes no window is random, and waits for the next round.
    order = np.lexsort((rows.hash, rows.group))
    before = np.cumsum(share[order]) - share[order]
    lane_before = np.cumsum(in_lane).astype(np.int64) - in_lane.astype(np.int64)
    per_window = width * _WHOLE
    num_windows = np.maximum(1, in_lane.astype(np.int64) // per_window)
    number = (before - lane_before[rows.group[order]]) // per_window
    taken = number < num_windows[rows.group[order]]
    window = np.full(len(order), -1, np.int64)
    base = np.cumsum(num_windows) - num_windows
    window[order[taken]] = (base[rows.group[order]] + number)[taken]
    bin_of = _place(rows, cost, window, int(num_windows.sum()), width, options, few=few)
    return _collect(rows, bin_of, options)


def _share(length: NDArray[np.int64], cost: NDArray[np.int64], options: PlanOptions) -> NDArray[np.int64]:
    """Part of a batch that each row takes, in units of 1 / ``_WHOLE``, by the limit that binds most."""
    shares = [length * _WHOLE // options.token_budget]
    if options.cost_budget is not None:
        cost_model = options.cost_model()
        limit = (options.cost_budget - cost_model.overhead_tokens) * cost_model.scale
        shares.append((cost / limit * _WHOLE).astype(np.int64))
    if options.max_batch_size is not None:
        shares.append(np.full(len(length), _WHOLE // options.max_batch_size))
    return max(shares, key=lambda s: int(s.sum()))


def _place(
    rows: Rows,
    cost: NDArray[np.int64],
    window: NDArray[np.int64],
    num_windows: int,
    width: int,
    options: PlanOptions,
    *,
    few: bool,
) -> NDArray[np.int64]:
    """Batch of each row, numbered over all windows, or -1; shape (M,)."""
    bin_of = np.full(len(window), -1, np.int64)
    bins = _Bins.open(num_windows, width, options)
    weight = rows.length if options.quadratic_length is None else cost
    for final in (False, True):
        waiting = np.flatnonzero((bin_of < 0) & (window >= 0))
        if len(waiting) == 0:
            break
        rank = (
            rows.length[waiting]
            if not few
            else np.where(_longest_third(rows.length[waiting]), rows.length[waiting], 0)
        )
        order = waiting[np.lexsort((rows.hash[waiting], -rank, window[waiting]))]
        counts = np.bincount(window[order], minlength=num_windows)
        first = np.cumsum(counts) - counts
        if few or final:
            _best_fit(bins, bin_of, order, first, counts, rows.length, cost, width)
        else:
            _by_rounds(bins, bin_of, order, first, counts, rows.length, cost, weight, width)
    return bin_of


def _longest_third(length: NDArray[np.int64]) -> NDArray[np.bool_]:
    threshold = np.sort(length)[len(length) * 2 // 3]
    return np.asarray(length >= threshold)


def _by_rounds(
    bins: _Bins,
    bin_of: NDArray[np.int64],
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
    length: NDArray[np.int64],
    cost: NDArray[np.int64],
    weight: NDArray[np.int64],
    width: int,
) -> None:
    """In each round a window's next ``width`` rows go to its batches: the longest to the lightest."""
    load = np.zeros(bins.tokens.shape, np.int64)
    for begin in range(0, int(counts.max()), width):
        lightest = np.argsort(load, axis=1, kind="stable")
        window, place = np.nonzero(begin + np.arange(width)[None, :] < counts[:, None])
        row = order[first[window] + begin + place]
        bin_ = lightest[window, place]
        fits = bins.put(window, bin_, length[row], cost[row])
        bin_of[row[fits]] = window[fits] * width + bin_[fits]
        load[window[fits], bin_[fits]] += weight[row[fits]]


def _best_fit(
    bins: _Bins,
    bin_of: NDArray[np.int64],
    order: NDArray[np.int64],
    first: NDArray[np.int64],
    counts: NDArray[np.int64],
    length: NDArray[np.int64],
    cost: NDArray[np.int64],
    width: int,
) -> None:
    """Step i puts the i-th row of every window into the batch with the least room that still takes it."""
    for i in range(int(counts.max())):
        window = np.flatnonzero(i < counts)
        row = order[first[window] + i]
        free = bins.tokens[window]
        takes = (
            (free >= length[row, None]) & (bins.cost[window] >= cost[row, None]) & (bins.rows[window] >= 1)
        )
        bin_ = np.where(takes, free, _NEVER).argmin(axis=1)
        fits = bins.put(window, bin_, length[row], cost[row])
        bin_of[row[fits]] = window[fits] * width + bin_[fits]


def _collect(rows: Rows, bin_of: NDArray[np.int64], options: PlanOptions) -> Cuts:
    """Rows batch by batch, and the bounds of the batches that are full enough."""
    order = np.argsort(np.where(bin_of < 0, _NEVER, bin_of), kind="stable")
    placed = order[: int((bin_of >= 0).sum())]
    label = bin_of[placed]
    start = np.flatnonzero(np.diff(label, prepend=-1))
    stop = np.append(start[1:], len(placed))
    if not len(start):
        return Cuts(order=order, start=start, stop=start)
    full = np.add.reduceat(rows.length[placed], start) >= _FULL * options.token_budget
    if options.cost_budget is not None:
        cost_model = options.cost_model()
        cost = np.add.reduceat(row_cost(rows.length[placed], options), start)
        full |= (
            cost + cost_model.overhead_tokens * cost_model.scale
            >= _FULL * options.cost_budget * cost_model.scale
        )
    if options.max_batch_size is not None:
        full |= stop - start == options.max_batch_size
    return Cuts(order=order, start=start[full], stop=stop[full])


def deal_packed(
    num_rows: NDArray[np.int64],
    cost: NDArray[np.int64],
    lane: NDArray[np.int64],
    key: NDArray[np.uint64],
    layout: Layout,
) -> Dealt | None:
    """Batches of near-equal cost run together; every batch has its own length mix already.

    Args:
        num_rows: Rows of each batch, shape (B,); all of them are kept.
        cost: Scaled cost of each batch, shape (B,).
        lane: Effective lane of each, shape (B,).
        key: Random word of each, shape (B,).
        layout: Shape of a step.
    """
    groups = layout.num_groups
    group = lane * groups // layout.num_lanes
    share = layout.world_size // groups
    num_steps = int(np.bincount(group, minlength=groups).min()) // (share * layout.accumulate)
    if num_steps == 0:
        return None
    micro_steps = num_steps * layout.accumulate
    parts = []
    for number in range(groups):
        members = np.flatnonzero(group == number)
        chosen = members[np.sort(np.argsort(key[members], kind="stable")[: micro_steps * share])]
        parts.append(chosen[np.argsort(cost[chosen], kind="stable")].reshape(micro_steps, share))
    placed = np.concatenate(parts, axis=1)
    placed = placed[np.argsort(key[placed[:, 0]], kind="stable")]
    shape = (micro_steps, groups, share)
    order = np.argsort(key[placed].reshape(shape), axis=2, kind="stable")
    placed = np.take_along_axis(placed.reshape(shape), order, axis=2)
    placed = placed.reshape(num_steps, layout.accumulate, layout.world_size)
    return Dealt(batch=placed, num_rows=num_rows[placed])
