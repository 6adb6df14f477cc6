"""Train the same model on the same data under four batching strategies, and compare real tokens per second.

    torchrun --nproc-per-node 2 scripts/throughput.py SHARDS OUT [--token-budget 4096] \
        [--cost-model cost.json --cost-budget 5000] [--part 0.5]

On GPUs with nccl where there are any, else on CPU ranks with gloo. Each strategy trains a model of its own
from the same weights; the plans are those of ``shardgen simulate``, and all of them are read, collated and
trained on by the same code. Where attention makes long rows dear, calibrate first and give a cost budget
beside the token budget: it holds for all strategies. Few people have a quiet machine, so the strategies take
turns, a slice of their epoch in each round.

Prints real tokens/s as ratios to sorted batches, predicted beside measured: the prediction sums, over the
steps of an epoch, the costliest rank's cost under a model fitted to steps that were measured in the same
rounds. Writes ``OUT/throughput.json`` and the loss curves ``OUT/loss.png``.
"""

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from calibrate import grid, timed
from demo_train import CausalLM
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loader import Batch, BucketedDataset
from loader.block import BlockPlan
from loader.prefetch import Prefetcher
from loader.reading import finish, order_of
from loader.simulate import STRATEGIES, plan_epoch
from loader.walk import Task
from shardgen.buckets import Buckets
from shardgen.cost import CostModel, FittedCost

PUBLISHED = (770, 1216, 1728, 2432, 3296, 8192)  # six buckets, as published for samples of up to 8,192 tokens
BASE = "sorted-static"


def published_boundaries(longest: int) -> tuple[int, ...]:
    """The published boundaries, scaled to this longest sample."""
    return Buckets.from_upper_bounds([b * longest // PUBLISHED[-1] for b in PUBLISHED], longest).boundaries


@dataclass
class Lane:
    """One strategy: its plan, its model, and what has been measured."""

    name: str
    plans: list[BlockPlan]
    batches: Iterator[Batch]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    num_steps: int
    taken: int = 0
    seconds: list[float] = field(default_factory=list)  # of each round
    tokens: list[int] = field(default_factory=list)  # real ones of each round, over all ranks
    losses: list[float] = field(default_factory=list)  # of each step, mean over its loss tokens
    step_tokens: list[int] = field(default_factory=list)
    wait: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds)


def read(dataset: BucketedDataset, plans: list[BlockPlan], rank: int) -> Iterator[Batch]:
    """This rank's batches of a plan, by the loader's own reader."""
    corpus, reader = dataset.plans.corpus, dataset.batch_reader
    for plan in plans:
        run = SimpleNamespace(plan=plan)
        for step in range(plan.num_steps):
            task = Task(planned=plan.batch(step, 0, rank), epoch=0, run=run, step=step)
            raw = reader.read(order_of(task, corpus))
            yield finish(raw, task, corpus, reader.collator, pin_memory=torch.cuda.is_available())[0]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor, labels: torch.Tensor, share: float
) -> torch.Tensor:
    """Forward, backward (with the all-reduce of gradients) and optimizer; the loss of this rank."""
    loss = model(ids, labels) / share
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def run_slice(lane: Lane, num_steps: int, device: torch.device) -> None:
    """Train some steps and note their time, tokens and losses."""
    losses, tokens = [], 0
    wait = wait_for(device)
    for _ in range(num_steps):
        asked = time.perf_counter()
        batch = next(lane.batches)
        lane.wait += time.perf_counter() - asked
        meta, batch = batch.meta, batch.to(device, non_blocking=True)
        losses.append(
            train_step(lane.model, lane.optimizer, batch["input_ids"], batch["labels"], meta.loss_denominator)
        )
        tokens += meta.step_num_tokens
        lane.step_tokens.append(meta.step_num_tokens)
    lane.seconds.append(wait_for(device) - wait)
    lane.tokens.append(tokens)
    lane.taken += num_steps
    everyone = torch.stack(losses)
    dist.all_reduce(everyone)
    lane.losses += (everyone / dist.get_world_size()).tolist()


def wait_for(device: torch.device) -> float:
    """The time when all ranks have done what they were told."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return time.perf_counter()


def predicted_seconds(lane: Lane, fitted: FittedCost) -> float:
    """Of all steps of the epoch: in each, everybody waits for the costliest rank."""
    total = 0.0
    for plan in lane.plans:
        seconds = fitted.seconds(plan.batch_num_rows, plan.batch_padded_length)
        total += float(seconds.reshape(-1, plan.world_size).max(axis=1).sum())
    return total


def smoothed(lane: Lane, num_points: int = 60) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens so far, seconds so far and token-weighted mean loss over slices of the tokens seen."""
    weight = np.array(lane.step_tokens, float)
    tokens = np.cumsum(weight)
    seconds = tokens / lane.tokens_per_s
    piece = np.minimum((tokens / tokens[-1] * num_points).astype(int), num_points - 1)
    mass = np.bincount(piece, weight, num_points)
    seen = mass > 0
    means = [
        np.bincount(piece, weight * v, num_points)[seen] / mass[seen] for v in (tokens, seconds, lane.losses)
    ]
    return means[0], means[1], means[2]


def draw(lanes: list[Lane], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for number, lane in enumerate(lanes):
        tokens, seconds, losses = smoothed(lane)
        raw = np.cumsum(lane.step_tokens)
        axes[0].plot(raw / 1e6, lane.losses, color=f"C{number}", alpha=0.2, linewidth=0.6)
        axes[0].plot(tokens / 1e6, losses, color=f"C{number}", label=lane.name)
        axes[1].plot(seconds, losses, color=f"C{number}", label=lane.name)
    axes[0].set(xlabel="real tokens (millions)", ylabel="training loss", title="thin: each step; thick: mean")
    axes[1].set(xlabel="seconds", title="the same against time")
    axes[1].legend()
    figure.savefig(path, dpi=130)


def report(lanes: list[Lane], fitted: FittedCost, dataset: BucketedDataset) -> dict[str, dict[str, float]]:
    """Measured and predicted figures of each strategy."""
    base = next(lane for lane in lanes if lane.name == BASE)
    num_tokens = int(dataset.plans.corpus.lengths.sum())
    figures = {}
    for lane in lanes:
        rounds = np.array(lane.tokens) / np.array(lane.seconds)
        base_rounds = np.array(base.tokens) / np.array(base.seconds)
        figures[lane.name] = {
            "num_tokens": sum(lane.tokens),
            "num_steps": lane.taken,
            "seconds": sum(lane.seconds),
            "tokens_per_s": lane.tokens_per_s,
            "ratio": lane.tokens_per_s / base.tokens_per_s,
            "median_ratio": float(np.median(rounds / base_rounds)),
            "predicted_tokens_per_s": num_tokens / predicted_seconds(lane, fitted),
            "predicted_ratio": predicted_seconds(base, fitted) / predicted_seconds(lane, fitted),
            "reading": lane.wait / sum(lane.seconds),
            "last_loss": float(smoothed(lane)[2][-6:].mean()),
        }
    return figures


def show(figures: dict[str, dict[str, float]]) -> None:
    print(
        f"{'strategy':15} {'real tokens/s':>14} {'to sorted':>10} {'by round':>9} {'predicted':>10} reading"
    )
    for name, f in figures.items():
        print(
            f"{name:15} {f['tokens_per_s']:14,.0f} {f['ratio']:10.3f} {f['median_ratio']:9.3f} "
            f"{f['predicted_ratio']:10.3f} {f['reading']:7.1%}"
        )
    ours = figures.get("loader")
    for name in (n for n in figures if ours and n != "loader"):
        other = figures[name]
        print(
            f"loader / {name}: {ours['ratio'] / other['ratio']:.2f} measured, "
            f"{ours['predicted_ratio'] / other['predicted_ratio']:.2f} predicted"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare batching strategies by training with each.")
    parser.add_argument("shards")
    parser.add_argument("out", type=Path)
    parser.add_argument("--token-budget", type=int)
    parser.add_argument("--cost-model", type=Path, help="written by calibrate.py")
    parser.add_argument("--cost-budget", type=int, help="token-equivalents of a batch, for all strategies")
    parser.add_argument("--part", type=float, default=1.0, help="part of each strategy's epoch to train")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--bucket-boundaries", help="of bucket-shuffle; default: the published ones, scaled")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    names = options.strategies.split(",")
    if not set(names) <= set(STRATEGIES) or BASE not in names:
        parser.error(f"--strategies {options.strategies}: choose from {', '.join(STRATEGIES)}, with {BASE}")
    if not 0 < options.part <= 1 or options.rounds < 1:
        parser.error("--part must be within 0..1, and --rounds at least 1")

    use_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_gpu else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)

    dataset = BucketedDataset(
        local=options.shards,
        token_budget=options.token_budget,
        cost_model=None if options.cost_model is None else CostModel.load(options.cost_model),
        cost_budget=options.cost_budget,
        seed=17,
    )
    corpus, plan_options = dataset.plans.corpus, dataset.plan_options
    longest = int(corpus.lengths.max())
    boundaries = published_boundaries(longest)
    if options.bucket_boundaries:
        given = [int(b) for b in options.bucket_boundaries.split(",")]
        boundaries = Buckets.from_upper_bounds(given, longest).boundaries
    torch.manual_seed(0)
    start = CausalLM(options.vocabulary, longest, options.width, options.layers).to(device)

    def trainee() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(copy.deepcopy(start), device_ids=[device.index] if use_gpu else None)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    lanes = []
    for name in names:
        bucketed = replace(plan_options, boundaries=boundaries) if name == "bucket-shuffle" else plan_options
        plans = plan_epoch(corpus, bucketed, dataset.epoch_options, name, 0)
        batches: Iterator[Batch] = read(dataset, plans, rank)
        if use_gpu:
            batches = iter(Prefetcher(batches, 2, 60))
        steps = int(sum(plan.num_steps for plan in plans) * options.part)
        if steps < options.rounds:
            parser.error(f"{name} has {steps} steps in this part: use at most --rounds {steps}")
        lanes.append(Lane(name, plans, batches, *trainee(), steps))

    # The steps that are fitted: the same step on random tokens, every rank with the same shape.
    model, optimizer = trainee()

    def step(rows: int, length: int) -> None:
        tokens = torch.randint(options.vocabulary, (rows, length), device=device)
        train_step(model, optimizer, tokens, tokens, rows * length)
        if use_gpu:
            torch.cuda.synchronize()

    shapes = grid(plan_options.token_budget, longest)
    for shape in shapes:
        step(*shape)
    seconds = np.zeros((options.rounds, len(shapes)))
    turn = random.Random(0)
    for r in range(options.rounds):
        for i in turn.sample(range(len(shapes)), len(shapes)):
            seconds[r, i] = timed(step, shapes[i])
        for lane in turn.sample(lanes, len(lanes)):
            run_slice(lane, lane.num_steps * (r + 1) // options.rounds - lane.taken, device)
        if rank == 0:
            rates = ", ".join(f"{lane.name} {lane.tokens[-1] / lane.seconds[-1]:,.0f}" for lane in lanes)
            print(f"round {r + 1}/{options.rounds}, real tokens/s: {rates}", flush=True)
    if rank == 0:
        fitted = CostModel.fit(*np.array(shapes).T, np.median(seconds, axis=0))
        figures = report(lanes, fitted, dataset)
        show(figures)
        options.out.mkdir(parents=True, exist_ok=True)
        record = {
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if use_gpu else "cpu",
            "token_budget": plan_options.token_budget,
            "cost_budget": plan_options.cost_budget,
            "num_samples": corpus.num_samples,
            "part": options.part,
            "cost_model": fitted.model.to_json(),
            "strategies": figures,
        }
        (options.out / "throughput.json").write_text(json.dumps(record, indent=1) + "\n")
        draw(lanes, options.out / "loss.png")
        print(f"wrote {options.out / 'throughput.json'} and {options.out / 'loss.png'}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
