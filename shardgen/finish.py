"""Finish shards: header, checks, hashes and compression; and tell whether a shard is as it was left."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardgen.errors import UserError
from shardgen.layout import ShardFormat
from shardgen.tasks import Fragments, ShardInfo
from shardgen.upstream import compress, get_compression_extension, get_hash
from shardgen.write import FRAGMENT_HASH, write_all

GZIP_MAGIC = b"\x1f\x8b"


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
