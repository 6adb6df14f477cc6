"""Ranges of unequal size over one array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ragged(start: NDArray[np.int64], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """Concatenated ranges ``start[i] .. start[i] + size[i]``, int64, shape (sum of sizes,)."""
    before = np.cumsum(size) - size
    index: NDArray[np.int64] = np.arange(int(size.sum())) + np.repeat(start - before, size)
    return index


def longest_in(
    length: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Largest value of each range, int64, shape (B,).

    Args:
        length: Non-negative values, shape (M,).
        start: First position of each range, ascending, shape (B,).
        stop: Position after its last, above ``start``, at most the next start, shape (B,).
    """
    if not len(start):
        return np.zeros(0, np.int64)
    # reduceat wants every bound inside the array, and reads bounds in pairs: range, gap, range, ...
    bounds = np.stack((start, stop), axis=1).ravel()
    return np.asarray(np.maximum.reduceat(np.append(length, 0), bounds)[::2])
