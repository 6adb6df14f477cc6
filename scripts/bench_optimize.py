"""Measure the boundary search: figures of the best boundaries on a file of lengths, and what they took.

python scripts/bench_optimize.py lengths.npz --token-budget 49152 --buckets 6
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from shardgen.buckets import Buckets, TokenBudget
from shardgen.estimate import estimate_efficiency
from shardgen.lengths import Histogram, read_histogram_file
from shardgen.optimize import optimize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lengths", help=".npy or .npz")
    parser.add_argument("--token-budget", type=int, default=49152)
    parser.add_argument("--buckets", type=int, default=6)
    parser.add_argument("--boundaries", help="upper bounds to compare with, such as 770,1216,1728,2432,3296")
    args = parser.parse_args()

    histogram = read_histogram_file(args.lengths)
    budget = TokenBudget(tokens=args.token_budget)
    result = optimize(histogram, num_buckets=args.buckets, budget=budget)
    print(
        f"{histogram.num_samples} samples, {len(histogram.lengths)} distinct lengths, "
        f"grid step {result.grid_step}"
    )
    print(f"boundaries            {', '.join(map(str, result.boundaries[1:]))}")
    print(
        f"efficiency            {result.padding_efficiency:.4f}, "
        f"lookahead 32 {result.lookahead_padding_efficiency:.4f}"
    )
    print(f"shortest bucket       {result.buckets[0].padding_efficiency:.4f}")
    print(f"sorted packing        {result.lower_bound_efficiency:.4f}")
    for name, alternative in result.alternatives.items():
        print(f"{name:21s} {alternative.padding_efficiency:.4f}")
    if args.boundaries:
        given = Buckets.from_upper_bounds([int(b) for b in args.boundaries.split(",")], histogram.longest)
        print(f"given                 {estimate_efficiency(histogram, given, budget, 1):.4f}")
    print("curve                 " + ", ".join(f"{k}: {e:.3f}" for k, e in result.curve))
    print(f"search                {result.seconds:.2f} s")
    huge = Histogram(lengths=histogram.lengths, counts=histogram.counts * (10**9 // histogram.num_samples))
    print(f"search, 10^9 samples  {optimize(huge, num_buckets=args.buckets, budget=budget).seconds:.2f} s")
    for label, options in (
        ("static shapes", {"budget": TokenBudget(tokens=args.token_budget, padding="boundary")}),
        ("lookahead 32", {"budget": budget, "optimize_for_lookahead": 32}),
    ):
        other = optimize(histogram, num_buckets=args.buckets, **options)
        print(f"{label:21s} {other.seconds:.2f} s: {other.boundaries[1:]} {other.padding_efficiency:.4f}")
    began = time.perf_counter()
    command = [sys.executable, "-m", "shardgen", "optimize", args.lengths, "--json"]
    command += ["--token-budget", str(args.token_budget), "--buckets", str(args.buckets)]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).resolve().parent.parent)
    print(f"whole process         {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
