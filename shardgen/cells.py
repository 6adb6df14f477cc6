"""A length histogram gathered into cells: what all estimates look up.

Cells are runs of distinct lengths. With one cell per distinct length nothing is lost; with fewer, a cell
stands for its samples by their mean cost, while the limits of a batch still follow the exact counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardgen.buckets import TokenBudget
from shardgen.lengths import Histogram

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def even_ends(histogram: Histogram, num_cells: int) -> IntArray:
    """Ends of at most ``num_cells`` cells that are narrow where boundaries matter.

    Equal steps of the mean of three measures: samples, tokens, and the logarithm of the length. So
    neither the bulk nor a thin tail of long samples falls into one wide cell.

    Returns:
        Ascending int64, shape (X,): distinct lengths up to and including each cell; the last is D.
    """
    num_distinct = len(histogram.lengths)
    if num_distinct <= num_cells:
        return np.arange(1, num_distinct + 1)
    length = histogram.lengths.astype(np.float64)
    samples = histogram.counts.astype(np.float64)
    width = np.log(length) - np.log(np.append(0.5 * length[0], length[:-1]))
    measure = np.zeros(num_distinct)
    for weight in (samples, samples * length, width):
        measure += np.cumsum(weight) / weight.sum()
    steps = np.arange(1, num_cells) / num_cells * measure[-1]
    return np.unique(np.append(np.searchsorted(measure, steps) + 1, num_distinct))


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Lookup tables over X cells of D distinct lengths; a cell is named by its end, 1..X, and 0 means none.

    Attributes:
        ends: Distinct lengths up to and including each cell, int64, shape (X + 1,), ``ends[0] == 0``.
        count: Samples up to and including each cell, shape (X + 1,).
        batches: The same as batches: every sample as the share of a batch that its length allows.
        value: Mean padded tokens of a sample alone, and its cost without the overhead of a batch, by cell,
            shape (X + 1, 2), ``value[0] == 0``.
        rows: Rows that a batch may have when its longest is the cell's longest, int64, shape (X + 1,);
            ``rows[0]`` is the shortest sample's.
        count_at: Samples up to and including each distinct length, shape (D + 1,).
        falling_rows: Rows that a batch may have, negated, by distinct length, int64, ascending, shape (D,).
    """

    ends: IntArray
    count: FloatArray
    batches: FloatArray
    value: FloatArray
    rows: IntArray
    count_at: FloatArray
    falling_rows: IntArray

    @classmethod
    def gather(cls, histogram: Histogram, budget: TokenBudget, ends: IntArray) -> Cells:
        """Cells of a histogram whose longest sample fits the budget; ``ends`` as from :func:`even_ends`."""
        ends = np.concatenate(([0], ends)).astype(np.int64)
        counts = histogram.counts.astype(np.float64)
        rows = budget.max_rows(histogram.lengths)
        padded = budget.padded_length(histogram.lengths).astype(np.float64)
        model = budget.cost_model
        cost = model.cost(1, padded) - model.overhead_tokens

        def up_to(values: FloatArray) -> FloatArray:
            return np.concatenate(([0.0], np.cumsum(values)))

        def mean(values: FloatArray) -> FloatArray:
            return np.concatenate(([0.0], np.add.reduceat(counts * values, ends[:-1]) / np.diff(count)))

        count_at = up_to(counts)
        count = count_at[ends]
        return cls(
            ends=ends,
            count=count,
            batches=up_to(counts / rows)[ends],
            value=np.stack((mean(padded), mean(cost)), axis=1),
            rows=np.concatenate((rows[:1], rows[ends[1:] - 1])),
            count_at=count_at,
            falling_rows=-rows,
        )

    @property
    def num_cells(self) -> int:
        return len(self.ends) - 1

    def count_allowing(self, num_rows: IntArray) -> FloatArray:
        """Samples short enough for a batch of ``num_rows``; shape as given."""
        return self.count_at[np.searchsorted(self.falling_rows, -num_rows, side="right")]
