"""Sample lengths and their histogram."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardgen.errors import UserError


def check_lengths(lengths: NDArray[np.generic], where: str) -> NDArray[np.int64]:
    """One-dimensional positive integers as int64, or a :class:`UserError` naming ``where`` and the value."""
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise UserError(
            f"{where} holds {lengths.dtype} of shape {lengths.shape}: lengths are integers of shape (N,)"
        )
    if lengths.size == 0:
        raise UserError(f"{where} holds no samples")
    # Compare before the cast: a huge unsigned value would turn negative in it.
    if int(lengths.max()) > np.iinfo(np.int32).max or int(lengths.min()) < 1:
        bad = np.less(lengths, 1) | np.greater(lengths, np.iinfo(np.int32).max)
        row = int(bad.argmax())
        raise UserError(
            f"{where}: row {row} has length {int(lengths[row])}, outside 1..{np.iinfo(np.int32).max}"
        )
    return lengths.astype(np.int64, copy=False)


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many samples have each length.

    Attributes:
        lengths: Distinct lengths in tokens, ascending, int64, shape (D,).
        counts: Samples of each length, positive, int64, shape (D,).
    """

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", check_lengths(np.asarray(self.lengths), "histogram"))
        if np.asarray(self.counts).dtype.kind not in "iu":
            raise UserError(f"histogram counts are {np.asarray(self.counts).dtype}: they are integers")
        object.__setattr__(self, "counts", np.asarray(self.counts, np.int64))
        if self.counts.shape != self.lengths.shape or (self.counts < 1).any():
            raise UserError("histogram needs one positive count per length")
        if (np.diff(self.lengths) <= 0).any():
            raise UserError("histogram lengths are not strictly ascending")

    @classmethod
    def from_lengths(cls, lengths: NDArray[np.generic]) -> Histogram:
        """Histogram of positive integer lengths of shape (N,)."""
        checked = check_lengths(np.asarray(lengths), "lengths")
        counts = np.bincount(checked) if checked.max() <= 16 * checked.size + 65536 else None
        if counts is None:  # a few very long samples: a table of all lengths would be larger than the data
            distinct, counts = np.unique(checked, return_counts=True)
        else:
            distinct = counts.nonzero()[0]
            counts = counts[distinct]
        return cls(lengths=distinct.astype(np.int64), counts=counts.astype(np.int64))

    @property
    def num_samples(self) -> int:
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        # Python integers: 10^9 samples of 10^6 tokens fit int64, but a caller may go beyond.
        return sum(int(c) * int(n) for c, n in zip(self.counts, self.lengths, strict=True))

    @property
    def longest(self) -> int:
        return int(self.lengths[-1])


def _load_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"lengths": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read as numpy lengths: {error}") from error


def read_histogram_file(path: str | Path) -> Histogram:
    """Histogram from ``.npy`` or ``.npz``: lengths of shape (N,), or ``lengths`` with ``counts``.

    Args:
        path: A ``.npy`` file, or a ``.npz`` with the key ``lengths`` (or one single key).

    Raises:
        UserError: The file cannot be read or does not hold lengths.
    """
    path = Path(path)
    arrays = _load_arrays(path)
    if "counts" in arrays and "lengths" in arrays:
        return Histogram(
            lengths=check_lengths(arrays["lengths"], str(path)), counts=np.asarray(arrays["counts"])
        )
    return Histogram.from_lengths(read_lengths_file(path))


def _arbitrary_order(size: int) -> NDArray[np.int64]:
    """A permutation of ``range(size)`` that looks random and is the same everywhere: the order of a hash."""
    x = np.arange(size, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64's finaliser
        x += np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return np.argsort(x ^ (x >> np.uint64(31)))


def read_lengths_file(path: str | Path) -> NDArray[np.int64]:
    """Lengths by sample, int64, shape (N,); files and errors as in :func:`read_histogram_file`.

    A histogram knows no order. Its lengths come in an arbitrary, fixed one: sorted, they would pretend that
    each shard holds samples of one length.
    """
    path = Path(path)
    arrays = _load_arrays(path)
    if "counts" in arrays and "lengths" in arrays:
        histogram = Histogram(
            lengths=check_lengths(arrays["lengths"], str(path)), counts=np.asarray(arrays["counts"])
        )
        lengths = np.repeat(histogram.lengths, histogram.counts)
        return lengths[_arbitrary_order(len(lengths))]
    key = "lengths" if "lengths" in arrays else next(iter(arrays), "") if len(arrays) == 1 else ""
    if not key:
        raise UserError(f"{path} holds {sorted(arrays)}: name the array of lengths 'lengths'")
    return check_lengths(arrays[key], str(path))
