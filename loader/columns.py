"""Columns that ride along with the tokens: padded beside them, stacked, or listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from loader.mds import array_encoding, scalar_dtype
from loader.shards import SampleReader
from shardgen.errors import UserError

Kind = Literal["tokens", "scalars", "list"]


@dataclass(frozen=True, kw_only=True)
class RawColumn:
    """The values of one column of a batch, as stored.

    Attributes:
        kind: ``tokens``: arrays with one entry per token, joined along that axis; ``scalars``: one number
            per row; ``list``: anything else, one item per row.
        values: An array of shape (tokens, ...) or (n,), or a list of n values.
    """

    kind: Kind
    values: Any


def read_column(
    reader: SampleReader,
    sample_ids: NDArray[np.int64],
    column: str,
    lengths: NDArray[np.int64],
    *,
    tokens_encoding: str,
    must_be_padded: bool,
) -> RawColumn:
    """Copy one column of the rows of a batch out of the maps.

    Args:
        reader: Where the samples are.
        sample_ids: Rows, int64, shape (n,).
        column: Any stored column but the tokens.
        lengths: Tokens of each row, int64, shape (n,).
        tokens_encoding: How the tokens are stored.
        must_be_padded: The caller has said that the first axis is the tokens; numbers have none.

    Raises:
        UserError: A value cannot be read, or has not one entry per token although it must.
    """
    encoding = reader.encoding(column)
    if scalar_dtype(encoding) is not None:
        return RawColumn(kind="scalars", values=reader.scalars(sample_ids, column))
    values = reader.values(sample_ids, column)
    array, tokens = array_encoding(encoding), array_encoding(tokens_encoding)
    if array is not None:
        # A fixed shape is the tokens' only if theirs is fixed too: else it would change from batch to batch.
        by_chance = array.shape is not None and (tokens is None or tokens.shape is None)
        long = [len(value) for value in values]
        same = len({(value.dtype, value.shape[1:]) for value in values}) <= 1
        if same and not by_chance and long == lengths.tolist():
            if values:
                return RawColumn(kind="tokens", values=np.concatenate(values))
            dtype = np.dtype(np.uint8) if array.dtype is None else array.dtype
            return RawColumn(kind="tokens", values=np.empty(0, dtype))
    if must_be_padded:
        for sample, value, length in zip(sample_ids.tolist(), values, lengths.tolist(), strict=True):
            if not isinstance(value, np.ndarray) or len(value) != length:
                what = f"shape {value.shape}" if isinstance(value, np.ndarray) else f"a {encoding}"
                raise UserError(
                    f"pad_values: column {column!r} of {reader.name(sample)} is {what}, not one entry for "
                    f"each of its {length} tokens; take the column out of pad_values to get a list"
                )
        raise UserError(
            f"pad_values: column {column!r} mixes dtypes or shapes after the first axis in one batch"
        )
    return RawColumn(kind="list", values=values)


def finish_column(
    name: str, column: RawColumn, lengths: NDArray[np.int64], pad: Any, shape: tuple[int, int] | None
) -> torch.Tensor | list[Any]:
    """The tensor or list of one column.

    Args:
        name: The column, for errors.
        column: What :func:`read_column` gave.
        lengths: Tokens of the real rows, int64, shape (n,).
        pad: Value of padding and of missing rows.
        shape: (B, L) of the padded tensors; ``None``: nothing is padded, rows stay joined.

    Returns:
        ``tokens``: (B, L, ...), or (T, ...) without a shape; ``scalars``: (B,); ``list``: B items, ``None``
        in the missing rows.

    Raises:
        UserError: The pad value does not fit the column's dtype.
    """
    num_rows = len(lengths) if shape is None else shape[0]
    if column.kind == "list":
        items = [torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for v in column.values]
        return items + [None] * (num_rows - len(items))
    values = column.values
    if shape is None:
        return torch.from_numpy(np.array(values))
    if column.kind == "scalars":
        out = np.full(num_rows, pad_value(name, pad, values.dtype), values.dtype)
        out[: len(values)] = values
        return torch.from_numpy(out)
    out = np.full(
        (*shape, *values.shape[1:]), pad_value(name, pad, values.dtype), values.dtype
    )  # (B, L, ...)
    out[: len(lengths)][np.arange(shape[1]) < lengths[:, None]] = values
    return torch.from_numpy(out)


def pad_value(name: str, pad: Any, dtype: np.dtype[Any]) -> Any:
    """``pad`` as a value of ``dtype``.

    Raises:
        UserError: It would become another number.
    """
    try:
        if dtype.kind in "iu" and int(pad) == pad and np.iinfo(dtype).min <= pad <= np.iinfo(dtype).max:
            return dtype.type(int(pad))
        if dtype.kind == "f":
            with np.errstate(over="ignore"):
                value = dtype.type(float(pad))
            if np.isinf(value) == np.isinf(float(pad)):
                return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise UserError(f"pad_values: {pad!r} for column {name!r} is no {dtype.name}")
