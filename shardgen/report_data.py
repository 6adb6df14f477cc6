"""The figures of a report as plain JSON values. What is drawn is drawn from these, and they are in the page.

Nothing is computed here that the commands compute: the optimiser, the simulation and its frontier are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loader.measures import step_histograms
from loader.simulate import STRATEGIES, plan_epoch, simulate
from shardgen.cli_planning import Subject, best_boundaries
from shardgen.cli_simulate import FRONTIER_BUCKETS, FRONTIER_LOOKAHEADS, frontier_points
from shardgen.errors import UserError
from shardgen.lengths import Histogram
from shardgen.optimize import OptimizeResult, optimize
from shardgen.progress import Progress

Json = dict[str, Any]

LENGTH_BARS = 96
# Lengths are shown on a logarithmic axis when the longest is this many times the median.
LOGARITHMIC_FROM = 16
DETAILED_STEPS = 40
EPOCH_GROUPS = 80
SHAPE_MULTIPLES = (1, 8, 32, 128)


def collect(subject: Subject, *, frontier: bool = True, progress: Progress | None = None) -> Json:
    """Everything that a report shows.

    Args:
        subject: Lengths, shards and options.
        frontier: Whether to plan every number of buckets with every lookahead, the longest part.
        progress: Told of the plans made.

    Returns:
        One JSON object per figure, by name: ``setting``, ``lengths``, ``buckets``, ``curve``, ``strategies``,
        ``frontier`` (no points unless asked for), ``composition`` and ``shapes``.
    """
    progress = progress or Progress()
    corpus, planning, options = subject.corpus, subject.planning, subject.plan_options
    progress.start("boundaries", 1)
    result = optimize(
        Histogram.from_lengths(corpus.lengths),
        num_buckets=planning.num_buckets,
        budget=planning.budget,
        lookahead=planning.lookahead,
        optimize_for_lookahead=planning.optimize_for_lookahead,
        boundaries=planning.boundaries,
    )
    progress.advance(1)
    strategies, composition = _strategies(subject, progress)
    data = {
        "setting": {
            "num_samples": result.num_samples,
            "num_tokens": result.num_tokens,
            "notes": list(result.notes),
            **options.to_json(),
            **subject.epoch_options.to_json(),
        },
        "lengths": length_bars(corpus.lengths, options.boundaries),
        "buckets": _buckets(result),
        "curve": _curve(result, options.lookahead),
        "strategies": strategies,
        "composition": composition,
        "shapes": _shapes(subject, strategies["loader"], progress),
        "frontier": {
            "num_buckets": len(options.boundaries) - 1,
            "lookahead": options.lookahead,
            "points": [],
        },
    }
    if frontier:
        progress.start("frontier", len(FRONTIER_BUCKETS) * len(FRONTIER_LOOKAHEADS))
        for point in frontier_points(subject):
            data["frontier"]["points"].append(point)
            progress.advance(1)
    return data


def length_bars(lengths: NDArray[np.integer[Any]], boundaries: Sequence[int]) -> Json:
    """Samples by length, in about :data:`LENGTH_BARS` bars none of which crosses a boundary.

    Args:
        lengths: Tokens by sample, shape (N,).
        boundaries: ``(0, b1, ..., bK)``.

    Returns:
        ``edges``: bar i holds ``edges[i] < length <= edges[i + 1]``; ``num_samples`` and ``bucket`` of each
        bar; ``logarithmic``: whether bars widen with the length.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    logarithmic = longest > LOGARITHMIC_FROM * float(np.median(lengths))
    start = shortest - 1
    inner = [b for b in boundaries[1:-1] if start < b < longest]
    edges = [start]
    for stop in [*inner, longest]:
        first = edges[-1]
        if logarithmic:
            share = np.log((stop + 1) / (first + 1)) / np.log((longest + 1) / (start + 1))
            steps = np.geomspace(first + 1, stop + 1, max(2, round(share * LENGTH_BARS) + 1)) - 1
        else:
            share = (stop - first) / (longest - start)
            steps = np.linspace(first, stop, max(2, round(share * LENGTH_BARS) + 1))
        edges += [edge for edge in np.unique(np.rint(steps).astype(np.int64)).tolist() if edge > first]
    counts = np.bincount(
        np.searchsorted(np.array(edges[1:]), lengths), minlength=len(edges) - 1
    )  # an edge belongs to the bar below it
    bucket = np.searchsorted(np.array(boundaries[1:]), np.array(edges[1:]))
    return {
        "edges": edges,
        "num_samples": counts.tolist(),
        "bucket": bucket.tolist(),
        "boundaries": list(boundaries),
        "logarithmic": logarithmic,
    }


def _buckets(result: OptimizeResult) -> Json:
    return {"num_samples": result.num_samples, "buckets": result.to_json()["buckets"]}


def _curve(result: OptimizeResult, lookahead: int) -> Json:
    names = ("curve", "alternatives", "lower_bound_efficiency", "padding_efficiency", "boundaries")
    values = result.to_json()
    return {
        **{name: values[name] for name in names},
        "num_buckets": len(result.boundaries) - 1,
        "lookahead": lookahead,
        "lookahead_padding_efficiency": values["lookahead_padding_efficiency"],
    }


def _strategies(subject: Subject, progress: Progress) -> tuple[Json, Json]:
    """The figures of every strategy, and what its steps are made of."""
    corpus, options, epoch_options = subject.corpus, subject.plan_options, subject.epoch_options
    strategies: Json = {}
    steps: Json = {}
    progress.start("strategies", 2 * len(STRATEGIES))
    inner = np.array(options.boundaries[1:-1], np.int64)
    epoch: NDArray[np.float64] = np.zeros((0, len(inner) + 1))
    for name in STRATEGIES:
        strategies[name] = simulate(corpus, options, epoch_options, name).to_json()
        progress.advance(1)
        plans = plan_epoch(corpus, options, epoch_options, name, 0)
        shares = np.concatenate([step_histograms(plan, corpus.lengths, inner) for plan in plans])
        # Not the exact middle: blocks end there when their number is even.
        first = max(0, min(3 * len(shares) // 8, len(shares) - DETAILED_STEPS))
        steps[name] = {"first_step": first, "shares": _rounded(shares[first : first + DETAILED_STEPS])}
        if name == "loader":
            epoch = shares
        progress.advance(1)
    groups = np.array_split(np.arange(len(epoch)), min(EPOCH_GROUPS, len(epoch)))
    composition = {
        "num_buckets": len(inner) + 1,
        "steps": steps,
        "epoch": {
            "num_steps": len(epoch),
            "first_step": [int(group[0]) for group in groups],
            "shares": _rounded(np.stack([epoch[group].mean(axis=0) for group in groups])),
        },
    }
    return strategies, composition


def _rounded(shares: NDArray[np.float64]) -> list[list[float]]:
    rounded: list[list[float]] = np.round(shares, 5).tolist()
    return rounded


def _shapes(subject: Subject, as_set: Json, progress: Progress) -> Json:
    """How many tensor shapes the loader has, and what fewer would cost."""
    options, planning, budget = subject.plan_options, subject.planning, subject.planning.budget
    choices = [_shape_choice("as set", options.padding, options.pad_to_multiple_of, as_set)]
    if options.layout == "packed":
        return {"choices": choices}
    progress.start("shapes", len(SHAPE_MULTIPLES) + 1)
    for multiple in SHAPE_MULTIPLES:
        if multiple != options.pad_to_multiple_of or options.padding != "longest":
            tried = replace(options, pad_to_multiple_of=multiple, padding="longest")
            if choice := _try_shapes(subject, tried, f"multiples of {multiple}"):
                choices.append(choice)
        progress.advance(1)
    if options.padding != "boundary":
        static = replace(planning, boundaries=None, budget=replace(budget, padding="boundary"))
        boundaries = best_boundaries(subject.corpus.lengths, static)
        tried = replace(options, boundaries=boundaries, padding="boundary")
        if choice := _try_shapes(subject, tried, "one per bucket"):
            choices.append(choice)
    progress.advance(1)
    return {"choices": choices}


def _try_shapes(subject: Subject, options: Any, name: str) -> Json | None:
    try:
        result = simulate(subject.corpus, options, subject.epoch_options, "loader")
    except UserError:  # the longest sample, rounded up, exceeds the budget
        return None
    return _shape_choice(name, options.padding, options.pad_to_multiple_of, result.to_json())


def _shape_choice(name: str, padding: str, multiple: int, figures: Json) -> Json:
    names = ("num_shapes", "padding_efficiency", "rank_balance", "overall")
    return {
        "name": name,
        "padding": padding,
        "pad_to_multiple_of": multiple,
        **{key: figures[key] for key in names},
    }
