"""Source files of every kind behind one reader: record batches of partitions that can be read alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from shardgen.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ColumnStatistics:
    """What a file says about the values of one partition of a column; ``None``: unknown.

    Attributes:
        low: Smallest value.
        high: Largest value.
        num_null: Null values, null rows and empty rows together.
    """

    low: int | None
    high: int | None
    num_null: int | None


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One source file, described so that any process can open it.

    Attributes:
        path: Path or URI as found.
        kind: One of ``parquet``, ``arrow``, ``arrow-stream``, ``jsonl``, ``indexed``.
        num_bytes: Size on disk.
        version: Changes when the file does (size, modification time).
        schema: Arrow schema.
        partition_rows: Rows of each partition, in order.
        marks: What the reader needs to find each partition, by kind.
    """

    path: str
    kind: str
    num_bytes: int
    version: str
    schema: Any
    partition_rows: tuple[int, ...]
    marks: tuple[Any, ...] = field(default=(), repr=False)

    @property
    def num_rows(self) -> int:
        return sum(self.partition_rows)

    def statistics(self, column: str) -> list[ColumnStatistics] | None:
        """Statistics of each partition from the file's metadata, or ``None`` where the kind has none."""
        if self.kind != "parquet":
            return None
        from shardgen.read_parquet import parquet_statistics

        return parquet_statistics(self, column)

    def batches(
        self, columns: Sequence[str], first: int, last: int, max_rows: int, *, threads: bool = True
    ) -> Iterator[Any]:
        """Record batches of partitions ``first..last - 1``, in row order.

        Args:
            columns: Columns to read; others are never decoded (Parquet) or touched (Arrow).
            first: First partition.
            last: One past the last partition.
            max_rows: Most rows of a batch.
            threads: Let Arrow decode columns in parallel.
        """
        names = list(dict.fromkeys(columns))
        with reading(self.path):
            for batch in _reader(self.kind)(self, names, first, last, max_rows, threads):
                for row in range(0, batch.num_rows, max_rows):
                    yield batch.slice(row, max_rows)


@contextlib.contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what Arrow and the operating system raise into one line that names the file."""
    try:
        yield
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise UserError(f"{path} cannot be read: {text}") from error


def _reader(kind: str) -> Any:
    """Function that yields the record batches of a kind of file."""
    if kind == "parquet":
        from shardgen.read_parquet import parquet_batches

        return parquet_batches
    if kind == "jsonl":
        from shardgen.read_jsonl import jsonl_batches

        return jsonl_batches
    from shardgen import read_arrow

    readers = {
        "arrow": read_arrow.file_batches,
        "arrow-stream": read_arrow.stream_batches,
        "indexed": read_arrow.indexed_batches,
    }
    return readers[kind]
