"""A batch before it is made of tensors: the stored bytes, ready to be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.columns import RawColumn
from loader.shards import Vectors


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """The bytes of a batch as stored: flat, narrow, cheap to send to another process.

    Attributes:
        sample_ids: Rows, int64, shape (n,).
        lengths: Tokens of each row, int64, shape (n,).
        tokens: Values of ``dtype``: (n, longest) with zeros after each row, or all rows one after another
            in the packed layout.
        dtype: Stored dtype of the tokens, as a numpy dtype string.
        loss: One byte per token, in the same arrangement, not 0 where a loss mask is; ``None`` without one.
            Eight times fewer bits are pickled.
        columns: The other columns asked for.
    """

    sample_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tokens: bytes
    dtype: str
    loss: NDArray[np.bool_] | None
    columns: Mapping[str, RawColumn]

    def __reduce__(self) -> tuple[Any, ...]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        count = None
        if self.loss is not None:
            count, fields["loss"] = self.loss.size, np.packbits(self.loss).tobytes()
        return _unpickle, (fields, count)


def _unpickle(fields: dict[str, Any], count: int | None) -> RawBatch:
    if count is not None:
        bits = np.unpackbits(np.frombuffer(fields["loss"], np.uint8), count=count)
        fields["loss"] = bits.view(np.bool_)
    return RawBatch(**fields)


_zeros = memoryview(bytes(1 << 16))


def joined(vectors: Vectors, width: int | None) -> bytes:
    """All rows one after another, each followed by zeros up to ``width`` values (``None``: no zeros)."""
    global _zeros
    if width is None:
        return b"".join(vectors.parts)
    row_bytes = width * vectors.dtype.itemsize
    if row_bytes > len(_zeros):
        _zeros = memoryview(bytes(2 * row_bytes))
    zeros = _zeros
    pieces = [zeros] * (2 * len(vectors.parts))
    pieces[::2] = vectors.parts
    pieces[1::2] = [zeros[len(part) : row_bytes] for part in vectors.parts]
    return b"".join(pieces)
