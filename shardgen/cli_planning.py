"""From what a command names to what it plans: the corpus and the options, for `simulate` and `report`.

Above the command line's options only: nothing of the build or of the kernel imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.options import EpochOptions, PlanOptions
from loader.pool import Corpus
from loader.simulate import corpus_of_lengths
from shardgen.buckets import Buckets
from shardgen.cli_build import ByteSize
from shardgen.cli_options import Planning
from shardgen.lengths import Histogram
from shardgen.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is to be planned.

    Attributes:
        corpus: Lengths in sample order, and shards (assumed for bare lengths).
        planning: The planning options, with a build's own where the command line leaves them open.
        plan_options: What may change between steps.
        epoch_options: What is fixed within an epoch.
    """

    corpus: Corpus
    planning: Planning
    plan_options: PlanOptions
    epoch_options: EpochOptions


def best_boundaries(lengths: NDArray[np.integer[Any]], planning: Planning) -> tuple[int, ...]:
    """Boundaries that ``planning`` asks for: the given ones, or the optimiser's."""
    if planning.boundaries is not None:
        return Buckets.from_upper_bounds(planning.boundaries, int(lengths.max())).boundaries
    from shardgen.optimize import optimize

    return optimize(
        Histogram.from_lengths(lengths),
        num_buckets=planning.num_buckets,
        budget=planning.budget,
        lookahead=planning.lookahead,
        optimize_for_lookahead=planning.optimize_for_lookahead,
    ).boundaries


def plan_options_of(planning: Planning, boundaries: tuple[int, ...]) -> PlanOptions:
    """What may change between steps, as the planning options ask for it."""
    budget = planning.budget
    return PlanOptions(
        boundaries=boundaries,
        token_budget=budget.tokens,
        cost_budget=budget.cost_budget,
        max_batch_size=budget.max_batch_size,
        padding="longest" if planning.layout == "packed" else budget.padding,
        pad_to_multiple_of=budget.pad_to_multiple_of,
        quadratic_length=budget.cost_model.quadratic_length,
        overhead_tokens=budget.cost_model.overhead_tokens,
        lookahead=planning.lookahead,
        world_size=planning.world_size,
        accumulate=planning.accumulate,
        layout=planning.layout,
    )


def epoch_options_of(planning: Planning) -> EpochOptions:
    """What is fixed within an epoch, as the planning options ask for it."""
    return EpochOptions(
        seed=planning.seed,
        block_samples=planning.block_samples,
        num_canonical_nodes=planning.num_canonical_nodes,
    )


def read_subject(
    inputs: Sequence[str], options: Mapping[str, Any], progress: Progress | None = None
) -> Subject:
    """Read lengths, settle the boundaries and assume shards.

    Args:
        inputs: Data files, directories, globs, files of lengths, or one build.
        options: Parameters of the running command, by name.
        progress: Told of the stages.

    Raises:
        UserError: Something cannot be read, or a sample fits no batch.
    """
    from shardgen.sources import read_lengths

    progress = progress or Progress()
    lengths = read_lengths(
        inputs,
        tokens_column=options["tokens_column"],
        length_column=options["length_column"],
        split=options["split"],
        progress=progress,
    ).lengths
    progress.start("finding boundaries", 0)
    built = _build(inputs)
    if built is None:
        planning = Planning.of(options)
        planning.budget.check_longest(lengths)
        boundaries = best_boundaries(lengths, planning)
        shard_bytes = ByteSize().convert(options["shard_size"], None, None)
        corpus = corpus_of_lengths(lengths, boundaries, shard_bytes)
    else:
        recorded, sizes = built
        planning = Planning.of(options, recorded)
        planning.budget.check_longest(lengths)
        boundaries = best_boundaries(lengths, planning)
        corpus = Corpus(lengths=lengths, shard_sizes=sizes)
    return Subject(
        corpus=corpus,
        planning=planning,
        plan_options=plan_options_of(planning, boundaries),
        epoch_options=epoch_options_of(planning),
    )


def _build(inputs: Sequence[str]) -> tuple[dict[str, Any], tuple[NDArray[np.int64], ...]] | None:
    """Recorded options and shard sizes when the input is one finished build."""
    import json
    from pathlib import Path

    from shardgen.manifest import MANIFEST, Manifest

    if len(inputs) != 1 or not os.path.isfile(os.path.join(inputs[0], MANIFEST)):
        return None
    manifest = Manifest.load(inputs[0])
    sizes = []
    for bucket in manifest.buckets:
        shards = []
        if bucket.directory is not None:
            index = json.loads((Path(inputs[0]) / bucket.directory / "index.json").read_text())
            shards = [shard["samples"] for shard in index["shards"]]
        sizes.append(np.array(shards, np.int64))
    return {**manifest.options, "boundaries": list(manifest.boundaries)}, tuple(sizes)
