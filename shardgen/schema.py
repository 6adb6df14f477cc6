"""Which columns are stored and as what: types unified over all files, chosen by value, not by input type."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from shardgen.columns import is_list, is_text, list_lengths, numbers, plain, plain_type
from shardgen.errors import UserError
from shardgen.formats import ColumnStatistics, SourceFile
from shardgen.layout import Column
from shardgen.scan import OFFSET_ROWS

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
TOKEN_DTYPES = ("uint16", "int32", "int64", "uint64")  # what `auto` picks from, smallest first
OTHER_DTYPES = ("uint8", *TOKEN_DTYPES)


@dataclass(frozen=True, kw_only=True)
class Range:
    """Smallest and largest value of a column, and where the largest was seen."""

    low: int
    high: int
    path: str


def _value_type(kind: Any) -> Any:
    return plain_type(plain_type(kind).value_type)


def _partition_range(source: SourceFile, column: str, first: int, last: int) -> tuple[int, int] | None:
    low: int | None = None
    high: int | None = None
    for batch in source.batches([column], first, last, OFFSET_ROWS):
        array = plain(batch.column(0))
        if is_list(array.type):
            # `flatten` leaves out what null rows hide and what the slice does not cover
            array = plain(array.flatten())
        if pa.types.is_null(array.type):
            continue
        valid = array.drop_null()
        if len(valid):
            values = numbers(valid)
            a, b = int(values.min()), int(values.max())
            low, high = (a, b) if low is None or high is None else (min(low, a), max(high, b))
    return None if low is None or high is None else (low, high)


def value_range(sources: Sequence[SourceFile], column: str) -> Range:
    """Range of an integer column (or of the values of a list column) over all files.

    From the files' statistics where they have them, else by reading the column. 0..0 without values.
    """
    found: Range | None = None
    for source in sources:
        unknown: list[ColumnStatistics | None] = [None] * len(source.partition_rows)
        statistics = source.statistics(column) or unknown
        for partition, stats in enumerate(statistics):
            if stats is not None and stats.low is not None and stats.high is not None:
                seen: tuple[int, int] | None = (stats.low, stats.high)
            else:
                seen = _partition_range(source, column, partition, partition + 1)
            if seen is not None and found is None:
                found = Range(low=seen[0], high=seen[1], path=source.path)
            elif seen is not None and found is not None:
                path = source.path if seen[1] > found.high else found.path
                found = Range(low=min(found.low, seen[0]), high=max(found.high, seen[1]), path=path)
    return found or Range(low=0, high=0, path=sources[0].path)


def fits(dtype: str, low: int, high: int) -> bool:
    """Whether an integer type holds all of ``low..high``."""
    info = np.iinfo(dtype)
    return int(info.min) <= low and high <= int(info.max)


def _integer_dtype(sources: Sequence[SourceFile], column: str, asked: str, candidates: Sequence[str]) -> str:
    seen = value_range(sources, column)
    if asked != "auto":
        if not fits(asked, seen.low, seen.high):
            value = seen.high if seen.high > np.iinfo(asked).max else seen.low
            raise UserError(
                f"{seen.path}: value {value} of column {column!r} does not fit {asked} (values are "
                f"{seen.low}..{seen.high}): use --token-dtype auto or a wider type"
            )
        return asked
    for dtype in candidates:
        if fits(dtype, seen.low, seen.high):
            return dtype
    raise UserError(f"column {column!r} has values {seen.low}..{seen.high}, which no 64-bit type holds")


def _types(sources: Sequence[SourceFile], column: str) -> list[Any]:
    """The type of a column in each file, dictionary and extension types unwrapped."""
    types = []
    for source in sources:
        if column not in source.schema.names:
            names = ", ".join(map(repr, source.schema.names))
            raise UserError(
                f"{source.path} has no column {column!r} (it has {names}): name the right one with "
                "--tokens-column, --loss-mask-column or --columns"
            )
        if source.schema.names.count(column) > 1:
            raise UserError(f"{source.path} has two columns {column!r}: rename one")
        types.append(plain_type(source.schema.field(column).type))
    return types


def _is_integer(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _widest_float(types: Sequence[Any]) -> str:
    return max((np.dtype(t.to_pandas_dtype()) for t in types), key=lambda d: d.itemsize).name


def resolve_column(
    sources: Sequence[SourceFile], name: str, *, token_dtype: str | None = None, integers_only: bool = False
) -> Column:
    """Encoding of a stored column.

    Args:
        sources: All files.
        name: Column.
        token_dtype: Type asked for when this is the column of tokens (or ``auto``).
        integers_only: Refuse anything but lists of integers (tokens, masks).

    Raises:
        UserError: The column is missing, of a type that cannot be stored, or differs between files
            in a way that would lose values.
    """
    types = _types(sources, name)
    known = [t for t in types if not pa.types.is_null(t)]
    lists = [t for t in known if is_list(t)]
    if lists and len(lists) == len(known):
        values = [v for v in map(_value_type, lists) if not pa.types.is_null(v)]
        if all(map(_is_integer, values)):
            candidates = OTHER_DTYPES if token_dtype is None else TOKEN_DTYPES
            dtype = _integer_dtype(sources, name, token_dtype or "auto", candidates)
            return Column(name=name, encoding=f"ndarray:{dtype}", kind="aligned")
        if all(map(pa.types.is_floating, values)) and not integers_only:
            return Column(name=name, encoding=f"ndarray:{_widest_float(values)}", kind="aligned")
    elif known and not integers_only:
        if all(map(is_text, known)):
            text = all(
                pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_string_view(t)
                for t in known
            )
            return Column(name=name, encoding="str" if text else "bytes", kind="text")
        if all(map(pa.types.is_boolean, known)):
            return Column(name=name, encoding="uint8", kind="scalar")
        if all(map(_is_integer, known)):
            unsigned = any(t == pa.uint64() for t in known)
            high = value_range(sources, name).high if unsigned else 0
            encoding = "int" if high <= np.iinfo(np.int64).max else "uint64"
            return Column(name=name, encoding=encoding, kind="scalar")
        if all(map(pa.types.is_floating, known)):
            return Column(name=name, encoding=_widest_float(known), kind="scalar")
    shown = sorted({str(t) for t in types})
    wanted = "lists of integers" if integers_only else "numbers, strings, bytes or lists of numbers"
    raise UserError(f"column {name!r} has type {' and '.join(shown)}: only {wanted} can be stored in it")


def has_value_per_token(sources: Sequence[SourceFile], column: str, tokens_column: str) -> bool:
    """Whether a list column seems to have one value per token in every row.

    Parquet tells by the number of values of each row group; rows are compared while writing.
    """
    for source in sources:
        if source.kind == "parquet":
            from shardgen.read_parquet import parquet_counts

            if parquet_counts(source, column) != parquet_counts(source, tokens_column):
                return False
            continue
        for batch in source.batches([column, tokens_column], 0, len(source.partition_rows), OFFSET_ROWS):
            ours, tokens = (batch.column(batch.schema.get_field_index(n)) for n in (column, tokens_column))
            if not np.array_equal(list_lengths(ours)[0], list_lengths(tokens)[0]):
                return False
    return True


def choose_columns(
    sources: Sequence[SourceFile],
    *,
    tokens_column: str,
    loss_mask_column: str | None,
    columns: Sequence[str],
    token_dtype: str,
    ragged: Collection[str] = (),
) -> tuple[Column, ...]:
    """All stored columns, sorted by name: tokens, mask and ``columns``; errors as in :func:`resolve_column`.

    Lists in ``ragged`` are known not to have one value per token.
    """
    if token_dtype != "auto" and token_dtype not in INTEGERS:
        raise UserError(f"--token-dtype {token_dtype!r} is not one of auto, {', '.join(INTEGERS)}")
    names = {tokens_column, *columns} | ({loss_mask_column} if loss_mask_column else set())
    if loss_mask_column == tokens_column:
        raise UserError(f"--loss-mask-column {loss_mask_column!r} is the column of tokens")
    chosen = []
    for name in sorted(names):
        if name == tokens_column:
            column = resolve_column(sources, name, token_dtype=token_dtype, integers_only=True)
        else:
            column = resolve_column(sources, name, integers_only=name == loss_mask_column)
            if column.kind == "aligned" and name != loss_mask_column:
                aligned = name not in ragged and has_value_per_token(sources, name, tokens_column)
                column = replace(column, kind="aligned" if aligned else "ragged")
        chosen.append(column)
    return tuple(chosen)
