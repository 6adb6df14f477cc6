"""Source files of every kind behind one reader: independently readable partitions of rows, as record batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from shardgen import storage
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
        return _parquet_statistics(self, column) if self.kind == "parquet" else None

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
            for batch in _READERS[self.kind](self, names, first, last, max_rows, threads):
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


def _open_parquet(source: SourceFile) -> Any:
    import pyarrow.parquet as pq

    # Pages are decoded as batches ask for them, so a row group of any size is streamed.
    return pq.ParquetFile(storage.open_input(source.path), pre_buffer=False)


def _parquet_batches(
    source: SourceFile, columns: list[str], first: int, last: int, max_rows: int, threads: bool
) -> Iterator[Any]:
    with _open_parquet(source) as file:
        groups = list(range(first, last))
        yield from file.iter_batches(max_rows, row_groups=groups, columns=columns, use_threads=threads)


def _leaf_indices(metadata: Any, column: str) -> list[int]:
    """Numbers of the physical columns that store a top-level column."""
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    return [i for i, path in enumerate(paths) if path == column or path.startswith(f"{column}.")]


def _parquet_statistics(source: SourceFile, column: str) -> list[ColumnStatistics] | None:
    with reading(source.path), _open_parquet(source) as file:
        metadata = file.metadata
        leaves = _leaf_indices(metadata, column)
        if len(leaves) != 1:
            return None
        found = []
        for group in range(metadata.num_row_groups):
            stats = metadata.row_group(group).column(leaves[0]).statistics
            ranged = stats is not None and stats.has_min_max and isinstance(stats.min, int)
            found.append(
                ColumnStatistics(
                    low=int(stats.min) if ranged else None,
                    high=int(stats.max) if ranged else None,
                    num_null=stats.null_count if stats is not None and stats.has_null_count else None,
                )
            )
        return found


def describe_parquet(path: str, num_bytes: int, version: str) -> SourceFile:
    """Read the footer of a Parquet file."""
    import pyarrow.parquet as pq

    with reading(path), pq.ParquetFile(storage.open_input(path), pre_buffer=False) as file:
        metadata = file.metadata
        rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        return SourceFile(
            path=path,
            kind="parquet",
            num_bytes=num_bytes,
            version=version,
            schema=file.schema_arrow,
            partition_rows=rows,
        )


_READERS: dict[str, Any] = {"parquet": _parquet_batches}
