"""Boundaries as others choose them: what the best ones are measured against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shardgen.buckets import Buckets
from shardgen.cells import FloatArray
from shardgen.lengths import Histogram

Boundaries = tuple[int, ...]


def hand_picked(histogram: Histogram, num_buckets: int) -> Boundaries:
    """Round numbers as people type them: powers of two below the longest, then the middles between them."""
    top = 1 << max(histogram.longest - 1, 1).bit_length() - 1
    powers = [top >> i for i in range(4)]
    middles = [3 * (top >> i) // 4 for i in range(3)]
    finer = [top >> i for i in range(4, 64)] + [5 * (top >> i) // 8 for i in range(3)]
    wanted = [b for b in dict.fromkeys(powers + middles + finer) if 0 < b < histogram.longest]
    return _boundaries(wanted[: num_buckets - 1], histogram)


def quantile(histogram: Histogram, num_buckets: int) -> Boundaries:
    """As many samples in every bucket."""
    return _equal_share(histogram, num_buckets, histogram.counts.astype(np.float64))


def equal_token(histogram: Histogram, num_buckets: int) -> Boundaries:
    """As many tokens in every bucket."""
    return _equal_share(histogram, num_buckets, histogram.counts.astype(np.float64) * histogram.lengths)


def geometric(histogram: Histogram, num_buckets: int) -> Boundaries:
    """Equal ratios from the shortest to the longest sample."""
    return _boundaries(np.geomspace(histogram.lengths[0], histogram.longest, num_buckets + 1)[1:], histogram)


def equal_width(histogram: Histogram, num_buckets: int) -> Boundaries:
    """Equal steps up to the longest sample."""
    return _boundaries(np.linspace(0, histogram.longest, num_buckets + 1)[1:], histogram)


# Named as in the output of the command line.
ALTERNATIVES: dict[str, Callable[[Histogram, int], Boundaries]] = {
    "hand": hand_picked,
    "quantile": quantile,
    "equal_token": equal_token,
    "geometric": geometric,
}


def coordinate_descent(
    start: Boundaries, histogram: Histogram, cost: Callable[[Boundaries], float], step: int
) -> Boundaries:
    """Move one boundary at a time, by ever smaller steps, while the cost falls.

    Args:
        start: ``(0, b1, ..., longest)``.
        histogram: Boundaries move by its distinct lengths.
        cost: What to lower; the result never costs more than ``start``.
        step: First step in distinct lengths.

    Returns:
        Boundaries with as many buckets; all but the last are distinct lengths where moved.
    """
    lengths = histogram.lengths
    best, lowest = start, cost(start)
    while step:
        moved = False
        for i in range(1, len(start) - 1):
            at = int(np.searchsorted(lengths, best[i], side="right")) - 1
            for target in (at - step, at + step):
                if not 0 <= target < len(lengths) or not best[i - 1] < lengths[target] < best[i + 1]:
                    continue
                tried = (*best[:i], int(lengths[target]), *best[i + 1 :])
                if (found := cost(tried)) < lowest:
                    best, lowest, moved = tried, found, True
        step = step if moved else step // 2
    return best


def _equal_share(histogram: Histogram, num_buckets: int, weight: FloatArray) -> Boundaries:
    share = np.cumsum(weight) / weight.sum()
    at = np.searchsorted(share, np.arange(1, num_buckets) / num_buckets)
    return _boundaries(histogram.lengths[np.minimum(at, len(share) - 1)], histogram)


def _boundaries(upper: Sequence[float] | Iterable[float], histogram: Histogram) -> Boundaries:
    below = sorted({int(b) for b in upper if 0 < int(b) < histogram.longest})
    return Buckets.from_upper_bounds(below, histogram.longest).boundaries
