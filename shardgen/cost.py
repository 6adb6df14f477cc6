"""What a batch costs, in token-equivalents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardgen.errors import UserError

# Keeps rows * length * (Q + length) far inside 64 bits for budgets of 10^8 tokens.
MAX_QUADRATIC_LENGTH = 1 << 30


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
