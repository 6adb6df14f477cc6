"""First pass: how many tokens each row has, without reading the tokens where a column of lengths exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen.columns import is_list, list_lengths, null_mask, numbers, plain
from shardgen.errors import UserError
from shardgen.formats import ColumnStatistics, SourceFile
from shardgen.sources import find_length_column

SCAN_ROWS = 65536
# Offsets come with their values, so rows are read in batches that stay small when rows are long.
OFFSET_ROWS = 4096
MAX_LENGTH = (1 << 31) - 1
NULL = -1


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """What the first pass learnt about each source row; files one after another, rows in order.

    Attributes:
        lengths: Tokens; 0 without tokens, -1 where the row (or a token in it, or its length) is null;
            int32, shape (R,).
        items: For each measured column its values or bytes per row, int64, shape (R,).
        file_start: First row of each file, int64, shape (files + 1,).
    """

    lengths: NDArray[np.int32]
    items: Mapping[str, NDArray[np.int64]]
    file_start: NDArray[np.int64]

    def where(self, row: int, sources: Sequence[SourceFile]) -> str:
        """``FILE row N`` of a row of the corpus."""
        file = int(np.searchsorted(self.file_start, row, side="right")) - 1
        return f"{sources[file].path} row {row - int(self.file_start[file])}"


def _stored_lengths(source: SourceFile, column: str, first: int, last: int) -> NDArray[np.int32]:
    """The column of lengths of some partitions; null becomes -1."""
    parts = [np.zeros(0, np.int32)]
    row = sum(source.partition_rows[:first])
    for batch in source.batches([column], first, last, SCAN_ROWS):
        array = plain(batch.column(0))
        if not str(array.type).startswith(("int", "uint")):
            raise UserError(
                f"{source.path} column {column!r} has type {array.type}, not integers: "
                'name another --length-column, or --length-column "" for none'
            )
        null = null_mask(array)
        values: NDArray[Any] = np.where(null, 0, numbers(array))
        outside = (values < 0) | (values > MAX_LENGTH)
        if outside.any():
            at = int(outside.argmax())
            raise UserError(
                f"{source.path} row {row + at}: length {int(values[at])} in column {column!r} is outside "
                f'0..{MAX_LENGTH}: correct the column, or use --length-column "" to count the tokens'
            )
        parts.append(np.where(null, NULL, values.astype(np.int32)))
        row += len(values)
    return np.concatenate(parts)


def _counted(source: SourceFile, columns: Sequence[str], first: int, last: int) -> list[NDArray[np.int64]]:
    """Values per row of list or text columns, -1 where the row is null or holds a null."""
    parts: list[list[NDArray[np.int64]]] = [[np.zeros(0, np.int64)] for _ in columns]
    for batch in source.batches(columns, first, last, OFFSET_ROWS):
        for found, name in zip(parts, columns, strict=True):
            lengths, null = list_lengths(batch.column(batch.schema.get_field_index(name)))
            found.append(np.where(null, NULL, lengths))
    return [np.concatenate(found) for found in parts]


def _null_rows(source: SourceFile, column: str, partition: int) -> NDArray[np.bool_]:
    """Rows of a partition that are null in a column, or hold a null in it, bool, shape (R,)."""
    parts = [np.zeros(0, np.bool_)]
    for batch in source.batches([column], partition, partition + 1, OFFSET_ROWS):
        array = plain(batch.column(0))
        parts.append(list_lengths(array)[1] if is_list(array.type) else null_mask(array))
    return np.concatenate(parts)


def _suspicious(stored: NDArray[np.int32], statistics: ColumnStatistics | None) -> bool:
    """Whether the lengths of a partition cannot be taken from the column alone.

    A row without tokens, a null row and a null token all count as null values in Parquet's
    statistics; where there are any, the offsets tell which.
    """
    if len(stored) and int(stored.min()) <= 0:
        return True
    return statistics is not None and bool(statistics.num_null)


def scan_lengths(
    sources: Sequence[SourceFile],
    *,
    tokens_column: str,
    length_column: str | None = None,
    measured: Sequence[str] = (),
    null_columns: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> RowLengths:
    """Lengths of all rows.

    Args:
        sources: Files, in order.
        tokens_column: Column of tokens.
        length_column: As in :func:`shardgen.sources.find_length_column`.
        measured: Columns whose size the number of tokens does not tell (strings, ragged lists).
        null_columns: Columns in which a null makes the row null.
        progress: Called with the number of rows read since the last call.

    Raises:
        UserError: A column is missing or no list, or a stored length contradicts a row that was looked at.
    """
    lengths: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    items: dict[str, list[NDArray[np.int64]]] = {name: [np.zeros(0, np.int64)] for name in measured}
    for source in sources:
        column = find_length_column(source, tokens_column, length_column)
        num_partitions = len(source.partition_rows)
        unknown: list[ColumnStatistics | None] = [None] * num_partitions
        statistics = (source.statistics(tokens_column) if column else None) or unknown
        stored = _stored_lengths(source, column, 0, num_partitions) if column else None
        nulls = {name: source.statistics(name) for name in null_columns}
        row = 0
        for partition, num_rows in enumerate(source.partition_rows):
            said = None if stored is None else stored[row : row + num_rows]
            count_tokens = said is None or _suspicious(said, statistics[partition])
            wanted = ([tokens_column] if count_tokens else []) + list(measured)
            counted = (
                dict(zip(wanted, _counted(source, wanted, partition, partition + 1), strict=True))
                if wanted
                else {}
            )
            if count_tokens:
                found = counted[tokens_column].astype(np.int32)
                if said is not None:
                    check_stored(said, found, source.path, row, column or "")
                    found = np.where(said == NULL, np.int32(NULL), found)
            else:
                assert said is not None
                found = said.copy()
            for name, stats in nulls.items():
                if stats is None or stats[partition].num_null != 0:
                    found[_null_rows(source, name, partition)] = NULL
            lengths.append(found)
            for name in measured:
                items[name].append(counted[name])
            row += num_rows
            if progress is not None:
                progress(num_rows)
    return RowLengths(
        lengths=np.concatenate(lengths),
        items={name: np.concatenate(parts) for name, parts in items.items()},
        file_start=np.cumsum([0] + [source.num_rows for source in sources]).astype(np.int64),
    )


def check_stored(
    stored: NDArray[np.integer[Any]], real: NDArray[np.integer[Any]], path: str, first_row: int, column: str
) -> None:
    """Refuse a stale column of lengths, naming the row, the stored and the real length.

    Args:
        stored: Lengths as the column says, -1 where null, shape (R,).
        real: Tokens of the rows, -1 where null, shape (R,).
        path: File to name.
        first_row: Row of the file that comes first here.
        column: Column to name.
    """
    wrong = (stored != real) & (stored != NULL) & (real != NULL)
    if wrong.any():
        at = int(wrong.argmax())
        raise UserError(
            f"{path} row {first_row + at}: column {column!r} says {int(stored[at])} tokens but the row has "
            f"{int(real[at])}: the column is stale; correct it, or use "
            '--length-column "" to count the tokens'
        )
