"""The MDS format as bytes: where the columns of a sample begin and end, and what the values are.

Layout (mosaicml-streaming 0.13, ``format/mds``), all little-endian. A shard is ``u32 num_samples``,
``u32 offset[num_samples + 1]``, a JSON text with the columns, then the samples. A sample is one ``u32``
size for each column of varying size, then the columns' values in the order of their names.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = bytes | memoryview

SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
# A dynamic dtype is one byte: the bits, +1 where signed, +2 where floating point.
_VALUE_DTYPES = {
    dtype.itemsize * 8 + {"u": 0, "i": 1, "f": 2}[dtype.kind]: dtype for dtype in SCALARS.values()
}
_SHAPE_DTYPES = [np.dtype(f"<u{1 << log2}") for log2 in range(4)]
# Rows of a shard whose heads are read at once; bounds the index arrays to a few MB.
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ArrayEncoding:
    """``ndarray[:dtype[:shape]]``: ``None`` where each value carries its own.

    Attributes:
        dtype: Stored dtype, little-endian.
        shape: Stored shape.
    """

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None


@cache
def array_encoding(encoding: str) -> ArrayEncoding | None:
    """The parts of an ``ndarray`` encoding; ``None`` for every other encoding."""
    name, *args = encoding.split(":")
    if name != "ndarray" or len(args) > 2:
        return None
    dtype = SCALARS.get(args[0]) if args and args[0] else None
    if args and args[0] and dtype is None:
        return None
    shape = tuple(int(size) for size in args[1].split(",")) if len(args) == 2 else None
    return ArrayEncoding(dtype=dtype, shape=shape)


def decode_array(encoding: ArrayEncoding, data: Bytes) -> NDArray[Any]:
    """One ``ndarray`` value as a read-only view of ``data``.

    Raises:
        ValueError: The header does not fit the bytes.
    """
    at, dtype, shape = 0, encoding.dtype, encoding.shape
    if dtype is None:
        if len(data) < 1 or data[0] not in _VALUE_DTYPES:
            raise ValueError(f"no such dtype code: {bytes(data[:1])!r}")
        dtype, at = _VALUE_DTYPES[data[0]], 1
    if shape is None:
        if len(data) <= at:
            raise ValueError("no shape")
        ndim, dtype_of_shape = data[at] >> 2, _SHAPE_DTYPES[data[at] & 3]
        end = at + 1 + ndim * dtype_of_shape.itemsize
        if len(data) < end:
            raise ValueError(f"a shape of {ndim} axes is cut off")
        shape = tuple(np.frombuffer(data[at + 1 : end], dtype_of_shape).tolist())
        at = end
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if len(data) - at != num_bytes:
        raise ValueError(
            f"{dtype.name} of shape {shape} needs {num_bytes} bytes of values, not {len(data) - at}"
        )
    return np.frombuffer(data[at:], dtype).reshape(shape)


_PLAIN: dict[str, Callable[[Bytes], Any]] = {
    "bytes": bytes,
    "str": lambda data: str(data, "utf-8"),
    "json": lambda data: json.loads(str(data, "utf-8")),
    "str_int": lambda data: int(str(data, "utf-8")),
    "str_float": lambda data: float(str(data, "utf-8")),
    "str_decimal": lambda data: Decimal(str(data, "utf-8")),
}


def scalar_dtype(encoding: str) -> np.dtype[Any] | None:
    """Stored dtype of a number of fixed size; ``None`` for every other encoding."""
    return SCALARS["int64"] if encoding == "int" else SCALARS.get(encoding)


def decode_value(encoding: str, data: Bytes, fallback: Callable[[str, bytes], Any] | None) -> Any:
    """One value, equal to what upstream's ``mds_decode`` gives.

    Args:
        encoding: MDS encoding, such as ``ndarray:uint16``.
        data: The stored bytes.
        fallback: Decoder of the encodings that are not read here (images, pickles).

    Raises:
        ValueError: The bytes are no such value, or nothing reads the encoding.
    """
    if array := array_encoding(encoding):
        return decode_array(array, data)
    if dtype := scalar_dtype(encoding):
        if len(data) != dtype.itemsize:
            raise ValueError(f"{encoding} needs {dtype.itemsize} bytes, not {len(data)}")
        value = np.frombuffer(data, dtype)[0]
        return int(value) if encoding == "int" else value
    if plain := _PLAIN.get(encoding):
        return plain(data)
    if fallback is None:
        raise ValueError(f"nothing reads the encoding {encoding!r}")
    return fallback(encoding, bytes(data))


def _words(data: NDArray[np.uint8], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ``u32`` at each byte position; past the end of the data it is made of the last byte."""
    picked = np.take(data, at[:, None] + np.arange(4), mode="clip")  # (n, 4)
    return picked.view("<u4")[:, 0].astype(np.int64)


def column_span(
    data: NDArray[np.uint8], offsets: NDArray[np.int64], sizes: Sequence[int | None], column: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Bytes of one column in every sample of a shard.

    Args:
        data: The whole shard, shape (bytes,).
        offsets: First byte of each sample and the end of the last, ascending, shape (n + 1,).
        sizes: Bytes of each column's values, ``None`` where they vary.
        column: Number of the column.

    Returns:
        First byte and number of bytes, int64, shape (n,), and whether the sizes of all columns add up to
        the sample, bool, shape (n,). Where they do not, the bytes mean nothing.
    """
    num_varying = sum(size is None for size in sizes)
    starts = np.empty(len(offsets) - 1, np.int64)
    lengths = np.empty_like(starts)
    good = np.empty(len(starts), np.bool_)
    for first in range(0, len(starts), _CHUNK):
        rows = slice(first, first + _CHUNK)
        word = offsets[:-1][rows]
        at = word + 4 * num_varying
        for number, size in enumerate(sizes):
            size_of_rows: NDArray[np.int64] | int
            if size is None:
                size_of_rows = _words(data, word)
                word = word + 4
            else:
                size_of_rows = size
            if number == column:
                starts[rows], lengths[rows] = at, size_of_rows
            at = at + size_of_rows
        good[rows] = at == offsets[1:][rows]
    return starts, lengths, good


def vector_span(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    good: NDArray[np.bool_],
    encoding: ArrayEncoding,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Bytes of the *values* of one-dimensional arrays with a dtype that the encoding names.

    Args:
        data: The whole shard, shape (bytes,).
        starts: First byte of each encoded array, shape (n,).
        lengths: Bytes of each encoded array, shape (n,).
        good: Where the two can be trusted, shape (n,).
        encoding: How the arrays are stored.

    Returns:
        First byte of the values, int64; whether the array is of that kind and its header fits its bytes,
        bool; number of bytes of the values, int64; all of shape (n,).
    """
    if encoding.dtype is None or (encoding.shape is not None and len(encoding.shape) != 1):
        return starts, np.zeros_like(good), lengths
    if encoding.shape is not None:
        return starts, good & (lengths == encoding.shape[0] * encoding.dtype.itemsize), lengths
    first = np.where(good, starts, 0)
    code = np.take(data, first, mode="clip").astype(np.int64)  # ndim << 2 | log2(bytes of each size)
    width = np.int64(1) << (code & 3)
    within = np.arange(8)
    # (n, 8): the first size, with bytes that belong to the values blanked out
    raw = np.take(data, first[:, None] + 1 + within, mode="clip")
    raw = np.where(within < width[:, None], raw, 0).astype(np.uint8)
    count = raw.view("<u8")[:, 0].astype(np.int64)
    num_bytes = lengths - 1 - width
    # Divided, not multiplied: a corrupt count must not overflow into a match.
    whole, rest = np.divmod(num_bytes, encoding.dtype.itemsize)
    fits = good & (code >> 2 == 1) & (num_bytes > 0) & (count == whole) & (rest == 0)
    return starts + 1 + width, fits, np.where(fits, num_bytes, 0)
