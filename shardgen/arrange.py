"""From samples to work: ids, layout, and tasks that together write every sample once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardgen.columns import plain_type
from shardgen.formats import SourceFile
from shardgen.layout import Column, Layout, ShardFormat, lay_out, sample_bytes
from shardgen.policies import Samples
from shardgen.scan import RowLengths
from shardgen.tasks import Task

# Large enough to hide what starting a task costs, small enough to balance and to resume.
TASK_BYTES = 32 << 20
# A small build is cut finer, so that all workers have something to do.
MIN_TASK_BYTES = 4 << 20
MIN_TASKS = 16


def bucket_directory(bucket: int, num_buckets: int) -> str:
    """Name of a bucket's directory; names sort like the buckets."""
    return f"bucket-{bucket:0{max(2, len(str(num_buckets - 1)))}}"


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Every sample's id and place.

    Attributes:
        order: Sample (in source order) of each id, int64, shape (N,).
        bucket_counts: Samples of each bucket, int64, shape (K,).
        layout: Places by id.
        shard_paths: Path of each shard before compression, inside the directory of the build.
    """

    order: NDArray[np.int64]
    bucket_counts: NDArray[np.int64]
    layout: Layout
    shard_paths: tuple[str, ...]

    @property
    def ids(self) -> NDArray[np.int64]:
        """Id of each sample in source order, int64, shape (N,)."""
        ids = np.empty(len(self.order), np.int64)
        ids[self.order] = np.arange(len(self.order))
        return ids


def arrange(
    samples: Samples,
    buckets: NDArray[np.int64],
    num_buckets: int,
    items: Mapping[str, NDArray[np.int64]],
    fmt: ShardFormat,
) -> Arrangement:
    """Give every sample its id (by bucket, source order inside) and its place.

    Args:
        samples: Samples in source order.
        buckets: Bucket of each sample, shape (N,).
        num_buckets: Buckets, K.
        items: Values or bytes per source row of each measured column.
        fmt: What the shards store.
    """
    order = np.argsort(buckets, kind="stable")
    rows = samples.rows[order]
    sizes = sample_bytes(
        fmt.columns,
        samples.lengths[order].astype(np.int64),
        {name: values[rows] for name, values in items.items()},
    )
    bucket_counts = np.bincount(buckets, minlength=num_buckets).astype(np.int64)
    layout = lay_out(sizes, bucket_counts, fmt)
    paths = tuple(
        f"{bucket_directory(bucket, num_buckets)}/shard.{number:05}.mds"
        for bucket, number in zip(layout.shard_bucket.tolist(), layout.shard_number.tolist(), strict=True)
    )
    return Arrangement(order=order, bucket_counts=bucket_counts, layout=layout, shard_paths=paths)


def _value_bytes(source: SourceFile, column: Column) -> int:
    """Bytes of one value in memory: as decoded or as stored, whichever is wider."""
    kind = plain_type(source.schema.field(column.name).type)
    if column.kind == "text":
        return 1
    if column.kind != "scalar":
        kind = plain_type(kind.value_type)
    try:
        width = -(-int(kind.bit_width) // 8)
    except ValueError:  # of no fixed width
        width = 8
    return max(width, column.dtype.itemsize)


def _row_bytes(
    source: SourceFile,
    columns: Sequence[Column],
    lengths: NDArray[np.int32],
    items: Mapping[str, NDArray[np.int64]],
) -> NDArray[np.int64]:
    """Bytes that each row takes once decoded, shape (R,)."""
    total = np.zeros(len(lengths), np.int64)
    tokens = np.maximum(lengths, 0).astype(np.int64)
    for column in columns:
        width = _value_bytes(source, column)
        total += width if column.kind == "scalar" else np.maximum(items.get(column.name, tokens), 0) * width
    return total


def make_tasks(
    sources: Sequence[SourceFile],
    rows: RowLengths,
    samples: Samples,
    arrangement: Arrangement,
    columns: Sequence[Column],
    task_bytes: int | None = None,
) -> list[Task]:
    """Cut the source into runs of partitions; how it is cut never shows in the output."""
    layout = arrangement.layout
    ids = arrangement.ids
    if task_bytes is None:
        task_bytes = min(max(int(layout.sizes.sum()) // MIN_TASKS, MIN_TASK_BYTES), TASK_BYTES)
    tasks: list[Task] = []
    for file, source in enumerate(sources):
        start = int(rows.file_start[file])
        ends = np.cumsum(np.array(source.partition_rows, np.int64)) + start  # by partition
        file_rows = slice(start, start + source.num_rows)
        file_items = {name: values[file_rows] for name, values in rows.items.items()}
        row_bytes = _row_bytes(source, columns, rows.lengths[file_rows], file_items)
        size_before = np.concatenate([[0], np.cumsum(row_bytes)])
        partition = 0
        while partition < len(ends):
            first_row = int(ends[partition - 1]) if partition else start
            limit = size_before[first_row - start] + task_bytes
            last = partition + 1
            while last < len(ends) and size_before[int(ends[last]) - start] <= limit:
                last += 1
            last_row = int(ends[last - 1])
            low, high = np.searchsorted(samples.rows, [first_row, last_row]).tolist()
            mine = ids[low:high]
            inside = slice(first_row - start, last_row - start)
            shards = layout.shards[mine]
            tasks.append(
                Task(
                    number=len(tasks),
                    source=source,
                    first_partition=partition,
                    last_partition=last,
                    first_row=first_row - start,
                    row_lengths=rows.lengths[first_row:last_row],
                    row_bytes=row_bytes[inside],
                    row_items={name: values[inside] for name, values in file_items.items()},
                    rows=samples.rows[low:high] - first_row,
                    starts=samples.starts[low:high].astype(np.int64),
                    lengths=samples.lengths[low:high].astype(np.int64),
                    shards=shards,
                    offsets=layout.offsets[mine],
                    sizes=layout.sizes[mine],
                    shard_paths={s: arrangement.shard_paths[s] for s in np.unique(shards).tolist()},
                )
            )
            partition = last
    return tasks
