"""Which rank of how many this process is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shardgen.errors import UserError


@dataclass(frozen=True, kw_only=True)
class World:
    """This process's place among the ranks.

    Attributes:
        rank: Number of this rank, ``0 <= rank < num_ranks``.
        num_ranks: Ranks of the whole job.
        ranks_per_node: Ranks on this machine; only a hint, no batch depends on it.
        replication: So many consecutive ranks receive the same batches (tensor or sequence parallelism).
    """

    rank: int = 0
    num_ranks: int = 1
    ranks_per_node: int = 1
    replication: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise UserError(f"rank {self.rank} is outside 0..{self.num_ranks - 1}: check RANK and WORLD_SIZE")
        if self.replication < 1 or self.num_ranks % self.replication:
            raise UserError(
                f"replication {self.replication} does not divide the {self.num_ranks} ranks: "
                f"use a divisor of {self.num_ranks}"
            )

    @property
    def num_groups(self) -> int:
        """Data-parallel groups: sets of ranks with different batches."""
        return self.num_ranks // self.replication

    @property
    def group(self) -> int:
        """Group of this rank."""
        return self.rank // self.replication


def _from_env(env: Mapping[str, str]) -> tuple[int, int] | None:
    given = {name: env[name] for name in ("RANK", "WORLD_SIZE") if env.get(name)}
    if not given:
        return None
    if len(given) == 1:
        (name,) = given
        other = "WORLD_SIZE" if name == "RANK" else "RANK"
        if name == "WORLD_SIZE" and given[name].strip() == "1":
            return 0, 1
        raise UserError(f"{name} is {given[name]!r} but {other} is not set: set both or neither")
    try:
        return int(given["RANK"]), int(given["WORLD_SIZE"])
    except ValueError:
        raise UserError(f"RANK {given['RANK']!r}, WORLD_SIZE {given['WORLD_SIZE']!r}: use integers") from None


def _from_distributed() -> tuple[int, int] | None:
    # Looked up, not imported: a process that has not imported torch has initialised nothing.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


def detect(replication: int | None = None, env: Mapping[str, str] | None = None) -> World:
    """The world as ``torch.distributed`` tells it when initialised, else as the environment does.

    Args:
        replication: Consecutive ranks with the same batches; ``None`` means 1.
        env: Environment to read; ``None`` means ``os.environ``.

    Raises:
        UserError: The two disagree, or a value makes no sense.
    """
    env = os.environ if env is None else env
    told, environment = _from_distributed(), _from_env(env)
    if told is not None and environment is not None and told != environment:
        raise UserError(
            f"torch.distributed says rank {told[0]} of {told[1]} but the environment says rank "
            f"{environment[0]} of {environment[1]}: make RANK and WORLD_SIZE agree with "
            "init_process_group, or unset them"
        )
    rank, num_ranks = told or environment or (0, 1)
    try:
        ranks_per_node = int(env.get("LOCAL_WORLD_SIZE") or num_ranks)
    except ValueError:
        raise UserError(f"LOCAL_WORLD_SIZE is {env['LOCAL_WORLD_SIZE']!r}: use an integer") from None
    if not 1 <= ranks_per_node <= num_ranks:
        ranks_per_node = num_ranks
    return World(rank=rank, num_ranks=num_ranks, ranks_per_node=ranks_per_node, replication=replication or 1)
