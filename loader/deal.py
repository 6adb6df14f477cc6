"""Deal full batches to optimizer steps: the second half of a planning round.

A step takes one batch of each of G equal strata of length, so that it carries the length mix of its
block; batches of near-equal cost run together, and are trimmed to a common cost where that pays. What
is trimmed goes back to the pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from loader.keys import Purpose, derive_key, hash_ids
from shardgen.cost import CostModel

# Exchanges between steps: passes, and pairings in each. More bring under 0.0005 of rank balance.
_PASSES = 3
_PAIRINGS = 8
# Price of a step, as a part of the budget: trimmed rows need steps of their own.
_TRIM_PRICE = 16
_MAX_CELLS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Full batches that wait to be dealt, one entry per batch.

    Attributes:
        num_rows: int64, shape (B,).
        padded_length: int64, shape (B,).
        lane: Effective lane, int64, shape (B,).
        key: Random word of each, uint64, shape (B,).
    """

    num_rows: NDArray[np.int64]
    padded_length: NDArray[np.int64]
    lane: NDArray[np.int64]
    key: NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Shape of a step: ``accumulate`` micro-steps of ``world_size`` batches, from ``num_lanes`` lanes.

    Ranks fall into gcd(num_lanes, world_size) consecutive groups; a rank's batches come from the lanes
    of its group only.
    """

    world_size: int
    accumulate: int
    num_lanes: int = 1

    @property
    def batches_per_step(self) -> int:
        return self.world_size * self.accumulate

    @property
    def num_groups(self) -> int:
        return gcd(self.num_lanes, self.world_size)


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Batches in their places.

    Attributes:
        batch: Batch number at (step, micro-step, rank), int64, shape (S, A, R).
        num_rows: Rows that each keeps, at least 1, same shape.
    """

    batch: NDArray[np.int64]
    num_rows: NDArray[np.int64]


def deal(
    batches: Batches, layout: Layout, cost: CostModel, *, budget: int, seed: int, level: bool = True
) -> Dealt | None:
    """Place as many full steps as the batches allow; the others are left out.

    Args:
        batches: What there is.
        layout: Shape of a step.
        cost: What a batch costs.
        budget: Size of a batch in token-equivalents; sets the price of trimming.
        seed: Key of the pairings.
        level: Whether rows may be trimmed.

    Returns:
        ``None`` when the batches do not make one step.
    """
    steps = _stratify(batches, layout, cost)
    if steps is None:
        return None
    placed, stratum = _group_by_cost(steps, batches, layout, cost)
    num_rows = batches.num_rows
    if level and layout.world_size > 1:
        price = max(1, budget // _TRIM_PRICE) * cost.scale
        for number in range(_PASSES):
            kept = _level(placed, batches, cost, price)
            target = cost.scaled(kept, batches.padded_length[placed]).max(axis=2)  # (S, A)
            key = derive_key(seed, Purpose.BATCH, number)
            by_stratum = _exchange(placed, stratum, target, batches, layout, cost, key)
            placed, stratum = _group_by_cost(by_stratum, batches, layout, cost)
        kept = _level(placed, batches, cost, price)
    else:
        kept = num_rows[placed]
    return _shuffle_ranks(placed, kept, batches, layout)


def _stratify(batches: Batches, layout: Layout, cost: CostModel) -> NDArray[np.int64] | None:
    """Batch of every (step, stratum), shape (S, G), or ``None``.

    At step s lane c supplies the strata congruent to c + s modulo the number of lanes, so that every lane
    supplies every stratum equally often. A step takes the batches of equal rank from all strata. Ranked by
    cost, a step holds like costs, and less has to be trimmed. Ranked by length, what a step has too much of
    at one end of a stratum it lacks at the next one's, and its mix stays that of the block. With one
    micro-step costs decide; with more there is a choice inside the step, and the shortest strata, of nearly
    equal cost, go by length.
    """
    num_lanes, num_strata = layout.num_lanes, layout.batches_per_step
    counts = np.bincount(batches.lane, minlength=num_lanes)
    num_steps = int(counts.min()) * num_lanes // num_strata
    if num_steps == 0:
        return None
    cost_of = cost.scaled(batches.num_rows, batches.padded_length)
    by_cost = num_strata if layout.accumulate == 1 else num_strata * 3 // 4
    steps = np.empty((num_steps, num_strata), np.int64)
    for lane in range(num_lanes):
        members = np.flatnonzero(batches.lane == lane)
        if len(members) > num_steps * num_strata // num_lanes:
            by_key = np.argsort(batches.key[members], kind="stable")
            members = np.sort(members[by_key[: num_steps * num_strata // num_lanes]])
        members = members[np.argsort(-batches.padded_length[members], kind="stable")]
        first_step = (np.arange(num_strata) - lane) % num_lanes
        size = np.maximum(0, -(-(num_steps - first_step) // num_lanes))
        stratum = np.repeat(np.arange(num_strata), size)
        rank = np.arange(len(members)) - np.repeat(np.cumsum(size) - size, size)
        rank_by = np.where(stratum < by_cost, cost_of[members], batches.padded_length[members])
        ranked = members[np.lexsort((rank_by, stratum))]
        steps[first_step[stratum] + rank * num_lanes, stratum] = ranked
    return steps


def _group_by_cost(
    steps: NDArray[np.int64], batches: Batches, layout: Layout, cost: CostModel
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Micro-steps of near-equal cost: batches as (S, A, R), and the stratum of each place, same shape."""
    num_steps, groups = len(steps), layout.num_groups
    group = batches.lane[steps] * groups // layout.num_lanes
    cost_of = cost.scaled(batches.num_rows[steps], batches.padded_length[steps])
    stratum = np.lexsort((cost_of, group), axis=1)  # (S, G)
    # (S, group, A, R / groups) -> (S, A, group, R / groups) -> (S, A, R)
    stratum = stratum.reshape(num_steps, groups, layout.accumulate, -1).swapaxes(1, 2)
    stratum = stratum.reshape(num_steps, layout.accumulate, layout.world_size)
    return np.take_along_axis(steps, stratum.reshape(num_steps, -1), axis=1).reshape(stratum.shape), stratum


def _rows_within(
    target: NDArray[np.int64], num_rows: NDArray[np.int64], length: NDArray[np.int64], cost: CostModel
) -> NDArray[np.int64]:
    """Rows that a batch keeps under a scaled cost of ``target``."""
    per_row = cost.scaled(1, length) - cost.scaled(0, length)
    return np.minimum(num_rows, (target - cost.overhead_tokens * cost.scale) // per_row)


def _level(placed: NDArray[np.int64], batches: Batches, cost: CostModel, price: int) -> NDArray[np.int64]:
    """Rows that each batch keeps, shape (S, A, R).

    Of the costs that run together one becomes the common target: the one that keeps most work per time,
    time being the target and the price of a step. No batch is emptied.
    """
    world_size = placed.shape[2]
    flat = placed.reshape(-1, world_size)
    kept = np.empty_like(flat)
    chunk = max(1, _MAX_CELLS // (world_size * world_size))
    for begin in range(0, len(flat), chunk):
        part = flat[begin : begin + chunk]
        rows, length = batches.num_rows[part], batches.padded_length[part]
        targets = cost.scaled(rows, length)  # (M, R)
        # (M, target, batch)
        options = _rows_within(targets[:, :, None], rows[:, None, :], length[:, None, :], cost)
        work = (options * (cost.scaled(1, length) - cost.scaled(0, length))[:, None, :]).sum(axis=2)
        work[(options < 1).any(axis=2)] = -1
        best = (work / (targets + price)).argmax(axis=1)
        kept[begin : begin + chunk] = options[np.arange(len(part)), best]
    return kept.reshape(placed.shape)


def _exchange(
    placed: NDArray[np.int64],
    stratum: NDArray[np.int64],
    target: NDArray[np.int64],
    batches: Batches,
    layout: Layout,
    cost: CostModel,
    key: int,
) -> NDArray[np.int64]:
    """Pairs of steps swap the batches of a stratum where more work then fits under both targets.

    Steps pair up only when the same lane supplies the stratum in both. Returns (S, G) by stratum.
    """
    num_steps = len(placed)
    place = stratum.reshape(num_steps, -1)
    back = np.argsort(place, axis=1)
    by_stratum = np.take_along_axis(placed.reshape(num_steps, -1), back, axis=1)
    target = np.repeat(target, layout.world_size, axis=1)  # (S, A * R)
    target = np.take_along_axis(target, back, axis=1)
    per_row = cost.scaled(1, batches.padded_length) - cost.scaled(0, batches.padded_length)
    turns = num_steps // layout.num_lanes
    half = turns // 2
    for pairing in range(_PAIRINGS):
        turn = np.argsort(hash_ids(np.arange(turns), derive_key(key, Purpose.BATCH, pairing)), kind="stable")
        lanes = np.arange(layout.num_lanes)
        one = (turn[:half, None] * layout.num_lanes + lanes).ravel()
        two = (turn[half : 2 * half, None] * layout.num_lanes + lanes).ravel()
        a, b = by_stratum[one], by_stratum[two]

        def work(batch: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
            rows = _rows_within(target[steps], batches.num_rows[batch], batches.padded_length[batch], cost)
            # An emptied batch is worse than anything.
            return np.where(rows > 0, rows * per_row[batch], -(1 << 60))

        better = work(b, one) + work(a, two) > work(a, one) + work(b, two)
        by_stratum[one] = np.where(better, b, a)
        by_stratum[two] = np.where(better, a, b)
    return by_stratum


def _shuffle_ranks(
    placed: NDArray[np.int64], kept: NDArray[np.int64], batches: Batches, layout: Layout
) -> Dealt:
    """Inside a group of ranks chance decides who gets which batch: nobody always has the longest."""
    shape = (placed.shape[0], layout.accumulate, layout.num_groups, -1)
    order = np.argsort(batches.key[placed].reshape(shape), axis=3, kind="stable")
    return Dealt(
        batch=np.take_along_axis(placed.reshape(shape), order, axis=3).reshape(placed.shape),
        num_rows=np.take_along_axis(kept.reshape(shape), order, axis=3).reshape(placed.shape),
    )
