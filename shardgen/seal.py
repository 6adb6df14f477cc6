"""The small files of a build: indexes and ``samples.parquet``."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shardgen.policies import Samples


def fsync_file(path: str) -> None:
    """Force a file's bytes to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_index(directory: str, entries: Sequence[dict[str, Any]]) -> None:
    path = os.path.join(directory, "index.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"version": 2, "shards": list(entries)}, file, sort_keys=True)
    fsync_file(path)


def write_indexes(
    directory: str, names: Sequence[str], shard_bucket: NDArray[np.int64], entries: Sequence[dict[str, Any]]
) -> None:
    """``index.json`` of every bucket, and the merged one that names the shards of all.

    Args:
        directory: Directory of the build.
        names: Directory of each bucket.
        shard_bucket: Bucket of each shard, shape (S,).
        entries: Index entry of each shard, with basenames inside its bucket.
    """
    merged = []
    for bucket, name in enumerate(names):
        mine = [entries[shard] for shard in np.flatnonzero(shard_bucket == bucket).tolist()]
        if not mine:
            continue
        _write_index(os.path.join(directory, name), mine)
        for entry in copy.deepcopy(mine):
            for key in ("raw_data", "zip_data"):
                if entry[key] is not None:
                    entry[key]["basename"] = f"{name}/{entry[key]['basename']}"
            merged.append(entry)
    _write_index(directory, merged)


def write_samples(
    directory: str,
    names: Sequence[str],
    bucket_counts: NDArray[np.int64],
    lengths: NDArray[np.int32],
    loss_tokens: NDArray[np.int32] | None,
    first_token_loss: NDArray[np.bool_] | None,
    samples: Samples,
    order: NDArray[np.int64],
    file_start: NDArray[np.int64],
) -> None:
    """``samples.parquet`` of every bucket: one row per sample in the order of its shards.

    Args:
        directory: Directory of the build.
        names: Directory of each bucket, shape (K,).
        bucket_counts: Samples of each bucket, shape (K,).
        lengths: Tokens by sample id, shape (N,).
        loss_tokens: Tokens with a loss by sample id, or ``None`` without a mask.
        first_token_loss: Whether the first token has a loss, by sample id, or ``None``.
        samples: Samples in source order.
        order: Sample of each id, shape (N,).
        file_start: First row of each source file, shape (files + 1,).
    """
    first = 0
    for name, count in zip(names, bucket_counts.tolist(), strict=True):
        if not count:
            continue
        ids = slice(first, first + count)
        first += count
        rows = samples.rows[order[ids]]
        files = np.searchsorted(file_start, rows, side="right") - 1
        columns: dict[str, Any] = {"length": lengths[ids].astype(np.int32)}
        if loss_tokens is not None and first_token_loss is not None:
            columns["loss_tokens"] = loss_tokens[ids].astype(np.int32)
            columns["first_token_loss"] = first_token_loss[ids]
        columns["source_file"] = files.astype(np.int32)
        columns["source_row"] = rows - file_start[files]
        columns["source_start"] = samples.starts[order[ids]].astype(np.int64)
        path = os.path.join(directory, name, "samples.parquet")
        pq.write_table(pa.table(columns), path, compression="zstd", row_group_size=1 << 20)
        fsync_file(path)
