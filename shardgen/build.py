"""Lengths, boundaries, shards, seal: the whole build."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardgen import __version__
from shardgen import manifest as manifests
from shardgen.arrange import Arrangement, arrange, bucket_directory, make_tasks
from shardgen.buckets import Buckets, Padding, TokenBudget
from shardgen.cost import CostModel
from shardgen.errors import UserError
from shardgen.execute import Progress, Written, execute, open_pool
from shardgen.formats import SourceFile
from shardgen.layout import Layout, ShardFormat
from shardgen.lengths import Histogram
from shardgen.manifest import BucketSummary, Manifest
from shardgen._interim import estimate_efficiency, optimize
from shardgen.optimize import OptimizeResult
from shardgen.policies import OverLength, Policies, Samples, Skip, apply_policies
from shardgen.reading import RowReader
from shardgen.scan import scan_lengths
from shardgen.schema import choose_columns
from shardgen.seal import write_indexes, write_samples
from shardgen.sources import find_length_column, open_sources
from shardgen.staging import Staging, check_destination


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Everything a build can be asked for; names and meanings are those of the command line."""

    token_budget: int = 49152
    num_buckets: int | Literal["auto"] = 6
    boundaries: tuple[int, ...] | None = None
    max_batch_size: int | None = None
    cost_budget: int | None = None
    cost_model: CostModel = field(default_factory=CostModel)
    padding: Padding = "longest"
    pad_to_multiple_of: int = 1
    lookahead: int = 32
    optimize_for_lookahead: int = 1
    tokens_column: str = "input_ids"
    length_column: str | None = None
    loss_mask_column: str | None = None
    columns: tuple[str, ...] = ()
    split: str | None = None
    max_length: int | None = None
    over_length: OverLength = "error"
    on_empty: Skip = "error"
    on_null: Skip = "error"
    token_dtype: str = "auto"
    shard_size: int = 64 << 20
    compression: str | None = None
    hashes: tuple[str, ...] = ("xxh64",)
    workers: int = 1
    memory: int = 512 << 20
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("max_length", "workers", "memory", "shard_size", "lookahead", "optimize_for_lookahead"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value} is below 1")
        object.__setattr__(self, "hashes", tuple(sorted(set(self.hashes))))

    @property
    def budget(self) -> TokenBudget:
        return TokenBudget(
            tokens=self.token_budget,
            max_batch_size=self.max_batch_size,
            pad_to_multiple_of=self.pad_to_multiple_of,
            cost_budget=self.cost_budget,
            cost_model=self.cost_model,
            padding=self.padding,
        )

    def policies(self) -> Policies:
        """The limit is the smaller of ``--max-length`` and what fits the budget alone."""
        limit, name = self.budget.longest_allowed, f"--token-budget {self.token_budget}"
        if self.cost_budget is not None:
            name += f" and --cost-budget {self.cost_budget}"
        if self.pad_to_multiple_of > 1:
            name += f" with --pad-to-multiple-of {self.pad_to_multiple_of}"
        if limit != self.token_budget:
            name += f" ({limit})"
        if self.max_length is not None and self.max_length <= limit:
            limit, name = self.max_length, f"--max-length {self.max_length}"
        return Policies(
            limit=limit,
            limit_name=name,
            over_length=self.over_length,
            on_empty=self.on_empty,
            on_null=self.on_null,
        )

    def recorded(self) -> dict[str, Any]:
        """What the manifest keeps: whatever shapes the data or its batches."""
        return {
            "token_budget": self.token_budget,
            "max_batch_size": self.max_batch_size,
            "padding": self.padding,
            "pad_to_multiple_of": self.pad_to_multiple_of,
            "cost_budget": self.cost_budget,
            "quadratic_length": self.cost_model.quadratic_length,
            "overhead_tokens": self.cost_model.overhead_tokens,
            "lookahead": self.lookahead,
            "optimize_for_lookahead": self.optimize_for_lookahead,
            "buckets": self.num_buckets,
            "max_length": self.max_length,
            "over_length": self.over_length,
            "on_empty": self.on_empty,
            "on_null": self.on_null,
            "token_dtype": self.token_dtype,
            "shard_size": self.shard_size,
            "compression": self.compression,
            "hashes": list(self.hashes),
        }


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """A finished build.

    Attributes:
        out: Where it is.
        manifest: Its record.
        plan: How its boundaries were found.
        full_shuffle_efficiency: Expected padding efficiency of one bucket for all, at lookahead 1.
        seconds: Time it took.
    """

    out: str
    manifest: Manifest
    plan: OptimizeResult
    full_shuffle_efficiency: float
    seconds: float

    @property
    def hand_picked_efficiency(self) -> float | None:
        """Expected padding efficiency of hand-picked boundaries at lookahead 1."""
        hand = self.plan.alternatives.get("hand")
        return None if hand is None else hand.padding_efficiency

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        record = self.manifest.to_json()
        kept = (
            "fingerprint",
            "num_samples",
            "num_tokens",
            "num_loss_tokens",
            "boundaries",
            "columns",
            "counts",
        )
        return {
            "out": self.out,
            **{name: record[name] for name in kept},
            **self.manifest.predicted,
            "hand_picked_efficiency": self.hand_picked_efficiency,
            "full_shuffle_efficiency": self.full_shuffle_efficiency,
            "token_budget": record["options"]["token_budget"],
            "buckets": record["buckets"],
            "seconds": self.seconds,
            "samples_per_second": self.manifest.num_samples / max(self.seconds, 1e-9),
        }


def find_boundaries(lengths: NDArray[np.int32], options: BuildOptions) -> OptimizeResult:
    """Best boundaries, or those asked for; the last is the longest sample, or ``--max-length``."""
    histogram = Histogram.from_lengths(lengths)
    bounds = options.boundaries
    common = {
        "num_buckets": options.num_buckets,
        "budget": options.budget,
        "lookahead": options.lookahead,
        "optimize_for_lookahead": options.optimize_for_lookahead,
    }
    longest = options.max_length or histogram.longest
    if bounds is None:
        plan = optimize(histogram, **common)  # type: ignore[arg-type]
        if longest <= plan.boundaries[-1]:
            return plan
        bounds = (*plan.boundaries[1:-1], longest)
    uppers = Buckets.from_upper_bounds(bounds, longest).boundaries[1:]
    return optimize(histogram, boundaries=uppers, **common)  # type: ignore[arg-type]


def common_parent(paths: Sequence[str]) -> list[str]:
    """Paths relative to their common parent directory."""
    full = [os.path.abspath(path) for path in paths]
    parent = os.path.commonpath([os.path.dirname(path) for path in full])
    return [os.path.relpath(path, parent) for path in full]


def build(
    inputs: Sequence[str], out: str, options: BuildOptions, progress: Progress | None = None
) -> BuildResult:
    """Build a dataset from source files.

    Args:
        inputs: Files, directories and globs.
        out: Directory to make.
        options: What to build.
        progress: Callbacks.

    Raises:
        UserError: Anything the user can mend; the destination is then as it was.
    """
    began = time.perf_counter()
    progress = progress or Progress()
    policies = options.policies()
    sources = open_sources(inputs, options.split)
    named = [*(name for name in inputs if os.path.exists(name)), *(source.path for source in sources)]
    target = check_destination(out, named, overwrite=options.overwrite)
    columns = choose_columns(
        sources,
        tokens_column=options.tokens_column,
        loss_mask_column=options.loss_mask_column,
        columns=options.columns,
        token_dtype=options.token_dtype,
    )
    progress.start("reading lengths", sum(source.num_rows for source in sources))
    rows = scan_lengths(
        sources,
        tokens_column=options.tokens_column,
        length_column=options.length_column,
        measured=[column.name for column in columns if column.kind in ("text", "ragged")],
        progress=progress.advance,
    )
    samples = apply_policies(rows.lengths, policies, lambda row: rows.where(row, sources))
    progress.start("finding boundaries", 0)
    plan = find_boundaries(samples.lengths, options)
    buckets = Buckets(boundaries=plan.boundaries)
    fmt = ShardFormat(
        columns=columns, compression=options.compression, hashes=options.hashes, size_limit=options.shard_size
    )
    arrangement = arrange(samples, buckets.assign(samples.lengths), buckets.num_buckets, rows.items, fmt)
    tasks = make_tasks(sources, rows, samples, arrangement, columns)
    staging = Staging(target)
    staging.open()
    try:
        staging.clear()
        from shardgen.write import WriteJob, check_format

        check_format(options.compression, options.hashes)
        reader = RowReader(
            columns=columns,
            tokens_column=options.tokens_column,
            loss_mask_column=options.loss_mask_column,
            length_column=find_length_column(sources[0], options.tokens_column, options.length_column),
        )
        job = WriteJob(directory=staging.directory, format=fmt, reader=reader, memory=options.memory)
        with open_pool(options.workers) as pool:
            written = execute(job, tasks, arrangement, pool, progress)
        progress.start("sealing", 0)
        manifest = _seal(
            staging.directory, sources, samples, rows.file_start, arrangement, written, plan, fmt, options
        )
        staging.publish()
    except BaseException:
        staging.discard()
        raise
    finally:
        staging.close()
    one = Buckets(boundaries=(0, int(samples.lengths.max())))
    histogram = Histogram.from_lengths(samples.lengths)
    return BuildResult(
        out=out,
        manifest=manifest,
        plan=plan,
        full_shuffle_efficiency=estimate_efficiency(histogram, one, options.budget, 1),
        seconds=time.perf_counter() - began,
    )


def _seal(
    directory: str,
    sources: Sequence[SourceFile],
    samples: Samples,
    file_start: NDArray[np.int64],
    arrangement: Arrangement,
    written: Written,
    plan: OptimizeResult,
    fmt: ShardFormat,
    options: BuildOptions,
) -> Manifest:
    """Write indexes, ``samples.parquet`` and, last, the manifest."""
    layout, order = arrangement.layout, arrangement.order
    lengths = samples.lengths[order]
    masked = options.loss_mask_column is not None
    results = [written.results[number] for number in sorted(written.results)]
    loss = np.concatenate([r.loss_tokens for r in results])[order] if masked else None
    first_loss = np.concatenate([r.first_token_loss for r in results])[order] if masked else None
    names = [bucket_directory(k, len(plan.buckets)) for k in range(len(plan.buckets))]
    entries = [written.shards[shard].entry for shard in range(layout.num_shards)]
    write_indexes(directory, names, layout.shard_bucket, entries)
    write_samples(
        directory, names, arrangement.bucket_counts, lengths, loss, first_loss, samples, order, file_start
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
    manifest = Manifest(
        fingerprint=manifests.fingerprint(shards, lengths, loss),
        boundaries=plan.boundaries,
        tokens_column=options.tokens_column,
        loss_mask_column=options.loss_mask_column,
        columns={column.name: column.encoding for column in fmt.columns},
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
    manifest.save(directory)
    return manifest


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
