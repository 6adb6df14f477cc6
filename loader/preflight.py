"""The hardest batches of an epoch, to find out before training whether they fit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loader.block import BlockPlan
from loader.options import PlanOptions
from loader.packed import row_cost
from loader.pool import Corpus
from loader.state import ResumeState
from loader.walk import BlockRun, Plans, Task


def measures(plan: BlockPlan, corpus: Corpus, options: PlanOptions) -> NDArray[np.int64]:
    """Padded tokens, rows and scaled cost of every batch, int64, shape (3, B).

    A packed batch's rows are its samples.
    """
    if options.layout == "packed":
        rows = np.diff(plan.batch_start)
        cost = row_cost(np.asarray(corpus.lengths[plan.sample_ids], np.int64), options)
        before = np.concatenate(([0], np.cumsum(cost)))
        overhead = options.cost_model().scaled(0, 0)
        costs = before[plan.batch_start[1:]] - before[plan.batch_start[:-1]] + overhead
        return np.stack((plan.batch_padded_length, rows, costs))
    tokens = plan.batch_num_rows * plan.batch_padded_length
    costs = options.cost_model().scaled(plan.batch_num_rows, plan.batch_padded_length)
    return np.stack((tokens, plan.batch_num_rows, costs))


def hardest(plans: Plans, start: ResumeState, options: PlanOptions, n: int) -> list[Task]:
    """Hardest batches of all ranks to the end of an epoch: by padded tokens, rows and cost in turn.

    Turn k takes the k-th of each order; a batch that was taken is passed over, and of equals the earliest
    counts as larger. Plans every block of the epoch.

    Args:
        plans: Of the dataset.
        start: Where the pass begins.
        options: Today's options.
        n: How many batches; fewer where the epoch has fewer.
    """
    runs: dict[int, BlockRun] = {}
    # (values, -run, -batch) of the best n for each measure: a larger tuple is harder.
    best: list[list[tuple[int, int, int]]] = [[], [], []]
    for number, run in enumerate(plans.runs(start, options)):
        first = int(run.shown.step_start[run.start]) * run.shown.world_size
        values = measures(run.shown, plans.corpus, options)[:, first:]
        for place, value in enumerate(values):
            top = np.argsort(-value, kind="stable")[:n]
            best[place] += [(int(value[b]), -number, -(first + int(b))) for b in top]
            best[place] = sorted(best[place], reverse=True)[:n]
        runs[number] = run
        runs = {k: v for k, v in runs.items() if any(-item[1] == k for order in best for item in order)}
    chosen: list[tuple[int, int]] = []
    for turn in range(n):
        for order in best:
            if turn < len(order):
                batch = (-order[turn][1], -order[turn][2])
                if batch not in chosen:
                    chosen.append(batch)
    return [_task(runs[run], batch) for run, batch in chosen[:n]]


def _task(run: BlockRun, batch: int) -> Task:
    plan = run.shown
    micro, rank = divmod(batch, plan.world_size)
    step = int(np.searchsorted(plan.step_start, micro, side="right")) - 1
    return run.task(step, micro - int(plan.step_start[step]), rank)
