"""The arguments of a dataset, checked and turned into plan options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.options import PlanOptions
from loader.walk import longest_allowed
from shardgen.buckets import Buckets, Padding, TokenBudget
from shardgen.cost import CostModel
from shardgen.errors import UserError
from shardgen.lengths import Histogram
from shardgen.manifest import Manifest

# Upstream's arguments that would contradict a plan, and what to use here.
REPLACED = {
    "streams": "local= and remote=: one built directory is one dataset",
    "batch_size": "token_budget= (and max_batch_size=): batches are cut by tokens",
    "shuffle_seed": "seed=",
    "shuffle_algo": "shuffle= and lookahead=",
    "shuffle_block_size": "block_samples=",
    "batching_method": "buckets= and weights=",
    "epoch_size": "weights=",
    "predownload": "predownload_batches=",
    "sampling_method": "weights=",
    "sampling_granularity": "weights=",
    "partition_algo": "num_canonical_nodes=",
    "allow_unsafe_types": "columns= with encodings that hold no pickles",
    "stream_name": "local= and remote=",
    "stream_config": "local= and remote=",
}


def refuse_upstream_arguments(given: Iterable[str]) -> None:
    """Raise a TypeError for arguments that this dataset does not take, naming ours where there is one."""
    for name in given:
        if name in REPLACED:
            raise TypeError(
                f"BucketedDataset takes no {name}=, it would contradict the plan: use {REPLACED[name]}"
            )
        raise TypeError(f"BucketedDataset got an unexpected keyword argument {name!r}")


def build_option(manifest: Manifest, name: str, given: Any) -> Any:
    """An argument, or the build's when it is ``None``."""
    return manifest.options.get(name) if given is None else given


def choose_boundaries(
    manifest: Manifest,
    lengths: NDArray[np.integer[Any]],
    boundaries: Sequence[int] | None,
    num_buckets: int | None,
    padding: Padding,
    budget: dict[str, Any],
) -> tuple[int, ...]:
    """Boundaries of the plan: those given, the best of a number of buckets, or the build's.

    Args:
        manifest: Of the dataset.
        lengths: Tokens by sample id, shape (N,).
        boundaries: Upper bounds as people write them.
        num_buckets: Optimise so many instead.
        padding: ``"longest"`` or ``"boundary"``.
        budget: Arguments of the token budget.
    """
    longest = int(lengths.max())
    if boundaries is not None:
        if (
            num_buckets is not None
            and num_buckets != len(Buckets.from_upper_bounds(boundaries, longest).boundaries) - 1
        ):
            raise UserError(
                f"boundaries {list(boundaries)} are not num_buckets={num_buckets}: give one of the two"
            )
        return Buckets.from_upper_bounds(boundaries, longest).boundaries
    if num_buckets is not None:
        # Imported here: only this argument needs the search.
        from shardgen.optimize import optimize

        limit = TokenBudget(
            tokens=budget["token_budget"],
            max_batch_size=budget["max_batch_size"],
            pad_to_multiple_of=budget["pad_to_multiple_of"],
            cost_budget=budget["cost_budget"],
            cost_model=CostModel(
                quadratic_length=budget["quadratic_length"], overhead_tokens=budget["overhead_tokens"]
            ),
            padding=padding,
        )
        best = optimize(Histogram.from_lengths(lengths), num_buckets=num_buckets, budget=limit)
        return best.boundaries
    return Buckets.from_upper_bounds(manifest.boundaries, longest).boundaries


def cost_model_of(manifest: Manifest, given: CostModel | None) -> CostModel:
    """A cost model, or the build's when it is ``None``."""
    if given is not None:
        return given
    options = manifest.options
    return CostModel(
        quadratic_length=options.get("quadratic_length"), overhead_tokens=options.get("overhead_tokens") or 0
    )


def skip_ids(skip: Iterable[int], num_samples: int) -> NDArray[np.int64]:
    """Sample ids to leave out: ascending, distinct, int64, shape (S,)."""
    ids = np.unique(np.array(list(skip) if not isinstance(skip, np.ndarray) else skip, np.int64))
    if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < num_samples:
        wrong = int(ids[0]) if ids[0] < 0 else int(ids[-1])
        raise UserError(f"skip: sample {wrong} is outside 0..{num_samples - 1}")
    return ids


def check_longest(lengths: NDArray[np.integer[Any]], options: PlanOptions, skip: NDArray[np.int64]) -> None:
    """Refuse a budget that some sample of the set does not fit, unless ``skip`` names it.

    Raises:
        UserError: Naming the sample, its length, the budget and how many are too long.
    """
    allowed = longest_allowed(options)
    if int(lengths.max()) <= allowed:
        return
    over = np.flatnonzero(lengths > allowed)
    over = over[~np.isin(over, skip)]
    if not len(over):
        return
    sample = int(over[lengths[over].argmax()])
    budget = f"token_budget {options.token_budget}"
    if options.cost_budget is not None:
        budget += f" with cost_budget {options.cost_budget}"
    if options.pad_to_multiple_of > 1:
        budget += f" and pad_to_multiple_of {options.pad_to_multiple_of}"
    if options.padding == "boundary":
        budget += " with padding='boundary'"
    raise UserError(
        f"sample {sample} has {int(lengths[sample])} tokens but {budget} lets a sample have at most "
        f"{allowed} ({len(over)} of {len(lengths)} samples are too long): raise the budget, or leave them "
        "out with skip="
    )
