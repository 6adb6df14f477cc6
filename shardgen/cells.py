"""A length histogram gathered into cells: the tables that all estimates look up.

Cells are runs of distinct lengths, and boundaries lie between cells. With one cell per distinct length
nothing is lost. With fewer, a cell's samples count with their mean cost, while the limits of a batch still
follow the exact lengths.
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
    """Ends of about ``num_cells`` cells that are narrow where boundaries matter.

    Equal steps of the mean of four measures: samples, tokens, the length and its logarithm. So neither the
    bulk nor a thin tail of short or long samples falls into one wide cell.

    Returns:
        Distinct lengths up to and including each cell, ascending int64, shape (X,); the last is D.
    """
    num_distinct = len(histogram.lengths)
    if num_distinct <= num_cells:
        return np.arange(1, num_distinct + 1)
    length = histogram.lengths.astype(np.float64)
    samples = histogram.counts.astype(np.float64)
    before = np.append(0.5 * length[0], length[:-1])
    measure = np.zeros(num_distinct)
    for weight in (samples, samples * length, length - before, np.log(length / before)):
        measure += np.cumsum(weight) / weight.sum()
    steps = np.arange(1, num_cells) / num_cells * measure[-1]
    ends: IntArray = np.unique(np.append(np.searchsorted(measure, steps) + 1, num_distinct))
    return ends


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Tables over D distinct lengths and X cells of them; a cell is named by its place 1..X, and 0 means
    none.

    The values of a row have three columns: its padded tokens when alone, its cost without the overhead of a
    batch, and its share of a full batch of its own length.

    Attributes:
        ends: Distinct lengths up to and including each cell, int64, shape (X + 1,), ``ends[0] == 0``.
        count: Samples up to and including each cell, shape (X + 1,).
        value: Mean values of a cell's rows, shape (X + 1, 3), ``value[0] == 0``.
        rows: Rows of a full batch whose longest is the cell's longest, int64, shape (X + 1,);
            ``rows[0]`` is the shortest sample's.
        mean_rows: The same for the cell's samples on average, shape (X + 1,).
        count_at: Samples up to and including each distinct length, shape (D + 1,).
        rows_at: Rows of a full batch by the distinct length of its longest, int64, not rising, shape (D,).
    """

    ends: IntArray
    count: FloatArray
    value: FloatArray
    rows: IntArray
    mean_rows: FloatArray
    count_at: FloatArray
    rows_at: IntArray

    @classmethod
    def gather(cls, histogram: Histogram, budget: TokenBudget, ends: IntArray) -> Cells:
        """Cells of a histogram whose longest sample fits the budget; ``ends`` as from :func:`even_ends`."""
        ends = np.append(0, ends)
        counts = histogram.counts.astype(np.float64)
        rows = budget.max_rows(histogram.lengths)
        padded = budget.padded_length(histogram.lengths).astype(np.float64)
        cost = budget.cost_model.cost(1, padded) - budget.cost_model.overhead_tokens
        each = np.stack((padded, cost, 1.0 / rows), axis=1)
        count_at = np.append(0.0, np.cumsum(counts))

        def cell_means(values: FloatArray) -> FloatArray:  # (D, ...) -> (X + 1, ...)
            weight = counts.reshape(-1, *(1,) * (values.ndim - 1))
            sums = np.add.reduceat(weight * values, ends[:-1], axis=0)
            return np.concatenate(
                (np.zeros_like(sums[:1]), sums / np.add.reduceat(weight, ends[:-1], axis=0))
            )

        return cls(
            ends=ends,
            count=count_at[ends],
            value=cell_means(each),
            rows=np.append(rows[0], rows[ends[1:] - 1]),
            mean_rows=cell_means(rows.astype(np.float64)),
            count_at=count_at,
            rows_at=rows,
        )

    @property
    def num_cells(self) -> int:
        return len(self.ends) - 1

    def count_allowing(self, num_rows: IntArray) -> FloatArray:
        """Samples short enough for a batch of ``num_rows``; shape as given."""
        return self.count_at[np.searchsorted(-self.rows_at, -num_rows, side="right")]
