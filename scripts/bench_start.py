"""What a process pays for the loader: seconds until the first batch, memory over epochs, the cost of metrics.

    python scripts/bench_start.py [--samples 1000000] [--epochs 5] [--dir DIR] [--json]

Makes and builds a corpus of short samples. The clock of the first batch starts before the dataset is
constructed and after the imports. Memory is private (anonymous) memory after each epoch: of this process, and
of each worker process at its last batch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from loader import BucketedDataLoader, BucketedDataset
from loader.metrics import Meter

ROOT = Path(__file__).resolve().parent.parent


def build(folder: Path, samples: int) -> None:
    """A set of so many samples of 16 to 128 tokens."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(16, 129, samples))])
    tokens = rng.integers(0, 1 << 16, int(offsets[-1]), dtype=np.uint16)
    column = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    pq.write_table(pa.table({"input_ids": column}), folder / "corpus.parquet", row_group_size=65_536)
    command = [sys.executable, "-m", "shardgen", "build", str(folder / "corpus.parquet")]
    subprocess.run([*command, "--out", str(folder / "set")], cwd=ROOT, check=True)


def anonymous_mb(process: int | str = "self") -> float:
    """Private memory of a process in MB; mapped shards belong to the page cache and do not count."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no RssAnon in /proc: this needs Linux")


def children() -> list[int]:
    """Process ids of this process's children."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(child) for child in found.split()]


def first_batch(built: Path) -> float:
    """Seconds from construction to the first batch."""
    began = time.perf_counter()
    with BucketedDataLoader(BucketedDataset(local=str(built))) as loader:
        next(iter(loader))
        return time.perf_counter() - began


def memory(built: Path, epochs: int, num_workers: int) -> list[list[float]]:
    """MB of this process, and of each worker, after each epoch."""
    found = []
    with BucketedDataLoader(
        BucketedDataset(local=str(built)), num_workers=num_workers, persistent_workers=num_workers > 0
    ) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass
            found.append([anonymous_mb(), *(anonymous_mb(child) for child in children())][: num_workers + 1])
    return found


def share_of_metrics(built: Path) -> float:
    """Time of counting a batch, and of asking for the figures after every hundredth, per time of a batch."""
    with BucketedDataLoader(BucketedDataset(local=str(built)), prefetch=0) as loader:
        began, batches = time.perf_counter(), 0
        for batch in loader:
            batches += 1
            meta = batch.meta
        per_batch = (time.perf_counter() - began) / batches
        meter, repeats = Meter(), 100_000
        began = time.perf_counter()
        for number in range(repeats):
            meter.note(meta, 1, 1, 0.0)
            if number % 100 == 0:
                meter.values()
        return (time.perf_counter() - began) / repeats / per_batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--dir", help="keep the files here and use them again (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    folder = Path(arguments.dir or tempfile.mkdtemp(prefix="bench-start-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        built = folder / "set"
        if not built.exists():
            build(folder, arguments.samples)
        found: dict[str, Any] = {"first_batch_seconds": [first_batch(built) for _ in range(3)]}
        seconds = ", ".join(f"{s:.2f}" for s in found["first_batch_seconds"])
        print(f"first batch after construction: {seconds} s (target 1)", flush=True)
        for num_workers in (0, 2):
            rows = found[f"memory_mb_{num_workers}_workers"] = memory(built, arguments.epochs, num_workers)
            text = "; ".join(" + ".join(f"{mb:.0f}" for mb in row) for row in rows)
            print(f"private MB after each epoch, {num_workers} workers: {text}", flush=True)
        found["share_of_metrics"] = share_of_metrics(built)
        print(f"counting for metrics(): {found['share_of_metrics']:.2%} of the time of a batch (target 1%)")
        if arguments.json:
            print(json.dumps(found))
    finally:
        if not arguments.dir:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
