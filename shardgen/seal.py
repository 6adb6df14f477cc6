"""The small files of a build: indexes, ``samples.parquet``, and what the manifest says."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shardgen import __version__, storage
from shardgen.arrange import bucket_directory
from shardgen.execute import Written
from shardgen.layout import Layout
from shardgen.manifest import BucketSummary, Manifest, fingerprint
from shardgen.optimize import OptimizeResult
from shardgen.options import BuildOptions
from shardgen.policies import Samples
from shardgen.prepare import Prepared
from shardgen.staging import fsync_file


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


def common_parent(paths: Sequence[str]) -> list[str]:
    """Paths relative to their common parent directory."""
    full = [path if storage.is_remote(path) else os.path.abspath(storage.local_path(path)) for path in paths]
    parts = [path.split("/") for path in full]
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        shared += 1
    return ["/".join(p[shared:]) for p in parts]


def seal(
    directory: str, prepared: Prepared, plan: OptimizeResult, written: Written, options: BuildOptions
) -> Manifest:
    """Write indexes and ``samples.parquet``; the manifest is returned, to be saved last.

    Args:
        directory: Directory of the build.
        prepared: What was to be written.
        plan: How the boundaries were found.
        written: What was written.
        options: What was asked for.
    """
    sources, samples = prepared.sources, prepared.samples
    layout, order = prepared.arrangement.layout, prepared.arrangement.order
    lengths = samples.lengths[order]
    masked = options.loss_mask_column is not None
    results = [written.results[number] for number in sorted(written.results)]
    loss = np.concatenate([r.loss_tokens for r in results])[order] if masked else None
    first_loss = np.concatenate([r.first_token_loss for r in results])[order] if masked else None
    names = [bucket_directory(k, len(plan.buckets)) for k in range(len(plan.buckets))]
    entries = [written.shards[shard].entry for shard in range(layout.num_shards)]
    write_indexes(directory, names, layout.shard_bucket, entries)
    write_samples(
        directory,
        names,
        prepared.arrangement.bucket_counts,
        lengths,
        loss,
        first_loss,
        samples,
        order,
        prepared.rows.file_start,
    )
    shards = [
        (
            entry["raw_data"]["basename"],
            entry["samples"],
            entry["raw_data"]["bytes"],
            written.shards[i].content_hash,
        )
        for i, entry in enumerate(entries)
    ]
    return Manifest(
        fingerprint=fingerprint(shards, lengths, loss),
        boundaries=plan.boundaries,
        tokens_column=options.tokens_column,
        loss_mask_column=options.loss_mask_column,
        columns={column.name: column.encoding for column in prepared.format.columns},
        options=options.recorded(),
        buckets=_summaries(plan, layout, names),
        num_samples=len(lengths),
        num_tokens=int(lengths.sum(dtype=np.int64)),
        num_loss_tokens=int((lengths if loss is None else loss).sum(dtype=np.int64)),
        counts=samples.counts,
        predicted={
            "padding_efficiency": plan.padding_efficiency,
            "lookahead_padding_efficiency": plan.lookahead_padding_efficiency,
        },
        sources=tuple(
            {"path": path, "num_rows": source.num_rows, "num_bytes": source.num_bytes}
            for path, source in zip(common_parent([s.path for s in sources]), sources, strict=True)
        ),
        versions={"shardgen": __version__}
        | {name: metadata.version(name) for name in ("mosaicml-streaming", "numpy", "pyarrow")},
    )


def _summaries(plan: OptimizeResult, layout: Layout, names: Sequence[str]) -> tuple[BucketSummary, ...]:
    num_shards = np.bincount(layout.shard_bucket, minlength=len(names)).tolist()
    return tuple(
        BucketSummary(
            lower=stats.lower,
            upper=stats.upper,
            num_samples=stats.num_samples,
            num_tokens=stats.num_tokens,
            mean_length=stats.mean_length,
            batch_size=stats.batch_size,
            padding_efficiency=stats.padding_efficiency,
            num_shards=num_shards[k],
            directory=names[k] if stats.num_samples else None,
        )
        for k, stats in enumerate(plan.buckets)
    )
