"""The last steps of a block: what fills no full step, cut so that all ranks get equally many batches.

Nothing is dropped and nothing repeated. Batches are made smaller and split until their number fits;
only where single rows are left to split do some ranks get a filler.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from loader.deal import Batches, Layout, deal
from loader.options import PlanOptions
from loader.ragged import ragged
from shardgen.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TailSteps:
    """Batches of the last steps, in delivery order.

    Attributes:
        rows: Row numbers batch by batch, int64, shape (M,).
        num_rows: Rows of each batch, 0 for a filler, int64, shape (B,).
        micro_steps: Micro-steps of each step, int64, shape (S,); their sum times the world size is B.
    """

    rows: NDArray[np.int64]
    num_rows: NDArray[np.int64]
    micro_steps: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Count:
    """How many batches the tail gets, fillers among them."""

    batches: int
    fillers: int

    @classmethod
    def choose(cls, num_rows: int, fewest: int, options: PlanOptions) -> _Count:
        target = _round_up(fewest, options.batches_per_step)
        if num_rows < target:  # full steps cannot be had: a short last one, and fillers if it must be
            target = _round_up(fewest, options.world_size)
        fillers = max(0, target - num_rows)
        if fillers and options.tail == "error":
            raise UserError(
                f"{num_rows} samples in {fewest} batches cannot give {options.world_size} ranks equally many "
                f"batches: {fillers} fillers are needed, and tail='error' refuses them; use tail='fill' or "
                f"fewer ranks"
            )
        return cls(batches=target, fillers=fillers)

    def micro_steps(self, options: PlanOptions) -> NDArray[np.int64]:
        full, rest = divmod(self.batches // options.world_size, options.accumulate)
        return np.array([options.accumulate] * full + [rest] * (rest > 0), np.int64)


def plan_tail(
    length: NDArray[np.int64],
    bucket: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    rows_at: Callable[[NDArray[np.int64], int | None], NDArray[np.int64]],
    options: PlanOptions,
    num_batches: int | None = None,
) -> TailSteps:
    """Cut and place all rows.

    Args:
        length: Tokens of each row (of its bucket's boundary with static shapes), int64, shape (M,).
        bucket: Bucket of each row, int64, shape (M,).
        hashes: Keyed hash of each row, uint64, shape (M,).
        rows_at: Most rows of a batch by its longest row, under a scaled cost limit or none.
        options: The plan's options.
        num_batches: Exactly so many, a multiple of the world size that the rows suffice for; ``None`` for as
            few as will do.

    Raises:
        UserError: Fillers are needed and ``tail="error"``.
    """
    order = np.lexsort((hashes, -length, bucket))
    length, bucket = length[order], bucket[order]
    group_stop = np.cumsum(np.unique(bucket, return_counts=True)[1])
    fewest = len(_cut(rows_at(length, None), group_stop)) - 1
    count = (
        _Count.choose(len(length), fewest, options)
        if num_batches is None
        else _Count(batches=num_batches, fillers=0)
    )
    starts = _cut_evenly(length, group_stop, count.batches - count.fillers, rows_at, options)
    sizes, longest = np.diff(starts), length[starts[:-1]]
    if count.batches % options.batches_per_step == 0 and not count.fillers:
        place = _stratified(longest, sizes, hashes[order[starts[:-1]]], options)
    else:
        place = np.argsort(-options.cost_model().scaled(sizes, longest), kind="stable")
    return TailSteps(
        rows=order[ragged(starts[:-1][place], sizes[place])],
        num_rows=np.concatenate((sizes[place], np.zeros(count.fillers, np.int64))),
        micro_steps=count.micro_steps(options),
    )


def plan_packed_tail(
    length: NDArray[np.int64],
    cost: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    options: PlanOptions,
    num_batches: int | None = None,
) -> TailSteps:
    """As :func:`plan_tail` for the packed layout.

    Args:
        length: Tokens of each row, int64, shape (M,).
        cost: Scaled cost of each row alone, int64, shape (M,).
        hashes: Keyed hash of each row, uint64, shape (M,).
        options: The plan's options.
        num_batches: See :func:`plan_tail`.
    """
    order = np.lexsort((hashes, -length)).tolist()
    model = options.cost_model()
    limits = (
        options.token_budget,
        options.max_batch_size or len(order),
        None if options.cost_budget is None else (options.cost_budget - model.overhead_tokens) * model.scale,
    )
    tokens, costs = length.tolist(), cost.tolist()
    first_fit = _fill(order, tokens, costs, limits, None)
    assert first_fit is not None  # without a number of batches there is always room
    count = (
        _Count.choose(len(order), len(first_fit), options)
        if num_batches is None
        else _Count(batches=num_batches, fillers=0)
    )
    wanted = count.batches - count.fillers
    bins = _fill(order, tokens, costs, limits, wanted) or first_fit
    while len(bins) < wanted:
        bins.sort(key=lambda rows: (len(rows) > 1, sum(costs[r] for r in rows)))
        largest = bins.pop()
        bins += [largest[::2], largest[1::2]]
    bins.sort(key=lambda rows: -sum(costs[r] for r in rows))
    return TailSteps(
        rows=np.array([r for rows in bins for r in rows], np.int64),
        num_rows=np.array([len(rows) for rows in bins] + [0] * count.fillers, np.int64),
        micro_steps=count.micro_steps(options),
    )


def _fill(
    order: list[int],
    tokens: list[int],
    costs: list[int],
    limits: tuple[int, int, int | None],
    num_bins: int | None,
) -> list[list[int]] | None:
    """Rows to batches: the first with room when ``num_bins`` is ``None``, else the cheapest with room.

    Returns ``None`` when a row finds no room in ``num_bins`` batches.
    """
    token_limit, row_limit, cost_limit = limits
    bins: list[list[int]] = [[] for _ in range(num_bins or 0)]
    used = [[0, 0] for _ in bins]  # tokens, cost
    for row in order:
        candidates = (
            range(len(bins)) if num_bins is None else sorted(range(len(bins)), key=lambda b: used[b][1])
        )
        for b in candidates:
            fits = used[b][0] + tokens[row] <= token_limit and len(bins[b]) < row_limit
            if fits and (cost_limit is None or used[b][1] + costs[row] <= cost_limit):
                break
        else:
            if num_bins is not None:
                return None
            b = len(bins)
            bins.append([])
            used.append([0, 0])
        bins[b].append(row)
        used[b][0] += tokens[row]
        used[b][1] += costs[row]
    return bins


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _cut(capacity: NDArray[np.int64], group_stop: NDArray[np.int64]) -> list[int]:
    """Greedy cuts of rows that fall in length inside each group: starts, with the end appended."""
    limits, starts, position = capacity.tolist(), [0], 0
    for stop in group_stop.tolist():
        while position < stop:
            position = min(position + limits[position], stop)
            starts.append(position)
    return starts


def _cut_evenly(
    length: NDArray[np.int64],
    group_stop: NDArray[np.int64],
    num_batches: int,
    rows_at: Callable[[NDArray[np.int64], int | None], NDArray[np.int64]],
    options: PlanOptions,
) -> NDArray[np.int64]:
    """Exactly ``num_batches`` batches: the smallest cost limit that makes no more, the costliest split on."""
    cost = options.cost_model()
    if options.padding == "boundary":  # every batch costs the same whatever its rows
        starts = _cut(rows_at(length, None), group_stop)
    else:
        low, high = 0, int(cost.scaled(rows_at(length, None), length).max())
        while high - low > 1:
            middle = (low + high) // 2
            fits = len(_cut(rows_at(length, middle), group_stop)) - 1 <= num_batches
            low, high = (low, middle) if fits else (middle, high)
        starts = _cut(rows_at(length, high), group_stop)
    heap: list[tuple[int, int, int]] = []
    for start, stop in pairwise(starts):
        heapq.heappush(heap, _entry(start, stop, length, options))
    whole: list[int] = []
    while len(heap) + len(whole) < num_batches:
        _, start, stop = heapq.heappop(heap)
        if stop - start == 1:
            whole.append(start)
            continue
        middle = (start + stop) // 2
        heapq.heappush(heap, _entry(start, middle, length, options))
        heapq.heappush(heap, _entry(middle, stop, length, options))
    return np.array(sorted([*whole, *(start for _, start, _ in heap), len(length)]), np.int64)


def _entry(start: int, stop: int, length: NDArray[np.int64], options: PlanOptions) -> tuple[int, int, int]:
    rows = stop - start
    weight = rows if options.padding == "boundary" else int(options.cost_model().scaled(rows, length[start]))
    return -weight, start, stop


def _stratified(
    length: NDArray[np.int64], sizes: NDArray[np.int64], key: NDArray[np.uint64], options: PlanOptions
) -> NDArray[np.int64]:
    """Places of batches that make full steps, by the same deal as all other steps."""
    batches = Batches(num_rows=sizes, padded_length=length, lane=np.zeros(len(sizes), np.int64), key=key)
    layout = Layout(world_size=options.world_size, accumulate=options.accumulate)
    dealt = deal(batches, layout, options.cost_model(), budget=options.token_budget, seed=0, level=False)
    assert dealt is not None and dealt.batch.size == len(sizes)
    return dealt.batch.ravel()
