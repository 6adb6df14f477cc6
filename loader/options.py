"""What an epoch's plan depends on, besides the lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from shardgen.buckets import Buckets, Padding, TokenBudget
from shardgen.cost import CostModel
from shardgen.errors import UserError

Layout = Literal["padded", "packed"]
Tail = Literal["fill", "error"]

_T = TypeVar("_T", bound="EpochOptions | PlanOptions")


def _from_json(cls: type[_T], obj: Mapping[str, Any]) -> _T:
    names = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(obj) - names)
    if unknown:
        raise UserError(f"unknown plan options {unknown}: this version knows {sorted(names)}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in obj.items()}
    return cls(**values)


def _to_json(record: EpochOptions | PlanOptions) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(record).items()}


@dataclass(frozen=True, kw_only=True)
class EpochOptions:
    """Fixed within an epoch: they decide which entries a block holds.

    Attributes:
        seed: Decides every order.
        shuffle: Whether rows, shards and steps are shuffled; when not, every epoch is the same.
        block_samples: Entries planned at once, about; bounds memory.
        num_canonical_nodes: Lanes: shares of the storage, each for one node.
        buckets: Built buckets to train on, ascending; ``None`` for all.
        weights: Times that each built bucket's samples are delivered per epoch; ``None`` for once.
    """

    seed: int = 0
    shuffle: bool = True
    block_samples: int = 262_144
    num_canonical_nodes: int = 1
    buckets: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed {self.seed} is negative")
        for name in ("block_samples", "num_canonical_nodes"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} is below 1")
        if self.buckets is not None:
            object.__setattr__(self, "buckets", tuple(sorted(set(self.buckets))))
            if not self.buckets:
                raise UserError("buckets=() leaves nothing to train on: name at least one bucket")
        if self.weights is not None:
            bad = [w for w in self.weights if not 0 <= w < 1 << 15]
            if bad:
                raise UserError(f"weight {bad[0]} is outside 0..{(1 << 15) - 1}")

    to_json = _to_json

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> EpochOptions:
        return _from_json(cls, obj)


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """May change between any two steps; the rest of the block is then planned anew.

    Attributes:
        boundaries: Bucket boundaries of the plan, 0 first; need not be the build's.
        token_budget: Most padded tokens of a batch (real tokens when packed).
        cost_budget: Most token-equivalents of a batch, beside the token budget.
        max_batch_size: Most rows of a batch.
        padding: ``"longest"`` or ``"boundary"`` (static shapes).
        pad_to_multiple_of: Tokens that padded lengths are a multiple of.
        quadratic_length: See :class:`shardgen.cost.CostModel`.
        overhead_tokens: See :class:`shardgen.cost.CostModel`.
        lookahead: Batches per window; 1 for a plain shuffle inside the bucket.
        world_size: Ranks that get different batches: all ranks over the replication.
        accumulate: Most micro-steps of an optimizer step.
        layout: ``"padded"``, or ``"packed"`` for attention over variable lengths.
        tail: ``"fill"``, or ``"error"`` to refuse a plan that needs fillers.
    """

    boundaries: tuple[int, ...]
    token_budget: int
    cost_budget: int | None = None
    max_batch_size: int | None = None
    padding: Padding = "longest"
    pad_to_multiple_of: int = 1
    quadratic_length: int | None = None
    overhead_tokens: int = 0
    lookahead: int = 32
    world_size: int = 1
    accumulate: int = 1
    layout: Layout = "padded"
    tail: Tail = "fill"

    def __post_init__(self) -> None:
        for name in ("lookahead", "world_size", "accumulate"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} is below 1")
        for name, allowed in (("layout", get_args(Layout)), ("tail", get_args(Tail))):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.layout == "packed" and self.padding == "boundary":
            raise UserError("layout 'packed' pads nothing: leave padding at 'longest'")
        object.__setattr__(self, "boundaries", Buckets(boundaries=self.boundaries).boundaries)
        self.budget()  # refuses what cannot be

    @property
    def batches_per_step(self) -> int:
        """G: batches of a full optimizer step over all ranks."""
        return self.world_size * self.accumulate

    def cost_model(self) -> CostModel:
        return CostModel(quadratic_length=self.quadratic_length, overhead_tokens=self.overhead_tokens)

    def budget(self) -> TokenBudget:
        """The limits of one batch."""
        return TokenBudget(
            tokens=self.token_budget,
            max_batch_size=self.max_batch_size,
            pad_to_multiple_of=self.pad_to_multiple_of,
            cost_budget=self.cost_budget,
            cost_model=self.cost_model(),
            padding=self.padding,
        )

    to_json = _to_json

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> PlanOptions:
        return _from_json(cls, obj)
