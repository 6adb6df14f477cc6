"""The tail of a block with lanes: each group of ranks gets the rows of its own lanes.

A handful of rows from everywhere would make every node download almost every shard of the block, and the
lanes would have saved nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from loader.options import PlanOptions
from loader.ragged import ragged
from loader.tail import TailSteps


def plan_lane_tail(
    group: NDArray[np.int64],
    num_groups: int,
    plan: Callable[[NDArray[np.int64], PlanOptions, int | None], TailSteps],
    cost: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]],
    options: PlanOptions,
) -> TailSteps | None:
    """The tail of each group of ranks by itself, with the same steps for all.

    Costly batches of all groups run together, and steps get costly and cheap ones alike.

    Args:
        group: Group of ranks whose lanes hold each row, int64, shape (M,).
        num_groups: Groups; consecutive ranks, equally many in each.
        plan: Plans the tail of some rows (their numbers) for a group's options, with a number of batches or
            as few as will do; the rows of what it gives count inside those.
        cost: Scaled cost of batches, given their rows one after another and the number of each.
        options: Of the whole world.

    Returns:
        ``None`` where a group has too few rows: then all share the tail.
    """
    alone = replace(options, world_size=options.world_size // num_groups, tail="fill")
    members = [np.flatnonzero(group == number) for number in range(num_groups)]
    if not all(map(len, members)):
        return None
    tails = [plan(rows, alone, None) for rows in members]
    num_batches = max(len(tail.num_rows) for tail in tails)
    if any((tail.num_rows == 0).any() for tail in tails) or min(map(len, members)) < num_batches:
        return None
    tails = [
        tail if len(tail.num_rows) == num_batches else plan(rows, alone, num_batches)
        for tail, rows in zip(tails, members, strict=True)
    ]
    rows = [mine[tail.rows] for mine, tail in zip(members, tails, strict=True)]
    order = [np.argsort(-cost(r, tail.num_rows), kind="stable") for r, tail in zip(rows, tails, strict=True)]
    turn = _turns(tails[0].micro_steps)
    offset = np.cumsum([0, *(len(r) for r in rows[:-1])])
    # (groups, micro-steps, ranks of a group) -> micro-steps, in delivery order, then groups, then their ranks
    shape = (num_groups, -1, alone.world_size)
    num_rows = np.stack([tail.num_rows[o] for tail, o in zip(tails, order, strict=True)])
    first = [np.cumsum(tail.num_rows) - tail.num_rows + at for tail, at in zip(tails, offset, strict=True)]
    first = np.stack([f[o] for f, o in zip(first, order, strict=True)])
    num_rows = num_rows.reshape(shape)[:, turn].transpose(1, 0, 2).ravel()
    first = first.reshape(shape)[:, turn].transpose(1, 0, 2).ravel()
    return TailSteps(
        rows=np.concatenate(rows)[ragged(first, num_rows)],
        num_rows=num_rows,
        micro_steps=tails[0].micro_steps,
    )


def _turns(micro_steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Order in which micro-steps, given by falling cost, are delivered: dealt out to the steps in turn."""
    step = np.repeat(np.arange(len(micro_steps)), micro_steps)
    place = np.arange(len(step)) - np.repeat(np.cumsum(micro_steps) - micro_steps, micro_steps)
    turn = np.empty(len(step), np.int64)
    turn[np.lexsort((step, place))] = np.arange(len(step))
    return turn
