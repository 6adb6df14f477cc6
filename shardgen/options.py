"""What a build can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from shardgen.buckets import Padding, TokenBudget
from shardgen.cost import CostModel
from shardgen.errors import UserError
from shardgen.policies import OverLength, Policies, Skip

Engine = Literal["local", "ray"]


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Everything a build can be asked for; names and meanings are those of the command line."""

    token_budget: int = 49152
    num_buckets: int | Literal["auto"] = 6
    boundaries: tuple[int, ...] | None = None
    max_batch_size: int | None = None
    cost_budget: int | None = None
    cost_model: CostModel = field(default_factory=CostModel)
    padding: Padding = "longest"
    pad_to_multiple_of: int = 1
    lookahead: int = 32
    optimize_for_lookahead: int = 1
    tokens_column: str = "input_ids"
    length_column: str | None = None
    loss_mask_column: str | None = None
    columns: tuple[str, ...] = ()
    split: str | None = None
    max_length: int | None = None
    over_length: OverLength = "error"
    on_empty: Skip = "error"
    on_null: Skip = "error"
    token_dtype: str = "auto"
    shard_size: int = 64 << 20
    compression: str | None = None
    hashes: tuple[str, ...] = ("xxh64",)
    workers: int = 1
    memory: int = 512 << 20
    engine: Engine = "local"
    ray_address: str | None = None
    overwrite: bool = False
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("max_length", "workers", "memory", "shard_size", "lookahead", "optimize_for_lookahead"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} {value} is below 1")
        if self.overwrite and self.resume:
            raise UserError("--overwrite starts anew and --resume goes on: use one of them")
        if self.engine not in get_args(Engine):
            raise UserError(f"--engine {self.engine!r} is not one of {', '.join(get_args(Engine))}")
        object.__setattr__(self, "hashes", tuple(sorted(set(self.hashes))))

    @property
    def budget(self) -> TokenBudget:
        return TokenBudget(
            tokens=self.token_budget,
            max_batch_size=self.max_batch_size,
            pad_to_multiple_of=self.pad_to_multiple_of,
            cost_budget=self.cost_budget,
            cost_model=self.cost_model,
            padding=self.padding,
        )

    def policies(self) -> Policies:
        """The limit is the smaller of ``--max-length`` and what fits the budget alone."""
        limit, name = self.budget.longest_allowed, f"--token-budget {self.token_budget}"
        if self.cost_budget is not None:
            name += f" and --cost-budget {self.cost_budget}"
        if self.pad_to_multiple_of > 1:
            name += f" with --pad-to-multiple-of {self.pad_to_multiple_of}"
        if limit != self.token_budget:
            name += f" ({limit})"
        if self.max_length is not None and self.max_length <= limit:
            limit, name = self.max_length, f"--max-length {self.max_length}"
        return Policies(
            limit=limit,
            limit_name=name,
            over_length=self.over_length,
            on_empty=self.on_empty,
            on_null=self.on_null,
        )

    def recorded(self) -> dict[str, Any]:
        """What the manifest keeps: whatever shapes the data or its batches."""
        return {
            "token_budget": self.token_budget,
            "max_batch_size": self.max_batch_size,
            "padding": self.padding,
            "pad_to_multiple_of": self.pad_to_multiple_of,
            "cost_budget": self.cost_budget,
            "quadratic_length": self.cost_model.quadratic_length,
            "overhead_tokens": self.cost_model.overhead_tokens,
            "lookahead": self.lookahead,
            "optimize_for_lookahead": self.optimize_for_lookahead,
            "buckets": self.num_buckets,
            "max_length": self.max_length,
            "over_length": self.over_length,
            "on_empty": self.on_empty,
            "on_null": self.on_null,
            "token_dtype": self.token_dtype,
            "shard_size": self.shard_size,
            "compression": self.compression,
            "hashes": list(self.hashes),
        }
