"""Order the rows of a pool and cut them into batches: the first half of a planning round.

Rows are taken bucket by bucket. With a lookahead above 1 a bucket's shuffled rows fall into windows
worth about that many batches, and are sorted by length inside the window before they are cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loader.keys import pick
from shardgen.batching import window_counts

_U64 = np.uint64
# Below this many random bits between length and row number, equal lengths would meet too often.
_MIN_TIE_BITS = 12
_SHARE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a round has to place, one entry per row.

    Attributes:
        length: Tokens, int64, shape (M,).
        hash: Keyed hash that shuffles, uint64, shape (M,); monotone in the row when not shuffling.
        group: Lane and bucket as one number, int64, shape (M,); a batch never crosses groups.
        shuffled: Whether ``hash`` is random; ties follow the row number when not.
    """

    length: NDArray[np.int64]
    hash: NDArray[np.uint64]
    group: NDArray[np.int64]
    shuffled: bool = True

    def take(self, index: NDArray[np.int64]) -> Rows:
        return Rows(
            length=self.length[index], hash=self.hash[index], group=self.group[index], shuffled=self.shuffled
        )


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Full batches over ordered rows; what lies between them fills no batch.

    Attributes:
        order: Row numbers, int64, shape (M,).
        start: First position of each batch in ``order``, ascending, int64, shape (B,).
        stop: Position after its last row, int64, shape (B,).
    """

    order: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]


def cut(rows: Rows, rows_at: NDArray[np.int64], lookahead: int) -> Cuts:
    """Order rows and cut every full batch.

    Args:
        rows: The rows to place.
        rows_at: Most rows of a batch by the length of its longest row, shape (longest + 1,), not rising.
        lookahead: Batches per window; 1 for a plain shuffle inside the bucket.
    """
    if lookahead == 1:
        return _cut_running(rows, rows_at)
    order, window_stop = _sort_windows(rows, rows_at, lookahead)
    capacity = rows_at[rows.length[order]]
    window_start = np.concatenate(([0], window_stop[:-1]))
    odd = np.arange(len(window_stop)) % 2 == 1
    # What fills no batch would always be the shortest rows, and they would meet again and again: every other
    # window is cut from its short end.
    starts = np.concatenate(
        (
            _cut_from_long_end(capacity, window_start[~odd], window_stop[~odd]),
            _cut_from_short_end(capacity, window_start[odd], window_stop[odd], window_stop),
        )
    )
    starts.sort()
    return Cuts(order=order, start=starts, stop=starts + capacity[starts])


def _sort_windows(
    rows: Rows, rows_at: NDArray[np.int64], lookahead: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows by (group, window, falling length, hash), and the position after each window's last row."""
    num_groups = int(rows.group.max()) + 1
    # Whole numbers in float64 are exact here: below 2^53 up to 10^9 rows.
    batches = np.bincount(rows.group, weights=_SHARE // rows_at[rows.length], minlength=num_groups) / _SHARE
    num_rows = np.bincount(rows.group, minlength=num_groups)
    num_windows = window_counts(num_rows, batches, lookahead)
    base = np.cumsum(num_windows) - num_windows
    window = base[rows.group] + pick(rows.hash, num_windows[rows.group])
    total = int(num_windows.sum())
    stop = np.cumsum(np.bincount(window, minlength=total))

    longest = int(rows.length.max())
    falling = longest - rows.length
    index_bits = max(1, (len(window) - 1).bit_length())
    length_bits = max(1, longest.bit_length())
    window_bits = max(1, (total - 1).bit_length())
    tie_bits = min(32, 64 - index_bits - length_bits - window_bits)
    if tie_bits < _MIN_TIE_BITS:
        tie = rows.hash if rows.shuffled else np.arange(len(window), dtype=_U64)
        return np.lexsort((tie, falling, window)), stop
    # One sort of one packed word does all of it, and the row number rides in the lowest bits.
    word = window.astype(_U64) << _U64(length_bits)
    word |= falling.astype(_U64)
    word <<= _U64(tie_bits)
    if rows.shuffled:
        word |= (rows.hash & _U64(0xFFFFFFFF)) >> _U64(32 - tie_bits)
    word <<= _U64(index_bits)
    word |= np.arange(len(window), dtype=_U64)
    word.sort()
    return (word & _U64((1 << index_bits) - 1)).astype(np.int64), stop


def _cut_from_long_end(
    capacity: NDArray[np.int64], start: NDArray[np.int64], stop: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Starts of full batches; round j cuts the j-th batch of every window at once.

    A batch's first row is its longest, so it alone says how many rows there are.
    """
    starts = [np.zeros(0, np.int64)]
    some = start < stop
    position, limit = start[some], stop[some]
    while len(position):
        end = position + capacity[position]
        fits = end <= limit
        starts.append(position[fits])
        more = end < limit
        position, limit = end[more], limit[more]
    return np.concatenate(starts)


def _cut_from_short_end(
    capacity: NDArray[np.int64],
    start: NDArray[np.int64],
    stop: NDArray[np.int64],
    window_stop: NDArray[np.int64],
) -> NDArray[np.int64]:
    """As above from the other end: the last row whose full batch ends by ``e`` starts it.

    The few rows that may lie between that batch and ``e`` are left out.
    """
    if not len(start):
        return start
    # A batch that would leave its window ends beyond every ``e``; the ends never fall, lengths never rise.
    end_of = np.arange(len(capacity)) + capacity
    stop_of_row = np.repeat(window_stop, np.diff(window_stop, prepend=0))
    end_of = np.minimum(end_of, stop_of_row + 1)
    starts = [np.zeros(0, np.int64)]
    end, first = stop, start
    while len(end):
        position = np.searchsorted(end_of, end, side="right") - 1
        inside = position >= first
        end, first = position[inside], first[inside]
        starts.append(end)
    return np.concatenate(starts)


def _cut_running(rows: Rows, rows_at: NDArray[np.int64]) -> Cuts:
    """Shuffled rows of each group in hash order, cut with a running maximum."""
    num_groups = int(rows.group.max()) + 1
    group_bits = max(1, (num_groups - 1).bit_length())
    word = (rows.group.astype(_U64) << _U64(64 - group_bits)) | (rows.hash >> _U64(group_bits))
    order = np.argsort(word, kind="stable")
    capacity = rows_at[rows.length[order]]
    stop_of_group = np.cumsum(np.bincount(rows.group, minlength=num_groups))
    starts, stops = [], []
    position = 0
    for stop in stop_of_group.tolist():
        while position < stop:
            most = int(capacity[position])  # later rows can only lower it
            lowest = np.minimum.accumulate(capacity[position : min(position + most, stop)])
            over = lowest < np.arange(1, len(lowest) + 1)
            size = int(over.argmax()) if over.any() else len(lowest)
            if position + size == stop and size < int(lowest[size - 1]):
                position = stop  # the group's last rows leave room
                break
            starts.append(position)
            position += size
            stops.append(position)
    return Cuts(order=order, start=np.array(starts, np.int64), stop=np.array(stops, np.int64))
