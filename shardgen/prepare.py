"""Everything that is decided before a shard is written: columns, samples, boundaries, places, tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardgen.arrange import Arrangement, arrange, make_tasks
from shardgen.buckets import Buckets
from shardgen.errors import UserError
from shardgen.formats import SourceFile
from shardgen.layout import ShardFormat
from shardgen.lengths import Histogram
from shardgen.optimize import OptimizeResult, evaluate, optimize
from shardgen.options import BuildOptions
from shardgen.policies import Samples, apply_policies
from shardgen.progress import Progress
from shardgen.reading import RowReader
from shardgen.scan import RowLengths, scan_lengths
from shardgen.schema import choose_columns
from shardgen.sources import find_length_column
from shardgen.tasks import Task


def find_boundaries(lengths: NDArray[np.int32], options: BuildOptions) -> OptimizeResult:
    """Best boundaries, or those asked for; the last is the longest sample, or ``--max-length``."""
    histogram = Histogram.from_lengths(lengths)
    longest = options.max_length or histogram.longest

    def expect(upper_bounds: tuple[int, ...]) -> OptimizeResult:
        bounds = Buckets.from_upper_bounds(upper_bounds, longest).boundaries[1:]
        return evaluate(histogram, boundaries=bounds, budget=options.budget, lookahead=options.lookahead)

    if options.boundaries is not None:
        return expect(options.boundaries)
    plan = optimize(
        histogram,
        num_buckets=options.num_buckets,
        budget=options.budget,
        lookahead=options.lookahead,
        optimize_for_lookahead=options.optimize_for_lookahead,
    )
    if longest <= plan.boundaries[-1]:
        return plan
    return replace(expect(plan.boundaries[1:-1]), notes=plan.notes)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A build that only has to be written.

    Attributes:
        sources: Files, in order.
        rows: Lengths of the source rows.
        samples: Samples, in source order.
        buckets: Boundaries.
        format: What the shards store.
        reader: How rows become payloads.
        arrangement: Id and place of every sample.
        tasks: The work.
    """

    sources: Sequence[SourceFile]
    rows: RowLengths
    samples: Samples
    buckets: Buckets
    format: ShardFormat
    reader: RowReader
    arrangement: Arrangement
    tasks: list[Task]


def lay_out_build(
    sources: Sequence[SourceFile],
    options: BuildOptions,
    find_buckets: Callable[[NDArray[np.int32]], Buckets],
    progress: Progress | None = None,
    ragged: Collection[str] = (),
) -> Prepared:
    """Read lengths, apply policies, and give every sample its place.

    Args:
        sources: Files, in order.
        options: What to build.
        find_buckets: Boundaries for the lengths of the samples.
        progress: Callbacks.
        ragged: List columns known not to have one value per token.

    Raises:
        UserError: A column or a row cannot be built as asked.
    """
    progress = progress or Progress()
    columns = choose_columns(
        sources,
        tokens_column=options.tokens_column,
        loss_mask_column=options.loss_mask_column,
        columns=options.columns,
        token_dtype=options.token_dtype,
        ragged=ragged,
    )
    measured = [column.name for column in columns if column.kind in ("text", "ragged")]
    progress.start("reading lengths", sum(source.num_rows for source in sources))
    rows = scan_lengths(
        sources,
        tokens_column=options.tokens_column,
        length_column=options.length_column,
        measured=measured,
        null_columns=[column.name for column in columns] if options.on_null == "skip" else (),
        progress=progress.advance,
    )
    samples = apply_policies(rows.lengths, options.policies(), lambda row: rows.where(row, sources))
    for name in measured:
        null = rows.items[name][samples.rows] < 0
        if null.any():
            raise UserError(
                f"{rows.where(int(samples.rows[int(null.argmax())]), sources)}: column {name!r} is null or "
                "holds a null, which a shard cannot store: mend the source, use --on-null skip, "
                "or leave the column out"
            )
    progress.start("finding boundaries", 0)
    buckets = find_buckets(samples.lengths)
    fmt = ShardFormat(
        columns=columns, compression=options.compression, hashes=options.hashes, size_limit=options.shard_size
    )
    arrangement = arrange(samples, buckets.assign(samples.lengths), buckets.num_buckets, rows.items, fmt)
    return Prepared(
        sources=sources,
        rows=rows,
        samples=samples,
        buckets=buckets,
        format=fmt,
        reader=RowReader(
            columns=columns,
            tokens_column=options.tokens_column,
            loss_mask_column=options.loss_mask_column,
            length_column=find_length_column(sources[0], options.tokens_column, options.length_column),
        ),
        arrangement=arrangement,
        tasks=make_tasks(sources, rows, samples, arrangement, columns),
    )
