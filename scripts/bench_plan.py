#!/usr/bin/env python
"""Planning an epoch: time beside Hugging Face's ``group_by_length``, and time and memory of a very large set.

    python scripts/bench_plan.py LENGTHS.npy|.npz
    python scripts/bench_plan.py LENGTHS --large 100000000

Both plan the same lengths in the same process, in turns; medians are printed with their ratio. ``--large``
repeats the lengths up to so many samples in a process of its own, and plans single blocks of it.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from loader.options import EpochOptions, PlanOptions
from loader.plan import plan_block
from loader.pool import Corpus, EpochPlanner
from loader.simulate import corpus_of_lengths
from shardgen.buckets import TokenBudget
from shardgen.lengths import Histogram, read_lengths_file
from shardgen.optimize import optimize

SHARD_SAMPLES = 20_000


def best_boundaries(lengths: np.ndarray, token_budget: int) -> tuple[int, ...]:
    budget = TokenBudget(tokens=token_budget)
    return optimize(Histogram.from_lengths(lengths), num_buckets=6, budget=budget).boundaries


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def beside_peer(path: str, token_budget: int, rounds: int) -> None:
    import torch
    from transformers.trainer_pt_utils import get_length_grouped_indices

    torch.set_num_threads(1)
    lengths = read_lengths_file(path)
    boundaries = best_boundaries(lengths, token_budget)
    corpus = corpus_of_lengths(lengths, boundaries)
    options = PlanOptions(boundaries=boundaries, token_budget=token_budget, world_size=8)
    batch_size = max(1, round(token_budget / float(lengths.mean())))
    as_list = lengths.tolist()

    def ours(epoch: int) -> None:
        epoch_options = EpochOptions()
        planner = EpochPlanner(corpus, epoch_options, epoch)
        for block in range(planner.num_blocks):
            plan_block(corpus, planner.pool(block), options, epoch_options, epoch, resumed=block > 0)

    def peer(epoch: int) -> None:
        generator = torch.Generator().manual_seed(epoch)
        get_length_grouped_indices(as_list, batch_size * 8, generator=generator)

    times: dict[str, list[float]] = {"shardgen": [], "group_by_length": []}
    for epoch in range(rounds):
        times["shardgen"].append(timed(partial(ours, epoch)))
        times["group_by_length"].append(timed(partial(peer, epoch)))
    print(f"{len(lengths):,} samples, one epoch planned, one thread, medians of {rounds} turns")
    own = statistics.median(times["shardgen"])
    for name, values in times.items():
        median = statistics.median(values)
        print(f"  {name:16} {median:6.3f} s   {median / own:5.2f} x")


def large(path: str, token_budget: int, num_samples: int) -> None:
    """Time and memory of single blocks; prints what the planner adds to the interpreter's own memory."""
    source = np.sort(read_lengths_file(path)).astype(np.int32)
    boundaries = best_boundaries(source, token_budget)
    start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lengths = np.empty(num_samples, np.int32)
    chunk = 1_000_000
    for begin in range(0, num_samples, chunk):  # sorted, so in buckets; then shuffled inside each
        stop = min(begin + chunk, num_samples)
        lengths[begin:stop] = source[np.arange(begin, stop) * len(source) // num_samples]
    edges = np.searchsorted(lengths, boundaries, side="right")
    generator = np.random.default_rng(0)
    sizes = []
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        generator.shuffle(lengths[first:last])
        count = last - first
        full, rest = divmod(count, SHARD_SAMPLES)
        sizes.append(np.array([SHARD_SAMPLES] * full + [rest] * (rest > 0), np.int64))
    corpus = Corpus(lengths=lengths, shard_sizes=tuple(sizes))
    options = PlanOptions(boundaries=boundaries, token_budget=token_budget, world_size=8)
    epoch_options = EpochOptions()
    planner = EpochPlanner(corpus, epoch_options, 0)
    first = timed(lambda: planner.pool(0))

    def plan(block: int) -> None:
        plan_block(corpus, planner.pool(block), options, epoch_options, 0, resumed=True)

    some = np.linspace(0, planner.num_blocks - 1, 9).astype(int).tolist()
    blocks = [timed(partial(plan, block)) for block in some]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start
    print(f"{num_samples:,} samples in {planner.num_blocks} blocks")
    print(f"  dealing shards to blocks, once per epoch {first:.2f} s")
    print(
        f"  a block, median of {len(blocks)}: {statistics.median(blocks):.3f} s, slowest {max(blocks):.3f} s"
    )
    print(f"  peak memory, lengths included: {peak / 1e6:.2f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lengths", help="lengths as .npy or .npz")
    parser.add_argument("--token-budget", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", type=int, metavar="SAMPLES", help="also a set of so many samples")
    parser.add_argument("--large-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.large_only:
        large(args.lengths, args.token_budget, args.large)
        return
    beside_peer(args.lengths, args.token_budget, args.rounds)
    if args.large:
        # A process of its own, so that its peak memory is the planner's.
        call = [sys.executable, __file__, args.lengths, "--large", str(args.large), "--large-only"]
        subprocess.run([*call, "--token-budget", str(args.token_budget)], check=True)


if __name__ == "__main__":
    main()
