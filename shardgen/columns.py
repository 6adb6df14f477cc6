"""Arrow columns of any shape as plain numpy: where each row's values start, how many, and which are null."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Lists:
    """Rows of a list (or string) column.

    Attributes:
        starts: First value of each row in ``values``, int64, shape (N,).
        num_items: Values of each row, 0 where null, int64, shape (N,).
        null: Rows that are null, bool, shape (N,).
        null_item: Rows with a null value inside, bool, shape (N,).
        values: Values of all rows; bytes (uint8) for text; may hold more than the rows use.
    """

    starts: NDArray[np.int64]
    num_items: NDArray[np.int64]
    null: NDArray[np.bool_]
    null_item: NDArray[np.bool_]
    values: NDArray[np.generic]


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is one of the list types."""
    t = pa.types
    return any(
        test(kind)
        for test in (t.is_list, t.is_large_list, t.is_fixed_size_list, t.is_list_view, t.is_large_list_view)
    )


def is_text(kind: Any) -> bool:
    """Whether an Arrow type is a string or binary type."""
    t = pa.types
    tests = (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_large_binary)
    return any(test(kind) for test in (*tests, t.is_binary_view, t.is_fixed_size_binary))


def plain_type(kind: Any) -> Any:
    """The type below dictionary encoding and extension types."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif pa.types.is_dictionary(kind):
            kind = kind.value_type
        else:
            return kind


def plain(array: Any) -> Any:
    """Unwrap extension arrays and decode dictionaries."""
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary.take(array.indices)
        else:
            return array


def null_mask(array: Any) -> NDArray[np.bool_]:
    """Rows that are null, bool, shape (N,)."""
    if array.null_count == 0:
        return np.zeros(len(array), np.bool_)
    return np.asarray(pc.is_null(array).to_numpy(zero_copy_only=False), np.bool_)


def numbers(array: Any) -> NDArray[np.generic]:
    """Values of a primitive array without copying where possible; null slots hold any value."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    dtype = np.dtype(array.type.to_pandas_dtype())
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array), dtype)
    return np.frombuffer(buffer, dtype, count=len(array), offset=array.offset * dtype.itemsize)


def _list_bounds(array: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First value and number of values of each row inside ``array.values``."""
    kind = array.type
    if pa.types.is_fixed_size_list(kind):
        # `.values` ignores the slice of the parent; a null row takes its slots all the same.
        starts = (array.offset + np.arange(len(array), dtype=np.int64)) * kind.list_size
        return starts, np.full(len(array), kind.list_size, np.int64)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return numbers(array.offsets).astype(np.int64), numbers(array.sizes).astype(np.int64)
    offsets = numbers(array.offsets).astype(np.int64)  # (N + 1,), already those of the slice
    return offsets[:-1], np.diff(offsets)


def lists_of(array: Any) -> Lists:
    """Rows of a list array of numbers."""
    array = plain(array)
    null = null_mask(array)
    starts, num_items = _list_bounds(array)
    if null.any():  # null rows may hide values
        starts, num_items = np.where(null, 0, starts), np.where(null, 0, num_items)
    used = num_items > 0
    low = int(starts[used].min()) if used.any() else 0
    high = int((starts + num_items)[used].max()) if used.any() else 0
    child = plain(array.values.slice(low, high - low))
    starts = np.where(used, starts - low, 0)
    null_item = np.zeros(len(array), np.bool_)
    no_values: NDArray[np.generic] = np.zeros(len(child), np.int32)  # of a list<null>
    if child.null_count and pa.types.is_null(child.type):
        null_item, values = used, no_values
    else:
        if child.null_count:
            before = np.concatenate([[0], np.cumsum(null_mask(child))])
            null_item = before[starts + num_items] > before[starts]
        values = no_values if pa.types.is_null(child.type) else numbers(child)
    return Lists(starts=starts, num_items=num_items, null=null, null_item=null_item, values=values)


def text_of(array: Any) -> Lists:
    """Rows of a string or binary array; values are bytes."""
    array = plain(array)
    kind = array.type
    binary = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    array = array.cast(pa.large_string() if binary else pa.large_binary())
    null = null_mask(array)
    _, offset_buffer, data = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, count=len(array) + 1, offset=array.offset * 8)
    values = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return Lists(
        starts=offsets[:-1],
        num_items=np.where(null, 0, np.diff(offsets)),
        null=null,
        null_item=np.zeros(len(array), np.bool_),
        values=values,
    )


def list_lengths(array: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Values of each row (0 where null) and the rows that are null or hold a null; shapes (N,)."""
    rows = text_of(array) if is_text(plain_type(array.type)) else lists_of(array)
    return rows.num_items, rows.null | rows.null_item
