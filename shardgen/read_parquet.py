"""Parquet files: row groups are partitions, streamed page by page; statistics from the footer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow.parquet as pq

from shardgen import storage
from shardgen.formats import ColumnStatistics, SourceFile, reading

REMOTE_BUFFER_BYTES = 4 << 20


def _open(path: str) -> Any:
    # Pages are decoded as batches ask for them, so a row group of any size is streamed.
    buffer_size = REMOTE_BUFFER_BYTES if storage.is_remote(path) else 0
    return pq.ParquetFile(storage.open_input(path), pre_buffer=False, buffer_size=buffer_size)


def parquet_batches(
    source: SourceFile, columns: list[str], first: int, last: int, max_rows: int, threads: bool
) -> Iterator[Any]:
    with _open(source.path) as file:
        groups = list(range(first, last))
        yield from file.iter_batches(max_rows, row_groups=groups, columns=columns, use_threads=threads)


def _leaf_indices(metadata: Any, column: str) -> list[int]:
    """Numbers of the physical columns that store a top-level column."""
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    return [i for i, path in enumerate(paths) if path == column or path.startswith(f"{column}.")]


def parquet_statistics(source: SourceFile, column: str) -> list[ColumnStatistics] | None:
    """Statistics of a column in each row group; ``None`` for a column of several physical ones."""
    with reading(source.path), _open(source.path) as file:
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
    with reading(path), _open(path) as file:
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


def parquet_counts(source: SourceFile, column: str) -> list[int] | None:
    """Values of a column in each row group (null and empty rows count as one); ``None`` as above."""
    with reading(source.path), _open(source.path) as file:
        metadata = file.metadata
        leaves = _leaf_indices(metadata, column)
        if len(leaves) != 1:
            return None
        groups = range(metadata.num_row_groups)
        return [metadata.row_group(group).column(leaves[0]).num_values for group in groups]
