"""Best bucket boundaries for what the loader will really pay.

An exact dynamic programme over a grid of boundaries: every distinct length, or a stated number of cells of
them. What a bucket costs comes from :mod:`shardgen.estimate`; with K - 1 buckets solved for every end, K
buckets follow by trying every beginning of the last one, so the whole curve over K comes with the answer. A
grid coarser than the lengths is followed by a descent at full resolution, which can only improve. Every
alternative is costed by the same function, so none is ever better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from shardgen.alternatives import ALTERNATIVES, Boundaries, coordinate_descent, equal_width
from shardgen.buckets import Buckets, TokenBudget
from shardgen.cells import FloatArray, IntArray
from shardgen.errors import UserError
from shardgen.estimate import Estimator, estimate_efficiency, sorted_efficiency
from shardgen.lengths import Histogram
from shardgen.static import static_partitions

__all__ = ["Alternative", "BucketStats", "OptimizeResult", "estimate_efficiency", "evaluate", "optimize"]

# Cells of the grid when there are more distinct lengths; a windowed bucket costs more to estimate.
SHUFFLED_GRID = 320
WINDOWED_GRID = 64
# The curve goes at least this far, and "auto" at most that far.
CURVE_BUCKETS = 16
MAX_AUTO_BUCKETS = 64
# "auto" stops where the next bucket gains less padding efficiency than this.
AUTO_GAIN = 0.005


@dataclass(frozen=True, kw_only=True)
class BucketStats:
    """One bucket: ``lower < length <= upper``.

    Attributes:
        lower, upper: Boundaries in tokens.
        num_samples, num_tokens: What it holds; both may be 0 with given boundaries.
        mean_length: Tokens per sample, 0 when empty.
        batch_size: Rows of a full batch that holds the bucket's longest sample (of length ``upper`` with
            static shapes); batches of shorter samples have more.
        padding_efficiency: Expected at lookahead 1; 1 when empty.
    """

    lower: int
    upper: int
    num_samples: int
    num_tokens: int
    mean_length: float
    batch_size: int
    padding_efficiency: float


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Boundaries found some other way, with their expected padding efficiency at lookahead 1."""

    boundaries: Boundaries
    padding_efficiency: float


@dataclass(frozen=True, kw_only=True)
class OptimizeResult:
    """Boundaries with their proof.

    Attributes:
        boundaries: ``(0, b1, ..., bK)``, strictly ascending.
        padding_efficiency: Expected real tokens over padded tokens at lookahead 1.
        lookahead_padding_efficiency: The same at the lookahead asked for.
        curve: ``(number of buckets, padding efficiency)`` of the best boundaries of up to each number, on
            the grid.
        lower_bound_efficiency: Efficiency of sorted packing, the limit without any shuffle.
        grid_step: 1 when every distinct length was a candidate; else the widest run of lengths, in tokens, of
            which only the last was one (before the descent).
        notes: What a person should know, such as fewer buckets than asked for.
        seconds: Time the search took.
    """

    num_samples: int
    num_tokens: int
    token_budget: int
    boundaries: Boundaries
    padding_efficiency: float
    lookahead_padding_efficiency: float
    buckets: tuple[BucketStats, ...]
    curve: tuple[tuple[int, float], ...]
    alternatives: dict[str, Alternative]
    lower_bound_efficiency: float
    grid_step: int
    notes: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values, without ``notes``."""
        result = asdict(self)
        del result["notes"]
        result["boundaries"] = list(self.boundaries)
        result["buckets"] = list(result["buckets"])
        result["curve"] = [{"num_buckets": k, "padding_efficiency": e} for k, e in self.curve]
        for name, alternative in self.alternatives.items():
            result["alternatives"][name]["boundaries"] = list(alternative.boundaries)
        return result


def optimize(
    histogram: Histogram,
    *,
    num_buckets: int | Literal["auto"],
    budget: TokenBudget,
    lookahead: int = 32,
    optimize_for_lookahead: int = 1,
    boundaries: Sequence[int] | None = None,
) -> OptimizeResult:
    """Best boundaries, or an evaluation of given ones.

    The result has at most ``num_buckets`` buckets: fewer when there are fewer distinct lengths, or (rarely,
    on few samples) when a further bucket would cost more than it saves.

    Args:
        histogram: The lengths; the work does not depend on the number of samples.
        num_buckets: How many buckets, or ``"auto"``: the smallest number whose next bucket gains less than
            half a point of padding efficiency at lookahead 1.
        budget: The limits of a batch, and the costs that are minimised.
        lookahead: Report the efficiency at this many batches per window too.
        optimize_for_lookahead: Minimise the cost at this many batches per window.
        boundaries: Upper bounds to evaluate instead of the best ones.

    Raises:
        UserError: A length fits no batch, or an argument is out of its range.
    """
    began = time.perf_counter()
    for name, value in (("lookahead", lookahead), ("optimize_for_lookahead", optimize_for_lookahead)):
        if value < 1:
            raise UserError(f"{name} {value} is below 1: use 1 for a plain shuffle")
    if num_buckets != "auto" and num_buckets < 1:
        raise UserError(f"{num_buckets} buckets are too few: use at least 1, or auto")
    search = _Search(histogram, budget, optimize_for_lookahead)
    given = None
    if boundaries is not None:
        given = Buckets.from_upper_bounds(boundaries, histogram.longest).boundaries
    wanted = num_buckets if given is None else len(given) - 1
    count = search.climb(wanted)
    alternatives = {name: choose(histogram, count) for name, choose in ALTERNATIVES.items()}
    best = search.best(count, [*alternatives.values(), equal_width(histogram, count)])
    efficiency = search.shuffled.efficiency
    curve = {k: efficiency(search.ladder[k - 1]) for k in search.curve(count)} | {count: efficiency(best)}
    chosen = best if given is None else given
    ahead = search.shuffled if lookahead == 1 else Estimator(histogram, budget, lookahead)
    return OptimizeResult(
        num_samples=histogram.num_samples,
        num_tokens=histogram.num_tokens,
        token_budget=budget.tokens,
        boundaries=chosen,
        padding_efficiency=efficiency(chosen),
        lookahead_padding_efficiency=ahead.efficiency(chosen),
        buckets=_bucket_stats(search.shuffled, chosen),
        curve=tuple(sorted(curve.items())),
        alternatives={
            name: Alternative(boundaries=b, padding_efficiency=efficiency(b))
            for name, b in alternatives.items()
        },
        lower_bound_efficiency=sorted_efficiency(histogram, budget, chosen),
        grid_step=search.grid_step,
        notes=_notes(histogram, wanted, best, given, efficiency(best)),
        seconds=time.perf_counter() - began,
    )


def evaluate(
    histogram: Histogram, *, boundaries: Sequence[int], budget: TokenBudget, lookahead: int = 32
) -> OptimizeResult:
    """What to expect of given boundaries, without the search: no curve, no notes, milliseconds.

    Args:
        histogram: The lengths.
        boundaries: Upper bounds.
        budget: The limits of a batch.
        lookahead: Report the efficiency at this many batches per window too.

    Raises:
        UserError: A length fits no batch.
    """
    began = time.perf_counter()
    chosen = Buckets.from_upper_bounds(boundaries, histogram.longest).boundaries
    shuffled = Estimator(histogram, budget, 1)
    ahead = shuffled if lookahead == 1 else Estimator(histogram, budget, lookahead)
    others = {name: choose(histogram, len(chosen) - 1) for name, choose in ALTERNATIVES.items()}
    return OptimizeResult(
        num_samples=histogram.num_samples,
        num_tokens=histogram.num_tokens,
        token_budget=budget.tokens,
        boundaries=chosen,
        padding_efficiency=shuffled.efficiency(chosen),
        lookahead_padding_efficiency=ahead.efficiency(chosen),
        buckets=_bucket_stats(shuffled, chosen),
        curve=(),
        alternatives={
            name: Alternative(boundaries=b, padding_efficiency=shuffled.efficiency(b))
            for name, b in others.items()
        },
        lower_bound_efficiency=sorted_efficiency(histogram, budget, chosen),
        grid_step=1,
        notes=(),
        seconds=time.perf_counter() - began,
    )


class _Search:
    """One objective over one histogram.

    Attributes:
        ladder: The best boundaries of up to 1, 2, ... buckets.
        grid_step: See :class:`OptimizeResult`.
    """

    def __init__(self, histogram: Histogram, budget: TokenBudget, lookahead: int) -> None:
        self.histogram, self.budget, self.lookahead = histogram, budget, lookahead
        self.shuffled = Estimator(histogram, budget, 1)
        self.objective = self.shuffled if lookahead == 1 else Estimator(histogram, budget, lookahead)
        self.ladder: list[Boundaries] = []
        self.grid_step = 1
        self.step = 0  # first step of the descent, in distinct lengths

    def climb(self, wanted: int | Literal["auto"]) -> int:
        """Fill the ladder; the number of buckets to take."""
        lowest, enough = np.inf, None
        for boundaries, cost in self._partitions(0 if wanted == "auto" else wanted):
            # Equal but for rounding: as many buckets as asked for.
            if not self.ladder or cost <= lowest * (1.0 + 1e-12):
                rung = boundaries
            lowest = min(lowest, cost)
            self.ladder.append(rung)
            height = len(self.ladder)
            if wanted == "auto" and enough is None and height > 1:
                before, now = (self.shuffled.efficiency(rung) for rung in self.ladder[-2:])
                enough = height - 1 if now - before < AUTO_GAIN else None
            limit = MAX_AUTO_BUCKETS if wanted == "auto" else wanted
            done = enough is not None or height >= limit
            if done and height >= CURVE_BUCKETS:
                break
        return min((enough or len(self.ladder)) if wanted == "auto" else wanted, len(self.ladder))

    def curve(self, count: int) -> range:
        """The rungs whose efficiency to tell."""
        return range(1, 1 + min(len(self.ladder), max(CURVE_BUCKETS, min(count + 1, MAX_AUTO_BUCKETS))))

    def best(self, count: int, others: Sequence[Boundaries]) -> Boundaries:
        """The cheapest, and from there down to the next local minimum at full resolution."""
        best = min([self.ladder[count - 1], *others], key=self.objective.cost)
        return coordinate_descent(best, self.histogram, self.objective.cost, self.step)

    def _partitions(self, least: int) -> Iterator[tuple[Boundaries, float]]:
        """The best boundaries of exactly 1, 2, ... (at least ``least``) buckets, and their grid cost."""
        lengths = self.histogram.lengths
        if self.budget.padding == "boundary":
            for ends, cost in static_partitions(self.histogram, self.budget):
                yield (0, *lengths[ends - 1].tolist()), cost
            return
        num_cells = max(SHUFFLED_GRID if self.lookahead == 1 else WINDOWED_GRID, 2 * least)
        grid = Estimator(self.histogram, self.budget, self.lookahead, num_cells)
        ends = grid.cells.ends
        widest = int(np.diff(ends).max())
        if widest > 1:
            self.grid_step = int((lengths[ends[1:] - 1] - lengths[ends[:-1]]).max()) + 1
            self.step = max(1, widest // 2)
        for cells, cost in partitions(grid.table()):
            yield (0, *lengths[ends[cells] - 1].tolist()), cost


def partitions(cost: FloatArray) -> Iterator[tuple[IntArray, float]]:
    """The cheapest 1, 2, ... consecutive ranges that cover all cells.

    Args:
        cost: Cost of the range of cells i + 1 .. j at ``[i, j]``, infinite unless i < j,
            shape (X + 1, X + 1).

    Yields:
        The last cell of each range, ascending int64, shape (K,), and their cost, for K up to X.
    """
    num_cells = len(cost) - 1
    total = cost[0]  # of the cells up to each, in K ranges
    came_from: list[IntArray] = []
    for num_ranges in range(1, num_cells + 1):
        if num_ranges > 1:
            through = total[:, None] + cost
            came_from.append(through.argmin(axis=0))
            total = np.take_along_axis(through, came_from[-1][None, :], axis=0)[0]
        ends = [num_cells]
        for before in reversed(came_from):
            ends.append(int(before[ends[-1]]))
        yield np.array(ends[::-1], np.int64), float(total[-1])


def _bucket_stats(estimator: Estimator, boundaries: Boundaries) -> tuple[BucketStats, ...]:
    histogram, budget = estimator.histogram, estimator.budget
    padded = estimator.evaluate(boundaries)[0]
    at = np.searchsorted(histogram.lengths, boundaries, side="right").tolist()
    stats = []
    for k, (first, stop) in enumerate(pairwise(at)):
        num_samples = int(histogram.counts[first:stop].sum())
        num_tokens = int(histogram.counts[first:stop] @ histogram.lengths[first:stop])
        static = budget.padding == "boundary" or not num_samples
        longest = boundaries[k + 1] if static else int(histogram.lengths[stop - 1])
        stats.append(
            BucketStats(
                lower=boundaries[k],
                upper=boundaries[k + 1],
                num_samples=num_samples,
                num_tokens=num_tokens,
                mean_length=num_tokens / num_samples if num_samples else 0.0,
                batch_size=int(budget.max_rows(longest)),
                padding_efficiency=num_tokens / float(padded[k]) if num_samples else 1.0,
            )
        )
    return tuple(stats)


def _notes(
    histogram: Histogram,
    wanted: int | Literal["auto"],
    best: Boundaries,
    given: Boundaries | None,
    efficiency: float,
) -> tuple[str, ...]:
    found, distinct = len(best) - 1, len(histogram.lengths)
    if given is not None:
        if given[:-1] == best[:-1]:
            return ()
        inner = ",".join(str(b) for b in best[1:])
        return (f"the best {found} boundaries would be {inner}, with padding efficiency {efficiency:.4f}",)
    if wanted == "auto" or found == wanted:
        return ()
    why = "a further one would cost more than it saves"
    if distinct < wanted:
        why = (
            "all samples have one length" if distinct == 1 else f"there are only {distinct} distinct lengths"
        )
    return (f"{found} bucket{'s' * (found > 1)} instead of {wanted}: {why}",)
