"""Length buckets, and the limits that a batch has to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardgen.cost import CostModel
from shardgen.errors import UserError

Padding = Literal["longest", "boundary"]


def assign(lengths: ArrayLike, boundaries: Sequence[int]) -> NDArray[np.int64]:
    """Bucket of every length: ``boundaries[k] < length <= boundaries[k + 1]``.

    Args:
        lengths: Tokens per sample, shape (N,).
        boundaries: Ascending, starting with 0, shape (K + 1,).

    Returns:
        Bucket numbers, int64, shape (N,).

    Raises:
        UserError: A length lies in no bucket.
    """
    lengths = np.asarray(lengths)
    bounds = np.asarray(boundaries, np.int64)
    bucket = np.searchsorted(bounds, lengths, side="left") - 1
    outside = (bucket < 0) | (bucket >= len(bounds) - 1)
    if outside.any():
        sample = int(outside.argmax())
        raise UserError(
            f"sample {sample} has length {int(lengths[sample])}, outside the boundaries {int(bounds[0])}.."
            f"{int(bounds[-1])} ({int(outside.sum())} such samples): raise the last boundary"
        )
    return bucket


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """Length ranges, shortest first; bucket k holds ``boundaries[k] < length <= boundaries[k + 1]``."""

    boundaries: tuple[int, ...]

    def __post_init__(self) -> None:
        bounds = tuple(int(b) for b in self.boundaries)
        object.__setattr__(self, "boundaries", bounds)
        if len(bounds) < 2 or bounds[0] != 0:
            raise UserError(f"boundaries {list(bounds)} need a 0 and at least one upper bound")
        if any(a >= b for a, b in pairwise(bounds)):
            raise UserError(f"boundaries {list(bounds)} are not strictly ascending")

    @classmethod
    def from_upper_bounds(cls, bounds: Sequence[int], longest: int) -> Buckets:
        """Buckets from upper bounds: 0 is optional, ``longest`` is appended when above the last."""
        bounds = [int(b) for b in bounds]
        if not bounds or bounds[0] != 0:
            bounds.insert(0, 0)
        if longest > bounds[-1]:
            bounds.append(int(longest))
        return cls(boundaries=tuple(bounds))

    @property
    def num_buckets(self) -> int:
        return len(self.boundaries) - 1

    @property
    def lower(self) -> NDArray[np.int64]:
        return np.array(self.boundaries[:-1], np.int64)

    @property
    def upper(self) -> NDArray[np.int64]:
        return np.array(self.boundaries[1:], np.int64)

    def assign(self, lengths: ArrayLike) -> NDArray[np.int64]:
        """Bucket of every length; see :func:`assign`."""
        return assign(lengths, self.boundaries)

    def counts(self, lengths: ArrayLike) -> NDArray[np.int64]:
        """Samples in each bucket, shape (K,)."""
        return np.bincount(self.assign(lengths), minlength=self.num_buckets).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Everything that limits one batch.

    Attributes:
        tokens: Most padded tokens (rows x padded length) of a batch.
        max_batch_size: Most rows of a batch, or ``None``.
        pad_to_multiple_of: Rows are padded to a multiple of this many tokens.
        cost_budget: Most token-equivalents of a batch under ``cost_model``, or ``None``.
        cost_model: What a batch costs.
        padding: ``"longest"`` pads to the longest row of the batch, ``"boundary"`` to the upper
            boundary of its bucket (static shapes).
    """

    tokens: int
    max_batch_size: int | None = None
    pad_to_multiple_of: int = 1
    cost_budget: int | None = None
    cost_model: CostModel = field(default_factory=CostModel)
    padding: Padding = "longest"

    def __post_init__(self) -> None:
        for name in ("tokens", "max_batch_size", "pad_to_multiple_of", "cost_budget"):
            value = getattr(self, name)
            if value is not None and value < 1:
                label = "token_budget" if name == "tokens" else name
                raise UserError(f"{label} {value} is below 1")
        if self.padding not in get_args(Padding):
            raise UserError(f"padding {self.padding!r} is not one of {', '.join(get_args(Padding))}")

    def padded_length(self, longest: ArrayLike) -> NDArray[np.int64]:
        """Tokens of each row of a batch whose longest row (or bucket boundary) is ``longest``."""
        multiple = self.pad_to_multiple_of
        return -(-np.asarray(longest, np.int64) // multiple) * multiple

    def max_rows(self, longest: ArrayLike) -> NDArray[np.int64]:
        """Most rows that a batch may have when its longest row is ``longest``; 0: not even one."""
        length = np.maximum(self.padded_length(longest), 1)
        rows = self.tokens // length
        if self.cost_budget is not None:
            model = self.cost_model
            left = (self.cost_budget - model.overhead_tokens) * model.scale
            per_row = length if model.quadratic_length is None else length * (model.quadratic_length + length)
            rows = np.minimum(rows, max(left, 0) // per_row)
        if self.max_batch_size is not None:
            rows = np.minimum(rows, self.max_batch_size)
        return np.asarray(rows, np.int64)

    @property
    def longest_allowed(self) -> int:
        """Longest sample that fits a batch alone, in tokens; 0 when none does."""
        low, high = 0, self.tokens  # max_rows falls with the length, so bisect
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.max_rows(middle) >= 1 else (low, middle - 1)
        return low

    def check_longest(self, lengths: NDArray[np.integer[Any]]) -> None:
        """Refuse samples that no batch can hold.

        Args:
            lengths: Tokens per sample, by sample id, shape (N,).

        Raises:
            UserError: Naming the longest sample, its length, the budget and how many are too long.
        """
        limit = self.longest_allowed
        if lengths.size == 0 or int(lengths.max()) <= limit:
            return
        sample, num_over = int(lengths.argmax()), int((lengths > limit).sum())
        budget = f"token_budget {self.tokens}"
        if self.cost_budget is not None:
            budget += f" and cost_budget {self.cost_budget}"
        if self.pad_to_multiple_of > 1:
            budget += f" with pad_to_multiple_of {self.pad_to_multiple_of}"
        raise UserError(
            f"sample {sample} has {int(lengths[sample])} tokens but {budget} lets a sample have at most "
            f"{limit} ({num_over} samples are too long): raise the budget or leave them out with skip="
        )
