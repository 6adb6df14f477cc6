"""Samples per second of the loader and of its peers: same shards or samples, same padded batches, one run.

    python scripts/bench_loader.py [--samples 40000] [--lengths lengths.npz] [--rounds 5] [--dir DIR] [--json]

Makes a corpus, builds it with `python -m shardgen build`, writes the same samples for every peer, proves that
all of them give the same batches, then reads it in interleaved rounds: in this process, with one and with two
worker processes. Every turn has a process of its own, so no reader's threads or caches disturb the next one.
Figures are medians; the clock starts with a reader's first batch, so imports, planning and the start of
processes are not in them. Peers come with `pip install '.[bench]'`; a missing one is an error.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from bench_readers import FlatMap, HuggingFaceArrow, HuggingFaceNumpy, LitData, Reader, Stock, StockById

from loader import BucketedDataLoader, BucketedDataset
from shardgen.lengths import read_lengths_file

ROOT = Path(__file__).resolve().parent.parent
FORK = multiprocessing.get_context("fork")
OURS, ON_DEMAND = "loader", "loader, prefetch=0"
PEERS = ("HF datasets (arrow)", "HF datasets (numpy)", "LitData")
# (what, reader, compared with the best of, number of workers, least ratio)
TARGETS = [
    ("half the flat memory map", (FlatMap.name,), 0, 0.5),
    ("above HF datasets and LitData", PEERS, 0, 1.0),
    ("20x stock", (Stock.name,), 0, 20.0),
    ("3x the best peer, 1 worker", PEERS, 1, 3.0),
    ("2.5x the best peer, 2 workers", PEERS, 2, 2.5),
]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def draw_lengths(path: str | None, count: int) -> np.ndarray[Any, Any]:
    """`count` lengths from a file, or log-normal ones of 2,037 tokens on average."""
    rng = np.random.default_rng(0)
    if path is not None:
        found = read_lengths_file(path)
        return rng.permutation(found)[:count].astype(np.int64)
    return np.clip(rng.lognormal(7.45, 0.59, count), 16, 8192).astype(np.int64)


def build(folder: Path, lengths: np.ndarray[Any, Any]) -> None:
    """Parquet with random tokens, and the set that shardgen builds from it."""
    rng = np.random.default_rng(1)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = rng.integers(0, 1 << 16, int(offsets[-1]), dtype=np.uint16)
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    pq.write_table(pa.table({"input_ids": column}), folder / "corpus.parquet", row_group_size=4096)
    command = [sys.executable, "-m", "shardgen", "build", str(folder / "corpus.parquet")]
    subprocess.run([*command, "--out", str(folder / "set")], cwd=ROOT, check=True)


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a forked process. This process stays without threads, as forking asks."""
    receiver, sender = FORK.Pipe(duplex=False)

    def child() -> None:
        try:
            sender.send((function(*arguments), None))
        except BaseException as error:
            sender.send((None, f"{type(error).__name__}: {error}"))
            raise

    process = FORK.Process(target=child)
    process.start()
    sender.close()
    try:
        found, error = receiver.recv()
    except EOFError:
        found, error = None, "its process died"
    process.join()
    if error:
        raise SystemExit(f"error: {error}")
    return found


def batches_of(built: Path) -> list[list[int]]:
    """Sample ids of every batch of epoch 0."""
    return [batch.meta.sample_ids.tolist() for batch in ours(built, 0)]


def readers_of(folder: Path) -> list[Reader]:
    return [
        Stock(folder / "set"),
        StockById(folder / "set"),
        *(kind(folder / kind.__name__) for kind in (FlatMap, HuggingFaceArrow, LitData)),
        HuggingFaceNumpy(folder / HuggingFaceArrow.__name__),
    ]


def write_peers(folder: Path, ids: list[list[int]]) -> None:
    """The same samples for every peer, as stock StreamingDataset reads them."""
    opened = StockById(folder / "set").open()
    samples = [np.array(opened[i]["input_ids"]) for i in range(len(opened))]
    for kind in (FlatMap, HuggingFaceArrow, LitData):
        path = folder / kind.__name__
        if kind is LitData:
            shutil.rmtree(path, ignore_errors=True)  # in the order of this plan
        if not path.exists():
            say(f"writing {kind.name}")
            kind.write(path, [samples[i] for batch in ids for i in batch] if kind is LitData else samples)


def ours(built: Path, num_workers: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Epoch 0, from a loader that ends with the iterator."""
    dataset = BucketedDataset(local=str(built))
    with BucketedDataLoader(dataset, num_workers=num_workers, **options) as loader:
        yield from loader


def check_equal(folder: Path, ids: list[list[int]]) -> None:
    """All readers that follow our order give our tensors, bit for bit."""
    for reader in readers_of(folder):
        if isinstance(reader, Stock):
            continue
        pairs = zip(ours(folder / "set", 0), reader.batches(ids[:40], 0), strict=False)
        for number, (mine, theirs) in enumerate(pairs):
            for name, tensor in theirs.items():
                if not torch.equal(mine[name], tensor):
                    raise SystemExit(f"batch {number}: {name} of {reader.name} is not the loader's")


def rate(batches: Iterator[dict[str, Any]], seconds: float) -> float:
    """Samples per second after the first batch, for a whole pass or so many seconds."""
    next(batches)
    samples, began = 0, time.perf_counter()
    for batch in batches:
        samples += len(batch["input_ids"])
        if time.perf_counter() - began > seconds:
            break
    return samples / (time.perf_counter() - began)


def turn(folder: Path, name: str, workers: int, ids: list[list[int]], seconds: float) -> float:
    """Rate of one reader."""
    if name in (OURS, ON_DEMAND):
        options = {"prefetch": 0} if name == ON_DEMAND else {}
        return rate(ours(folder / "set", workers, **options), seconds)
    (reader,) = (reader for reader in readers_of(folder) if reader.name == name)
    return rate(reader.batches(ids, workers), seconds)


def measure(
    folder: Path, workers: int, ids: list[list[int]], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Rates of every reader, round by round, so that a busy machine hits all of them alike."""
    names = [OURS, *(reader.name for reader in readers_of(folder))]
    # On demand is what the thread of the default has to beat; a stock dataset opens in no worker process.
    names = [*names, ON_DEMAND] if workers == 0 else [name for name in names if name != StockById.name]
    found: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for name in names:
            found[name].append(in_child(turn, folder, name, workers, ids, seconds))
        say(f"{workers} workers, round {number + 1} of {rounds} done")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--lengths", help=".npy or .npz with the lengths to draw from")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="most seconds of a reader's turn")
    parser.add_argument("--workers", default="0,1,2", help="numbers of worker processes")
    parser.add_argument("--dir", help="keep the files here and use them again (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    for module in ("datasets", "litdata", "streaming"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise SystemExit(f"error: {module} is missing ({error}): pip install '.[bench]'") from None
    folder = Path(arguments.dir or tempfile.mkdtemp(prefix="bench-loader-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run(arguments, folder)
    finally:
        if not arguments.dir:
            shutil.rmtree(folder, ignore_errors=True)


def run(arguments: argparse.Namespace, folder: Path) -> None:
    lengths = draw_lengths(arguments.lengths, arguments.samples)
    say(f"{len(lengths)} samples of {lengths.mean():.0f} tokens on average, {lengths.max()} at most")
    built = folder / "set"
    if not built.exists():
        build(folder, lengths)
    ids = in_child(batches_of, built)
    in_child(write_peers, folder, ids)
    in_child(check_equal, folder, ids)
    say(f"{len(ids)} batches are equal, whoever reads them")
    figures: dict[int, dict[str, float]] = {}
    spread: dict[int, dict[str, list[float]]] = {}
    for workers in map(int, arguments.workers.split(",")):
        spread[workers] = measure(folder, workers, ids, arguments.rounds, arguments.seconds)
        figures[workers] = {name: statistics.median(rates) for name, rates in spread[workers].items()}
    print(f"{'samples/s (lowest, median, highest); loader / reader':44}")
    for workers, medians in figures.items():
        print(f"\n{workers} worker processes" if workers else "in process")
        for name, median in sorted(medians.items(), key=lambda item: -item[1]):
            rates = spread[workers][name]
            low, high, ratio = min(rates), max(rates), medians[OURS] / median
            print(f"  {name:24}{low:10,.0f}{median:10,.0f}{high:10,.0f}{ratio:8.2f}x")
    print()
    for what, others, workers, least in TARGETS:
        if workers in figures:
            # Ratios of one round, so that both sides saw the same machine.
            best = [max(spread[workers][name][r] for name in others) for r in range(arguments.rounds)]
            ratio = statistics.median(
                mine / theirs for mine, theirs in zip(spread[workers][OURS], best, strict=True)
            )
            print(f"{what:34}{ratio:8.2f}x of {least:g}x: {'met' if ratio >= least else 'MISSED'}")
    if arguments.json:
        print(json.dumps({str(workers): medians for workers, medians in figures.items()}))


if __name__ == "__main__":
    main()
