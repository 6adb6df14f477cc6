"""Write shards: a task reads a run of source rows and puts every sample where the layout says it lies.

Sizes and offsets are known beforehand, so tasks of any number and order write the same bytes straight
into the final files: nothing is spilled, joined or moved.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardgen.encode import encode_samples
from shardgen.errors import UserError
from shardgen.layout import ShardFormat
from shardgen.prefetch import prefetch
from shardgen.reading import RowReader, StoredRows
from shardgen.tasks import Fragments, ShardInfo, Task, TaskResult


def _upstream(name: str) -> ModuleType:
    """A module of ``streaming.base`` that needs nothing else of streaming.

    Loaded from its file: importing the package takes 4 s and 0.7 GB per process, torch included.
    """
    full = f"streaming.base.{name}"
    if full in sys.modules:
        return sys.modules[full]
    package = importlib.util.find_spec("streaming")
    if package is None or not package.submodule_search_locations:
        raise UserError("mosaicml-streaming is not installed: pip install 'mosaicml-streaming==0.13.*'")
    path = os.path.join(package.submodule_search_locations[0], "base", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"shardgen._streaming_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_compression, _hashing = _upstream("compression"), _upstream("hashing")
compress, decompress, is_compression = (
    _compression.compress,
    _compression.decompress,
    _compression.is_compression,
)
get_compression_extension = _compression.get_compression_extension
get_hash, is_hash = _hashing.get_hash, _hashing.is_hash

# Larger batches fall out of the processor's caches (measured: 8 MB 64k rows/s, 32 MB 44k rows/s).
BATCH_BYTES = 8 << 20
# A decoded batch, the next one being decoded, decoder pages, and the encoded copy share the bound.
BATCHES_PER_MEMORY = 8
FRAGMENT_HASH = "xxh64"
GZIP_MAGIC = b"\x1f\x8b"


def check_format(compression: str | None, hashes: Sequence[str]) -> None:
    """Refuse names that upstream does not know."""
    if compression is not None and not is_compression(compression):
        raise UserError(f"--compression {compression!r} is unknown: use zstd:3, gz, snappy, br or bz2")
    for name in hashes:
        if not is_hash(name):
            raise UserError(
                f"--hashes {name!r} is unknown: use xxh64, sha256, md5 or another of hashlib or xxhash"
            )


def shard_name(number: int) -> str:
    """Basename of a shard before compression."""
    return f"shard.{number:05}.mds"


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


def _file_info(data: Any, basename: str, hashes: Sequence[str]) -> dict[str, Any]:
    return {
        "basename": basename,
        "bytes": len(data),
        "hashes": {name: get_hash(name, data) for name in hashes},
    }


def finish_shard(
    directory: str, path: str, fmt: ShardFormat, header: bytes, num_samples: int, fragments: Fragments
) -> ShardInfo:
    """Write the header, check that the file holds what the tasks wrote, hash and compress.

    Args:
        directory: Directory under construction.
        path: Shard inside it.
        fmt: What the shards store.
        header: Everything before the samples.
        num_samples: Samples of the shard.
        fragments: What was written, of this shard only.
    """
    full = os.path.join(directory, path)
    descriptor = os.open(full, os.O_RDWR | os.O_CLOEXEC)
    try:
        write_all(descriptor, header, 0)
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            _check_fragments(view, len(header), fragments, full)
            basename = os.path.basename(path)
            raw = _file_info(view, basename, fmt.hashes)
            content_hash = raw["hashes"].get(next(iter(fmt.hashes), "")) or get_hash("xxh64", view)
            zipped = _compress(full, view, fmt) if fmt.compression else None
    finally:
        os.close(descriptor)
    if zipped is not None:
        os.unlink(full)
    entry = {"samples": num_samples, "raw_data": raw, "zip_data": zipped, **fmt.config()}
    return ShardInfo(entry=entry, content_hash=str(content_hash))


def _compress(full: str, view: memoryview, fmt: ShardFormat) -> dict[str, Any]:
    assert fmt.compression is not None
    packed = compress(fmt.compression, bytes(view))
    if packed[:2] == GZIP_MAGIC:  # bytes 4-7 are the time of compression, and no build may depend on a clock
        packed = packed[:4] + bytes(4) + packed[8:]
    path = f"{full}.{get_compression_extension(fmt.compression)}"
    with open(path, "wb") as file:
        file.write(packed)
    return _file_info(packed, os.path.basename(path), fmt.hashes)


def holds(path: str, fragments: Fragments) -> bool:
    """Whether a shard under construction holds what was written to it (a crash may have lost it)."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return all(
                int(get_hash(FRAGMENT_HASH, data[at : at + size]), 16) == expected
                for at, size, expected in zip(
                    fragments.offsets.tolist(),
                    fragments.num_bytes.tolist(),
                    fragments.hashes.tolist(),
                    strict=True,
                )
            )
    except (OSError, ValueError):
        return False


def is_finished(directory: str, path: str, info: ShardInfo) -> bool:
    """Whether a shard that was finished earlier is still on disk, whole."""
    stored = info.entry["zip_data"] or info.entry["raw_data"]
    full = os.path.join(directory, os.path.dirname(path), stored["basename"])
    try:
        with open(full, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            whole = len(data) == stored["bytes"]
            return whole and all(get_hash(name, data) == value for name, value in stored["hashes"].items())
    except (OSError, ValueError):
        return False


def _check_fragments(view: memoryview, header_bytes: int, fragments: Fragments, path: str) -> None:
    """Every byte after the header was written by exactly one task and reads back as it was written."""
    order = np.argsort(fragments.offsets)
    at = header_bytes
    for i in order.tolist():
        offset, size = int(fragments.offsets[i]), int(fragments.num_bytes[i])
        if offset != at or int(get_hash(FRAGMENT_HASH, view[at : at + size]), 16) != int(fragments.hashes[i]):
            raise UserError(
                f"{path}: bytes {offset}..{offset + size} do not read back as written: check the disk"
            )
        at += size
    if at != len(view):
        raise UserError(f"{path}: {len(view) - at} bytes at {at} were never written: check the disk")
