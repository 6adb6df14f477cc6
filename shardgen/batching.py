"""Cut ordered lengths into batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardgen.buckets import TokenBudget


def cut_in_order(lengths: NDArray[np.integer], budget: TokenBudget) -> NDArray[np.int64]:
    """Greedy batches in the given order: each takes rows while the limits allow.

    The longest row so far decides, not the newest one: in a shuffled order these differ.

    Args:
        lengths: Tokens per row, shape (N,).
        budget: The limits of a batch.

    Returns:
        Batch starts with N appended, int64, shape (num_batches + 1,).

    Raises:
        UserError: A row fits no batch.
    """
    budget.check_longest(lengths)
    if lengths.size == 0:
        return np.zeros(1, np.int64)
    rows_at = budget.max_rows(np.arange(int(lengths.max()) + 1))
    starts, start = [0], 0
    while start < len(lengths):
        most = int(rows_at[lengths[start]])  # later rows can only lower it
        longest = np.maximum.accumulate(lengths[start : start + most])
        full = rows_at[longest] < np.arange(1, len(longest) + 1)
        start += int(full.argmax()) if full.any() else len(longest)
        starts.append(start)
    return np.array(starts, np.int64)


def padded_tokens(
    lengths: NDArray[np.integer], starts: NDArray[np.int64], budget: TokenBudget
) -> NDArray[np.int64]:
    """Padded tokens of each batch when rows are padded to the batch's longest.

    Args:
        lengths: Tokens per row, shape (N,).
        starts: Batch starts with N appended, shape (num_batches + 1,).
        budget: Gives the padding multiple.

    Returns:
        int64, shape (num_batches,).
    """
    if len(starts) < 2:
        return np.zeros(0, np.int64)
    longest = np.maximum.reduceat(np.asarray(lengths, np.int64), starts[:-1])
    return np.diff(starts) * budget.padded_length(longest)
