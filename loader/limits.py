"""How small a cache may be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loader.options import PlanOptions
from loader.pool import EpochPlanner
from loader.walk import Plans
from loader.world import World

# Epochs deal shards to blocks differently, but evenly; a few tell how large a block gets.
_EPOCHS = 3


def lanes_of_node(world: World, options: PlanOptions, num_canonical_nodes: int) -> NDArray[np.int64]:
    """Lanes whose shards the ranks of this rank's node read, int64, ascending.

    A rank's batches come from the lanes of its group of ranks (see :class:`loader.deal.Layout`); the tail of
    a block apart.
    """
    num_lanes = int(np.gcd(num_canonical_nodes, options.batches_per_step))
    num_groups = int(np.gcd(num_lanes, options.world_size))
    first = world.rank - world.rank % world.ranks_per_node
    ranks = np.arange(first, min(first + world.ranks_per_node, world.num_ranks)) // world.replication
    mine = np.unique(ranks * num_groups // options.world_size)
    effective = np.arange(num_canonical_nodes) * num_lanes // num_canonical_nodes
    return np.flatnonzero(np.isin(effective * num_groups // num_lanes, mine))


def shards_of_block(
    planner: EpochPlanner, block: int, lanes: NDArray[np.int64], shard_ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Shards that some lanes of a block read, int64, ascending.

    Args:
        planner: Of the epoch.
        block: Block of the epoch.
        lanes: Lanes that count.
        shard_ends: Sample id after the last of each shard, int64, shape (num_shards,).
    """
    pool = planner.pool(block)
    ids = pool.ids[np.isin(pool.lanes, lanes)]
    return np.unique(np.searchsorted(shard_ends, ids, side="right"))


def least_cache_limit(
    plans: Plans,
    options: PlanOptions,
    world: World,
    shard_bytes: NDArray[np.int64],
    shard_ends: NDArray[np.int64],
    other_bytes: int,
) -> int:
    """Bytes that hold one block's shards and, of the next block, one of each bucket.

    With less, shards are evicted while their block still needs them and downloaded again and again: a block
    is shuffled as a whole.

    Args:
        plans: Of the dataset.
        options: Today's options.
        world: This process among the ranks.
        shard_bytes: Most bytes that each shard takes, compressed form included, int64, shape (num_shards,).
        shard_ends: Sample id after the last of each shard, int64, shape (num_shards,).
        other_bytes: Of the small files that always stay.
    """
    lanes = lanes_of_node(world, options, plans.epoch_options.num_canonical_nodes)
    bucket_ends = plans.corpus.bucket_start[1:]
    bucket_of_shard = np.searchsorted(bucket_ends, shard_ends, side="left")
    most = 0
    for epoch in range(_EPOCHS if plans.epoch_options.shuffle else 1):
        planner = EpochPlanner(plans.corpus, plans.epoch_options, epoch)
        blocks = [shards_of_block(planner, b, lanes, shard_ends) for b in range(planner.num_blocks)]
        for shards, following in zip(blocks, [*blocks[1:], blocks[0][:0]], strict=True):
            new = following[~np.isin(following, shards)]
            first = np.zeros(len(bucket_ends), np.int64)
            np.maximum.at(first, bucket_of_shard[new], shard_bytes[new])
            most = max(most, int(shard_bytes[shards].sum() + first.sum()))
    return most + other_bytes
