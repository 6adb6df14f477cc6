"""Write shards: a task reads a run of source rows and puts every sample where the layout says it lies.

Sizes and offsets are known beforehand, so tasks of any number and order write the same bytes straight
into the final files: nothing is spilled, joined or moved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen.encode import encode_samples
from shardgen.layout import ShardFormat
from shardgen.prefetch import prefetch
from shardgen.reading import RowReader, StoredRows
from shardgen.tasks import Fragments, Task, TaskResult
from shardgen.upstream import get_hash

# Larger batches fall out of the processor's caches (measured: 8 MB 64k rows/s, 32 MB 44k rows/s).
BATCH_BYTES = 8 << 20
# A decoded batch, the next one being decoded, decoder pages, and the encoded copy share the bound.
BATCHES_PER_MEMORY = 8
FRAGMENT_HASH = "xxh3_64"  # twice as fast as xxh64, and never stored in a build


def batch_rows(task: Task, memory: int) -> int:
    """Rows of a batch such that no batch of consecutive rows is above its share of ``memory`` bytes."""
    bound = max(min(BATCH_BYTES, memory // BATCHES_PER_MEMORY), 1)
    ends = np.concatenate([[0], np.cumsum(task.row_bytes)])
    rows = max(len(task.row_bytes), 1)
    while rows > 1 and int((ends[rows:] - ends[:-rows]).max()) > bound:
        rows = -(-rows // 2)
    return rows


class ShardFiles:
    """Open shard files of one task; a file is kept open until :meth:`close`."""

    def __init__(self, directory: str, paths: Mapping[int, str]) -> None:
        self._directory, self._paths = directory, paths
        self._open: dict[int, int] = {}

    def write(self, shard: int, offset: int, data: NDArray[np.uint8]) -> None:
        if shard not in self._open:
            path = os.path.join(self._directory, self._paths[shard])
            self._open[shard] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        write_all(self._open[shard], data, offset)

    def close(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()


def write_all(descriptor: int, data: Any, offset: int) -> None:
    """``pwrite`` until everything is written."""
    view = memoryview(data).cast("B")
    while len(view):
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    """What all tasks of a build share.

    Attributes:
        directory: Directory under construction.
        format: What the shards store.
        reader: How rows become payloads.
        memory: Bytes of buffers per process.
        threads: Decode the next batch in a second thread.
    """

    directory: str
    format: ShardFormat
    reader: RowReader
    memory: int
    threads: bool = True


@dataclass(frozen=True, kw_only=True)
class TaskBytes:
    """A task whose bytes have yet to be written: (shard, offset, bytes) in any order."""

    result: TaskResult
    pieces: list[tuple[int, int, NDArray[np.uint8]]]


class MemoryFiles(ShardFiles):
    """Fragments kept in memory, for a process that cannot reach the directory under construction."""

    def __init__(self) -> None:
        super().__init__("", {})
        self.pieces: list[tuple[int, int, NDArray[np.uint8]]] = []

    def write(self, shard: int, offset: int, data: NDArray[np.uint8]) -> None:
        self.pieces.append((shard, offset, data.copy()))


def encode_task(job: WriteJob, task: Task) -> TaskBytes:
    """Like :func:`run_task`, but the bytes are returned."""
    files = MemoryFiles()
    return TaskBytes(result=run_task(job, task, files), pieces=files.pieces)


def write_pieces(job: WriteJob, task: Task, encoded: TaskBytes) -> TaskResult:
    """Write what :func:`encode_task` returned."""
    files = ShardFiles(job.directory, task.shard_paths)
    try:
        for shard, offset, data in encoded.pieces:
            files.write(shard, offset, data)
    finally:
        files.close()
    return encoded.result


def run_task(job: WriteJob, task: Task, files: ShardFiles | None = None) -> TaskResult:
    """Encode the samples of a run of source rows and write them to their shards.

    Raises:
        UserError: A row is not what the first pass or the column of lengths said.
    """
    files = files or ShardFiles(job.directory, task.shard_paths)
    fragments: list[tuple[int, int, int, int]] = []
    losses: list[tuple[NDArray[np.int32], NDArray[np.bool_]]] = []
    buffer = np.empty(0, np.uint8)
    try:
        batches = job.reader.batches(task, batch_rows(task, job.memory))
        for rows in prefetch(batches) if job.threads else batches:
            losses.append((rows.loss_tokens, rows.first_token_loss))
            buffer = _write_rows(job, task, rows, files, fragments, buffer)
    finally:
        files.close()
    table = np.array(fragments, np.uint64).reshape(-1, 4)
    return TaskResult(
        number=task.number,
        fragments=Fragments(
            shards=table[:, 0].astype(np.int64),
            offsets=table[:, 1].astype(np.int64),
            num_bytes=table[:, 2].astype(np.int64),
            hashes=table[:, 3],
        ),
        loss_tokens=np.concatenate([np.zeros(0, np.int32), *(loss for loss, _ in losses)]),
        first_token_loss=np.concatenate([np.zeros(0, np.bool_), *(first for _, first in losses)]),
    )


def _write_rows(
    job: WriteJob,
    task: Task,
    rows: StoredRows,
    files: ShardFiles,
    fragments: list[tuple[int, int, int, int]],
    buffer: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    """Encode the samples of one batch in shard order and write one run of bytes per shard."""
    chosen = slice(rows.first_sample, rows.last_sample)
    shards, offsets, sizes = task.shards[chosen], task.offsets[chosen], task.sizes[chosen]
    if not len(shards):
        return buffer
    order = np.argsort(shards, kind="stable")  # samples of one shard stay in source order, so adjoin
    shards, offsets, sizes = shards[order], offsets[order], sizes[order]
    total = int(sizes.sum())
    if total > len(buffer):
        buffer = np.empty(total, np.uint8)
    payloads = {name: payload.take(order) for name, payload in rows.payloads.items()}
    data = encode_samples(job.format.columns, payloads, sizes, buffer)
    first = np.flatnonzero(np.concatenate([[True], shards[1:] != shards[:-1]]))  # run starts
    ends = np.cumsum(sizes)
    for a, b in zip(first.tolist(), [*first[1:].tolist(), len(shards)], strict=True):
        piece = data[int(ends[a] - sizes[a]) : int(ends[b - 1])]
        shard, offset = int(shards[a]), int(offsets[a])
        files.write(shard, offset, piece)
        fragments.append((shard, offset, len(piece), int(get_hash(FRAGMENT_HASH, piece), 16)))
    return buffer
