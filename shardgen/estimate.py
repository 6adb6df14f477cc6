"""What given buckets will cost, before anything is packed."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from shardgen.buckets import Buckets, TokenBudget
from shardgen.cells import Cells, FloatArray, IntArray, even_ends
from shardgen.errors import UserError
from shardgen.lengths import Histogram
from shardgen.shuffled import shuffled_rows
from shardgen.static import static_batches
from shardgen.windowed import windowed_rows

# Above these many distinct lengths their costs are averaged in cells, much finer than any bucket.
SHUFFLED_CELLS = 8192
WINDOWED_CELLS = 2048


class Estimator:
    """Expected padded tokens and cost of buckets, for one way of batching them.

    Padding to the longest row depends on the order: exact order statistics without lookahead (``shuffled``),
    windows followed batch by batch with it (``windowed``). Padding to the boundary does not (``static``).
    """

    def __init__(
        self, histogram: Histogram, budget: TokenBudget, lookahead: int, num_cells: int | None = None
    ) -> None:
        check_fits(histogram, budget)
        num_cells = num_cells or (SHUFFLED_CELLS if lookahead == 1 else WINDOWED_CELLS)
        self.histogram, self.budget, self.lookahead = histogram, budget, lookahead
        self.num_tokens = histogram.num_tokens
        self.cells = Cells.gather(histogram, budget, even_ends(histogram, num_cells))
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def buckets(self, upper: IntArray, lower: IntArray) -> tuple[FloatArray, FloatArray]:
        """Padded tokens and cost of whole buckets.

        Args:
            upper: The last cell of each, shape (L,); without lookahead the same for all.
            lower: The cell before the first of each, ascending, below ``upper``, shape (L,).

        Returns:
            Two float64 arrays of shape (L,).
        """
        num_samples = self.cells.count[upper] - self.cells.count[lower]
        if self.budget.padding == "boundary":
            return static_batches(
                num_samples, self.histogram.lengths[self.cells.ends[upper] - 1], self.budget
            )
        if self.lookahead == 1:
            rows, padded, cost = shuffled_rows(self.cells, int(upper[0]), lower)
        else:
            rows, padded, cost = windowed_rows(self.cells, upper, lower, self.lookahead)
        return num_samples * padded, num_samples * (cost + self.budget.cost_model.overhead_tokens / rows)

    def table(self) -> FloatArray:
        """Cost of every bucket by the cells before and at its end, infinite where empty, (X + 1, X + 1)."""
        num_cells = self.cells.num_cells
        cost = np.full((num_cells + 1, num_cells + 1), np.inf)
        for upper in range(1, num_cells + 1):
            lower = np.arange(upper)
            cost[:upper, upper] = self.buckets(np.full(upper, upper), lower)[1]
        return cost

    def cells_of(self, boundaries: tuple[int, ...]) -> list[int]:
        """The last cell up to each boundary; exact when every distinct length is a cell."""
        distinct = np.searchsorted(self.histogram.lengths, boundaries, side="right")
        return [int(i) for i in np.searchsorted(self.cells.ends, distinct)]

    def evaluate(self, boundaries: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
        """Padded tokens and cost of each bucket, shape (K,), of any boundaries that hold all lengths."""
        if self.budget.padding == "boundary":
            up_to = np.append(0.0, np.cumsum(self.histogram.counts.astype(np.float64)))
            at = np.searchsorted(self.histogram.lengths, boundaries, side="right")
            upper = np.array(boundaries[1:], np.int64)
            used = np.diff(at) > 0
            if (used & (self.budget.max_rows(upper) < 1)).any():
                raise UserError(
                    f"boundary {int(upper[used].max())} is above what token_budget {self.budget.tokens} lets "
                    f"a row have ({self.budget.longest_allowed}): lower the boundary or raise the budget"
                )
            padded, cost = np.zeros((2, len(upper)))
            padded[used], cost[used] = static_batches(np.diff(up_to[at])[used], upper[used], self.budget)
            return padded, cost
        pairs = list(pairwise(self.cells_of(boundaries)))
        self._learn({(lower, upper) for lower, upper in pairs if lower < upper} - self._known.keys())
        padded, cost = np.array([self._known.get(pair, (0.0, 0.0)) for pair in pairs]).T
        return padded, cost

    def _learn(self, pairs: Collection[tuple[int, int]]) -> None:
        """Remember padded tokens and cost of buckets by the cells before and at their end."""
        ordered = sorted(pairs)
        # Windowed buckets go together; the others want one upper boundary at a time.
        groups = [ordered] if self.lookahead > 1 and ordered else [[pair] for pair in ordered]
        for group in groups:
            lower, upper = np.array(group).T
            padded, cost = self.buckets(upper, lower)
            self._known.update(zip(group, zip(padded.tolist(), cost.tolist(), strict=True), strict=True))

    def cost(self, boundaries: tuple[int, ...]) -> float:
        return float(self.evaluate(boundaries)[1].sum())

    def efficiency(self, boundaries: tuple[int, ...]) -> float:
        """Real tokens over padded tokens."""
        return self.num_tokens / float(self.evaluate(boundaries)[0].sum())


def check_fits(histogram: Histogram, budget: TokenBudget) -> None:
    """Refuse lengths that no batch can hold, by a :class:`UserError`."""
    limit = budget.longest_allowed
    if histogram.longest <= limit:
        return
    num_over = int(histogram.counts[histogram.lengths > limit].sum())
    limits = f"token_budget {budget.tokens}"
    if budget.cost_budget is not None:
        limits += f" and cost_budget {budget.cost_budget}"
    if budget.pad_to_multiple_of > 1:
        limits += f" with pad_to_multiple_of {budget.pad_to_multiple_of}"
    raise UserError(
        f"length {histogram.longest} is above what {limits} lets a sample have ({limit}; {num_over} samples "
        f"are too long): raise the budget, or drop, truncate or split them"
    )


def estimate_efficiency(histogram: Histogram, buckets: Buckets, budget: TokenBudget, lookahead: int) -> float:
    """Expected real tokens over padded tokens of an epoch packed by the loader.

    Args:
        histogram: The lengths; the work does not depend on the number of samples.
        buckets: Any buckets that hold all lengths.
        budget: The limits of a batch.
        lookahead: Batches per window; 1 for a plain shuffle inside each bucket.

    Raises:
        UserError: A length fits no bucket or no batch.
    """
    buckets.assign(histogram.lengths)
    return Estimator(histogram, budget, lookahead).efficiency(buckets.boundaries)


def sorted_efficiency(histogram: Histogram, budget: TokenBudget, boundaries: tuple[int, ...]) -> float:
    """Efficiency of packing sorted samples from the longest: what a shuffle can only approach.

    Sorted as a whole or within each bucket, whichever is better: a bucket spares batches across its boundary.
    """
    rows = budget.max_rows(histogram.lengths).tolist()
    padded = budget.padded_length(histogram.lengths).tolist()
    counts = histogram.counts.tolist()
    at = np.searchsorted(histogram.lengths, boundaries, side="right").tolist()
    apart = sum(_sorted_padding(rows[a:b], padded[a:b], counts[a:b]) for a, b in pairwise(at))
    return histogram.num_tokens / min(apart, _sorted_padding(rows, padded, counts))


def _sorted_padding(rows: list[int], padded: list[int], counts: list[int]) -> int:
    """Padded tokens of batches cut from the longest of sorted samples; all by distinct length, ascending."""
    left = counts.copy()
    total, at = 0, len(left) - 1
    while at >= 0:
        full, opened = divmod(left[at], rows[at])
        total += full * rows[at] * padded[at]
        missing, longest = (rows[at] - opened, at) if opened else (0, at)
        left[at] = 0
        at -= 1
        while missing and at >= 0:  # the batch that spans lengths
            taken = min(missing, left[at])
            left[at] -= taken
            missing -= taken
            at -= left[at] == 0
        if opened:
            total += (rows[longest] - missing) * padded[longest]
    return total
