"""Encode many samples at once: numpy writes the headers, one copy per sample and column moves the payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardgen.layout import Column, array_header_bytes

# Below this mean payload a gather by index beats one memory copy per sample (measured: 30-60 bytes).
SMALL_PAYLOAD_BYTES = 40


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The values of one column for the samples to encode.

    Attributes:
        values: Array values of the stored type, text as bytes, or one scalar per sample.
        starts: First value of each sample inside ``values``, int64, shape (N,); unused for scalars.
        num_items: Values (or bytes of text) of each sample, int64, shape (N,).
        scalar: ``values`` holds one number per sample.
    """

    values: NDArray[np.generic]
    starts: NDArray[np.int64]
    num_items: NDArray[np.int64]
    scalar: bool = False

    def take(self, order: NDArray[np.int64]) -> Payload:
        """The same for the samples in another order."""
        return Payload(
            values=self.values[order] if self.scalar else self.values,
            starts=self.starts[order],
            num_items=self.num_items[order],
            scalar=self.scalar,
        )


def _scatter(out: NDArray[np.uint8], at: NDArray[np.int64], rows: NDArray[np.generic]) -> None:
    """Write one fixed-width value per position: ``out[at[i]:at[i] + width] = bytes of rows[i]``."""
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(at), -1)  # (N, width)
    out[at[:, None] + np.arange(raw.shape[1])] = raw


def copy_ranges(
    out: NDArray[np.uint8],
    at: NDArray[np.int64],
    source: NDArray[np.uint8],
    starts: NDArray[np.int64],
    num_bytes: NDArray[np.int64],
) -> None:
    """``out[at[i]:at[i] + num_bytes[i]] = source[starts[i]:starts[i] + num_bytes[i]]`` for all i."""
    total = int(num_bytes.sum())
    if not total:
        return
    if total < SMALL_PAYLOAD_BYTES * len(at):
        within = np.arange(total) - np.repeat(np.cumsum(num_bytes) - num_bytes, num_bytes)
        out[np.repeat(at, num_bytes) + within] = source[np.repeat(starts, num_bytes) + within]
        return
    into, of = memoryview(out.data), memoryview(source.data)
    ends = (at + num_bytes).tolist()
    for a, b, c, d in zip(at.tolist(), ends, starts.tolist(), (starts + num_bytes).tolist(), strict=True):
        into[a:b] = of[c:d]


def _array_headers(out: NDArray[np.uint8], at: NDArray[np.int64], num_values: NDArray[np.int64]) -> None:
    """One byte ``ndim << 2 | log2(bytes of the shape)``, then the shape in that many bytes."""
    width = array_header_bytes(num_values) - 1
    out[at] = (1 << 2) | (width >> 1)
    for log2, dtype in enumerate(("<u1", "<u2", "<u4")):
        chosen = width == 1 << log2
        if chosen.any():
            _scatter(out, at[chosen] + 1, num_values[chosen].astype(dtype))


def encode_samples(
    columns: Sequence[Column],
    payloads: Mapping[str, Payload],
    sizes: NDArray[np.int64],
    out: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Encoded samples, one after another, as ``MDSWriter.encode_sample`` would give them joined.

    Args:
        columns: Stored columns, sorted by name.
        payloads: Values of each column for the N samples, in the order to encode.
        sizes: Encoded bytes of each sample, shape (N,), from :func:`shardgen.layout.sample_bytes`.
        out: Buffer to fill, at least ``sizes.sum()`` bytes; a new one by default.

    Returns:
        uint8, shape (sizes.sum(),).
    """
    total = int(sizes.sum())
    out = np.empty(total, np.uint8) if out is None else out[:total]
    if not len(sizes):
        return out
    at = np.cumsum(sizes) - sizes  # next byte to write of each sample
    head = at.copy()  # next size word of each sample
    at = at + 4 * sum(column.fixed_bytes is None for column in columns)
    for column in columns:
        payload = payloads[column.name]
        if column.fixed_bytes is not None:
            _scatter(out, at, payload.values.astype(column.dtype, copy=False))
            at = at + column.fixed_bytes
            continue
        itemsize = 1 if column.kind == "text" else column.dtype.itemsize
        num_bytes = payload.num_items * itemsize
        before = np.int64(0) if column.kind == "text" else array_header_bytes(payload.num_items)
        _scatter(out, head, (num_bytes + before).astype("<u4"))
        head = head + 4
        if column.kind != "text":
            _array_headers(out, at, payload.num_items)
        source = payload.values.view(np.uint8)
        copy_ranges(out, at + before, source, payload.starts * itemsize, num_bytes)
        at = at + before + num_bytes
    return out
