"""Which rank a process is: the environment, the process group, and what they may not say."""

import os

import pytest
import torch.distributed as dist

from loader.world import World, detect
from shardgen.errors import UserError


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, World()),
        ({"WORLD_SIZE": "1"}, World()),
        ({"RANK": "3", "WORLD_SIZE": "4"}, World(rank=3, num_ranks=4, ranks_per_node=4)),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            World(rank=3, num_ranks=4, ranks_per_node=2),
        ),
        ({"RANK": "", "WORLD_SIZE": ""}, World()),
    ],
)
def test_environment(env, expected):
    assert detect(env=env) == expected


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"rank 4 is outside 0\.\.3"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "rank -1"),
        ({"RANK": "1"}, "RANK is '1' but WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE is '4' but RANK is not set"),
        ({"RANK": "a", "WORLD_SIZE": "4"}, "use integers"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE is 'x'"),
    ],
)
def test_environment_that_makes_no_sense(env, message):
    with pytest.raises(UserError, match=message):
        detect(env=env)


@pytest.mark.parametrize(("replication", "groups"), [(1, [0, 1, 2, 3]), (2, [0, 0, 1, 1]), (4, [0, 0, 0, 0])])
def test_replication(replication, groups):
    worlds = [detect(replication, {"RANK": str(r), "WORLD_SIZE": "4"}) for r in range(4)]
    assert [w.group for w in worlds] == groups
    assert {w.num_groups for w in worlds} == {4 // replication}


@pytest.mark.parametrize("replication", [3, 8, -1])
def test_replication_that_does_not_divide(replication):
    with pytest.raises(UserError, match=f"replication {replication} does not divide the 4 ranks"):
        detect(replication, {"RANK": "0", "WORLD_SIZE": "4"})


def test_process_group_and_disagreement(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert detect(env={}) == World()
        assert detect(env={"RANK": "0", "WORLD_SIZE": "1"}) == World()
        with pytest.raises(UserError, match="rank 0 of 1 but the environment says rank 1 of 2"):
            detect(env={"RANK": "1", "WORLD_SIZE": "2"})
    finally:
        dist.destroy_process_group()
    assert "RANK" not in os.environ
