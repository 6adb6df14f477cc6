"""Best bucket boundaries for what the loader will really pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardgen.buckets import Buckets, TokenBudget
from shardgen.lengths import Histogram


@dataclass(frozen=True, kw_only=True)
class BucketStats:
    """One bucket: ``lower < length <= upper``.

    Attributes:
        lower, upper: Boundaries in tokens.
        num_samples, num_tokens: What it holds; both may be 0 with given boundaries.
        mean_length: Tokens per sample, 0 when empty.
        batch_size: Rows of a full batch that holds a sample of ``upper`` tokens; batches of shorter
            samples have more.
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

    boundaries: tuple[int, ...]
    padding_efficiency: float


@dataclass(frozen=True, kw_only=True)
class OptimizeResult:
    """Boundaries with their proof.

    Attributes:
        boundaries: ``(0, b1, ..., bK)``, strictly ascending.
        padding_efficiency: Expected real tokens over padded tokens at lookahead 1.
        lookahead_padding_efficiency: The same at the lookahead asked for.
        curve: ``(number of buckets, padding efficiency)`` of the best boundaries of each number.
        lower_bound_efficiency: Efficiency of sorted packing, the limit for any boundaries.
        grid_step: 1 when every distinct length was a candidate; else the widest run of lengths, in tokens,
            whose last one alone was.
        notes: What a person should know, such as fewer buckets than asked for.
        seconds: Time the search took.
    """

    num_samples: int
    num_tokens: int
    token_budget: int
    boundaries: tuple[int, ...]
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
        raise NotImplementedError


def optimize(
    histogram: Histogram,
    *,
    num_buckets: int | Literal["auto"],
    budget: TokenBudget,
    lookahead: int = 32,
    optimize_for_lookahead: int = 1,
    boundaries: Sequence[int] | None = None,
) -> OptimizeResult:
    """Best boundaries, or an evaluation of ``boundaries`` (upper bounds) when given."""
    raise NotImplementedError


def estimate_efficiency(histogram: Histogram, buckets: Buckets, budget: TokenBudget, lookahead: int) -> float:
    """Expected padding efficiency of a packed epoch."""
    raise NotImplementedError
