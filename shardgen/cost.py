"""What a batch costs, in token-equivalents."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardgen.errors import UserError

# Keeps rows * length * (Q + length) far inside 64 bits for budgets of 10^8 tokens.
MAX_QUADRATIC_LENGTH = 1 << 30
# Below this singular value (of three columns of unit length) an error of 1 % in the measurements can move
# half of the time from one term to another.
_LEAST_SPREAD = 0.02
# Times that grow less than this from the smallest batch to the largest measure something else.
_LEAST_GROWTH = 0.01


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of one forward and backward pass of a padded batch.

    ``cost(n, L) = n * L * (1 + L / quadratic_length) + overhead_tokens``: linear layers, attention
    scores, and what every batch pays whatever its size (kernel launches, the optimizer's share).

    Attributes:
        quadratic_length: Length in tokens at which attention costs as much as all linear layers;
            ``None`` means that cost is linear in the padded tokens.
        overhead_tokens: Fixed cost of a batch, in tokens.
    """

    quadratic_length: int | None = None
    overhead_tokens: int = 0

    def __post_init__(self) -> None:
        q = self.quadratic_length
        if q is not None and not 1 <= q <= MAX_QUADRATIC_LENGTH:
            raise UserError(
                f"quadratic_length {q} is outside 1..{MAX_QUADRATIC_LENGTH}: leave it out for linear cost"
            )
        if self.overhead_tokens < 0:
            raise UserError(f"overhead_tokens {self.overhead_tokens} is negative: use 0 for none")

    @property
    def scale(self) -> int:
        """Factor between :meth:`scaled` and :meth:`cost`."""
        return self.quadratic_length or 1

    def scaled(self, num_rows: ArrayLike, padded_length: ArrayLike) -> NDArray[np.int64]:
        """Exact integer cost: ``cost * scale``. Comparisons use this, so that no plan hangs on rounding.

        Args:
            num_rows: Rows of each batch, broadcast against ``padded_length``.
            padded_length: Tokens of each row.
        """
        rows, length = np.asarray(num_rows, np.int64), np.asarray(padded_length, np.int64)
        if self.quadratic_length is None:
            return rows * length + self.overhead_tokens
        return rows * length * (self.quadratic_length + length) + self.overhead_tokens * self.quadratic_length

    def cost(self, num_rows: ArrayLike, padded_length: ArrayLike) -> NDArray[np.float64]:
        """Cost in token-equivalents, float64; arguments as in :meth:`scaled`, fractions allowed."""
        rows, length = np.asarray(num_rows, np.float64), np.asarray(padded_length, np.float64)
        per_token = np.ones_like(length)
        if self.quadratic_length is not None:
            per_token += length / self.quadratic_length
        return np.asarray(rows * length * per_token + self.overhead_tokens, np.float64)

    def to_json(self) -> dict[str, Any]:
        return {"quadratic_length": self.quadratic_length, "overhead_tokens": self.overhead_tokens}

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> CostModel:
        unknown = set(obj) - {"quadratic_length", "overhead_tokens"}
        if unknown:
            raise UserError(
                f"cost model has unknown fields {sorted(unknown)}: use quadratic_length, overhead_tokens"
            )
        return cls(**obj)

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read a model from a JSON file with the fields of this class."""
        try:
            obj = json.loads(Path(path).read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"cost model {path} cannot be read: {error}") from error
        if not isinstance(obj, dict):
            raise UserError(f"cost model {path} is not a JSON object")
        return cls.from_json(obj)

    @classmethod
    def fit(cls, batch_size: ArrayLike, length: ArrayLike, seconds: ArrayLike) -> FittedCost:
        """The model that explains measured times best: ``seconds = cost * seconds_per_token``.

        Least squares of the *relative* errors, so that a small batch counts as much as a large one, with no
        negative term. ``quadratic_length`` and ``overhead_tokens`` are rounded to whole tokens; a term that
        the measurements do not show is left out.

        Args:
            batch_size: Rows of each measured batch, shape (M,).
            length: Tokens of each row, padding included, shape (M,).
            seconds: Time of each, best the median of several runs, shape (M,).

        Returns:
            The model, and the seconds of one token-equivalent.

        Raises:
            UserError: A value is not positive, or the shapes are too alike to tell linear, quadratic and
                fixed cost apart.
        """
        rows, tokens, times = (np.asarray(a, np.float64).ravel() for a in (batch_size, length, seconds))
        _check_measurements(rows, tokens, times)
        # (M, 3): seconds of one unit of each term, over the measured seconds
        terms = np.stack((rows * tokens, rows * tokens**2, np.ones_like(rows)), axis=1) / times[:, None]
        _check_spread(rows, tokens, terms)
        linear, quadratic, fixed = _non_negative(terms)
        growth = (linear * rows * tokens + quadratic * rows * tokens**2).max()
        if growth <= _LEAST_GROWTH * fixed:
            raise UserError(
                "the measured times do not grow with the batch: measure larger batches, and let the step "
                "wait for the device before it returns"
            )
        quadratic_length = None
        if quadratic > 0 and linear < quadratic * MAX_QUADRATIC_LENGTH:
            quadratic_length = max(1, round(linear / quadratic))
        # With a rounded shape of the growth, the rest is fitted again: two terms, the second not negative.
        shape = cls(quadratic_length=quadratic_length).cost(rows, tokens) / times
        slope, fixed, _ = _non_negative(np.stack((shape, 1 / times, np.zeros_like(times)), axis=1))
        model = cls(quadratic_length=quadratic_length, overhead_tokens=round(fixed / slope))
        relative = model.cost(rows, tokens) / times
        return FittedCost(model=model, seconds_per_token=float(relative.sum() / (relative**2).sum()))


class FittedCost(NamedTuple):
    """A model in token-equivalents, and what one of them takes on the machine that was measured.

    Attributes:
        model: What ``--cost-model`` and the loader take.
        seconds_per_token: Seconds of one token-equivalent.
    """

    model: CostModel
    seconds_per_token: float

    def seconds(self, num_rows: ArrayLike, padded_length: ArrayLike) -> NDArray[np.float64]:
        """Predicted seconds of batches; arguments as in :meth:`CostModel.scaled`."""
        return self.model.cost(num_rows, padded_length) * self.seconds_per_token


def _check_measurements(
    rows: NDArray[np.float64], tokens: NDArray[np.float64], times: NDArray[np.float64]
) -> None:
    if not len(rows) == len(tokens) == len(times):
        raise UserError(
            f"{len(rows)} batch sizes, {len(tokens)} lengths and {len(times)} times: "
            "give one of each for every batch"
        )
    for name, values in (("batch size", rows), ("length", tokens), ("time", times)):
        wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if len(wrong):
            raise UserError(f"{name} {values[wrong[0]]} of measurement {wrong[0]} is not a positive number")


def _check_spread(rows: NDArray[np.float64], tokens: NDArray[np.float64], terms: NDArray[np.float64]) -> None:
    """Refuse measurements from which the three terms cannot be told apart."""
    if len(np.unique(np.stack((rows, tokens)), axis=1).T) < 3:
        raise UserError(
            f"{len(rows)} measurements of fewer than 3 shapes: "
            "measure short and long rows in small and large batches"
        )
    spread = np.linalg.svd(terms / np.linalg.norm(terms, axis=0), compute_uv=False)[-1]
    if spread < _LEAST_SPREAD:
        padded = rows * tokens
        raise UserError(
            f"lengths {tokens.min():g}..{tokens.max():g} in batches of "
            f"{padded.min():g}..{padded.max():g} tokens are too alike to tell linear, quadratic and fixed "
            "cost apart: measure lengths and batches that each differ by a factor of 4 or more"
        )


def _non_negative(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients >= 0 with the least squared distance of ``terms @ coefficients`` from 1, shape (3,).

    Exact: the optimum is the plain solution for one of the sets of terms that may be positive.
    """
    best, least = np.zeros(terms.shape[1]), np.inf
    used = np.flatnonzero((terms != 0).any(axis=0)).tolist()
    for size in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, size):
            columns = terms[:, chosen]
            scale = np.linalg.norm(columns, axis=0)  # seconds per token and per batch differ by 10^6
            found = np.linalg.lstsq(columns / scale, np.ones(len(terms)), rcond=None)[0] / scale
            error = float(((columns @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(terms.shape[1]), error
                best[list(chosen)] = found
    return best
