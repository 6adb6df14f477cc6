"""Lanes: a node reads the shards of its own lane, and the steps do not depend on how many nodes there are."""

import json
from dataclasses import replace

import numpy as np
import pytest

from loader.limits import lanes_of_node, shards_of_block
from loader.options import EpochOptions, PlanOptions
from loader.pool import Corpus
from loader.walk import Plans
from loader.world import World


def make_plans(num_canonical_nodes, num_samples=4000, shard_size=25, **epoch_options):
    lengths = np.sort(np.random.default_rng(0).integers(1, 200, num_samples)).astype(np.int32)
    sizes = np.full(num_samples // shard_size, shard_size)
    options = EpochOptions(num_canonical_nodes=num_canonical_nodes, seed=1, **epoch_options)
    corpus = Corpus(lengths=lengths, shard_sizes=(sizes[:80], sizes[80:]))
    return Plans(corpus, "print", options, np.zeros(0, np.int64)), np.cumsum(sizes)


OPTIONS = PlanOptions(boundaries=(0, 100, 200), token_budget=1000, world_size=8, accumulate=2, lookahead=4)


@pytest.mark.parametrize("lanes", [2, 4, 8])
@pytest.mark.parametrize("change", [{}, {"layout": "packed"}, {"padding": "boundary"}], ids=str)
@pytest.mark.parametrize("block_samples", [1500, 10_000])
def test_each_node_reads_its_own_shards(lanes, change, block_samples):
    if lanes == 8 and "padding" in change and block_samples > 4000:
        return  # one lane is left with too few rows, so that all share the tail
    plans, ends = make_plans(lanes, block_samples=block_samples)
    options = replace(OPTIONS, **change)
    touched = [set() for _ in range(lanes)]
    for run in plans.runs(plans.at(0), options):
        plan = run.shown
        rank = np.repeat(np.arange(len(plan.batch_start) - 1) % 8, np.diff(plan.batch_start))
        shards = np.searchsorted(ends, plan.sample_ids, side="right")
        planner = plans.planner(0)
        for node in range(lanes):
            world = World(rank=node * 8 // lanes, num_ranks=8, ranks_per_node=8 // lanes)
            own = lanes_of_node(world, options, lanes)
            mine = set(shards[rank * lanes // 8 == node].tolist())
            assert mine == set(shards_of_block(planner, run.begin.block, own, ends).tolist())
            touched[node] |= mine
        assert sorted(plan.rows.tolist()) == list(range(len(run.pool)))
        counts = np.bincount(np.arange(len(plan.batch_start) - 1) % 8)
        assert len(set(counts.tolist())) == 1
    tokens = np.add.reduceat(plans.corpus.lengths, np.concatenate(([0], ends[:-1])), dtype=np.int64)
    # The ends of a lane in a block cut a shard of each bucket, which its neighbour reads too.
    most = tokens.sum() / lanes + 2 * 2 * plans.planner(0).num_blocks * tokens.max()
    assert max(tokens[sorted(shards)].sum() for shards in touched) <= most


def test_lanes_of_a_node_on_other_worlds():
    def lanes(rank, num_ranks, per_node, canonical, accumulate=1, replication=1):
        world = World(rank=rank, num_ranks=num_ranks, ranks_per_node=per_node, replication=replication)
        options = replace(OPTIONS, world_size=world.num_groups, accumulate=accumulate)
        return lanes_of_node(world, options, canonical).tolist()

    assert lanes(0, 8, 4, 2) == [0] and lanes(5, 8, 4, 2) == [1]
    assert lanes(0, 8, 4, 4) == [0, 1] and lanes(7, 8, 4, 4) == [2, 3]
    assert lanes(3, 8, 8, 4) == [0, 1, 2, 3]
    assert lanes(0, 8, 2, 2) == [0] and lanes(2, 8, 2, 2) == [0] and lanes(4, 8, 2, 2) == [1]
    assert lanes(0, 3, 1, 2) == [0, 1]  # two lanes cannot be kept apart on three ranks
    assert lanes(0, 2, 1, 4, accumulate=2) == [0, 1] and lanes(1, 2, 1, 4, accumulate=2) == [2, 3]
    assert lanes(0, 8, 4, 2, replication=2) == [0] and lanes(4, 8, 4, 2, replication=2) == [1]


@pytest.mark.parametrize("num_samples", [17, 40, 90, 333])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_small_sets_and_their_tails_are_still_exact(num_samples, accumulate):
    lengths = np.sort(np.random.default_rng(num_samples).integers(1, 200, num_samples)).astype(np.int32)
    corpus = Corpus(lengths=lengths, shard_sizes=(np.array([num_samples]),))
    plans = Plans(corpus, "print", EpochOptions(num_canonical_nodes=4), np.zeros(0, np.int64))
    for layout in ("padded", "packed"):
        options = replace(OPTIONS, accumulate=accumulate, layout=layout)
        (run,) = plans.runs(plans.at(0), options)
        plan = run.shown
        assert sorted(plan.sample_ids.tolist()) == list(range(num_samples))
        assert (len(plan.batch_start) - 1) % 8 == 0 and plan.num_fillers < 8
        micro_steps = np.diff(plan.step_start)
        assert (micro_steps[:-1] == accumulate).all() and 1 <= micro_steps[-1] <= accumulate
        real = plan.batch_filler < 0
        assert (plan.batch_padded_length * plan.batch_num_rows)[real].max() <= options.token_budget


@pytest.mark.distributed
def test_nodes_with_their_own_caches(python, root):
    done = python(root / "scripts/lanes.py", "--samples", 3000, "--json", timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    without, with_lanes, one_node = report["runs"]
    everything = list(range(3000))
    for run in report["runs"]:
        assert sorted(i for step in run["steps"] for i in step) == everything
    assert min(without["downloaded_bytes"]) > 0.95 * report["total_bytes"]
    assert max(with_lanes["downloaded_bytes"]) < 0.65 * report["total_bytes"]
    assert with_lanes["steps"] == one_node["steps"]
