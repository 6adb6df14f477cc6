"""Histograms and files of lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgen.errors import UserError
from shardgen.lengths import Histogram, read_histogram_file, read_lengths_file


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=100))
def test_histogram_counts(lengths):
    histogram = Histogram.from_lengths(np.array(lengths))
    assert histogram.num_samples == len(lengths) and histogram.num_tokens == sum(lengths)
    assert histogram.longest == max(lengths)
    again = np.repeat(histogram.lengths, histogram.counts)
    assert again.tolist() == sorted(lengths)


def test_large_counts_do_not_overflow():
    histogram = Histogram(lengths=np.array([10**6]), counts=np.array([10**15]))
    assert histogram.num_tokens == 10**21


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "uint64"])
def test_files_of_any_integer_type(tmp_path, dtype):
    lengths = np.array([5, 1, 200, 5], dtype)
    np.save(tmp_path / "a.npy", lengths)
    np.savez(tmp_path / "b.npz", lengths=lengths, other=np.arange(3))
    np.savez(tmp_path / "c.npz", only=lengths)
    for name in ("a.npy", "b.npz", "c.npz"):
        read = read_lengths_file(tmp_path / name)
        assert read.dtype == np.int64 and read.tolist() == [5, 1, 200, 5]
        assert read_histogram_file(tmp_path / name).counts.tolist() == [1, 2, 1]


def test_histogram_files(tmp_path):
    np.savez(tmp_path / "h.npz", lengths=np.array([3, 9]), counts=np.array([2, 1]))
    histogram = read_histogram_file(tmp_path / "h.npz")
    assert (histogram.lengths.tolist(), histogram.counts.tolist()) == ([3, 9], [2, 1])
    assert sorted(read_lengths_file(tmp_path / "h.npz").tolist()) == [3, 3, 9]


def test_lengths_of_a_histogram_come_in_no_order(tmp_path):
    counts = np.array([500, 300, 200])
    np.savez(tmp_path / "h.npz", lengths=np.array([3, 9, 27]), counts=counts)
    read = read_lengths_file(tmp_path / "h.npz")
    assert np.unique(read, return_counts=True)[1].tolist() == counts.tolist()
    for part in read.reshape(10, 100):  # each tenth has about the mix of all: six standard deviations at most
        assert np.all(np.abs([(part == length).mean() for length in (3, 9, 27)] - counts / 1000) < 0.3)
    assert read.tolist() == read_lengths_file(tmp_path / "h.npz").tolist()


def test_counts_are_positive_integers():
    for counts in ([1.5, 2.0], [1, 0], [1]):
        with pytest.raises(UserError, match=r"counts|one positive count"):
            Histogram(lengths=np.array([3, 9]), counts=np.array(counts))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([1.5, 2.0]), "lengths are integers"),
        (np.zeros((2, 2), int), "shape"),
        (np.array([], int), "no samples"),
        (np.array([4, 0, 2]), "row 1 has length 0"),
        (np.array([4, -3]), "row 1 has length -3"),
        (np.array([1 << 40]), "row 0 has length 1099511627776"),
        (np.array([1 << 63], np.uint64), "row 0 has length 9223372036854775808"),
    ],
)
def test_what_is_no_length_is_named(tmp_path, content, message):
    np.save(tmp_path / "x.npy", content)
    with pytest.raises(UserError, match=message) as caught:
        read_lengths_file(tmp_path / "x.npy")
    assert "x.npy" in str(caught.value)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04 cut")
    (tmp_path / "y.npy").write_bytes(b"text")
    np.savez(tmp_path / "two.npz", a=np.arange(3), b=np.arange(3))
    for name in ("x.npz", "y.npy", "missing.npy"):
        with pytest.raises(UserError, match=f"{name} cannot be read"):
            read_lengths_file(tmp_path / name)
    with pytest.raises(UserError, match=r"holds \['a', 'b'\]: name the array of lengths"):
        read_lengths_file(tmp_path / "two.npz")
