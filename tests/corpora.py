"""Length distributions that tests share."""

from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from loader.keys import hash_ids
from shardgen.lengths import read_histogram_file, read_lengths_file

DATA = Path(__file__).parent / "data"
DRAFTER_OPTIMAL = (0, 832, 1312, 1776, 2432, 3632, 6534)
DRAFTER_PUBLISHED = (0, 770, 1216, 1728, 2432, 3296, 6534)


@cache
def drafter_lengths() -> NDArray[np.int64]:
    """902,087 lengths of a drafter's training set, mean 2,054, longest 6,534, in a fixed random order."""
    histogram = read_histogram_file(DATA / "drafter_histogram.npz")
    lengths = np.repeat(histogram.lengths, histogram.counts)
    return lengths[np.argsort(hash_ids(np.arange(len(lengths)), 1))]


@cache
def function_lengths() -> NDArray[np.int64]:
    """20,000 code functions: mean 297, heavy-tailed up to 43,863."""
    return read_lengths_file(DATA / "python_functions_lengths.npz")


def log_uniform(num_samples: int, low: int, high: int, key: int = 2) -> NDArray[np.int64]:
    """Lengths whose logarithm is uniform."""
    u = hash_ids(np.arange(num_samples), key).astype(np.float64) / 2.0**64
    return np.floor(low * (high / low) ** u).astype(np.int64)
