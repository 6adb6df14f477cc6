"""Building shards: ours beside a well-fed loop over upstream's MDSWriter, on the same rows in the same run.

    python scripts/bench_build.py [INPUT.parquet ...] [--lengths FILE.npz] [--samples 200000]
                                  [--workers 1,2] [--repeats 3] [--work DIR] [--json]

Without INPUT, Parquet files with ``--samples`` rows are made: lengths drawn from ``--lengths`` (``.npy`` or
``.npz``), else log-normal ones (mean about 2,000), tokens with a vocabulary of 128,000. Every run is a
process of its own, in turn, and the medians are compared. Both sides write the same shards, hashed with
xxh64; ours also evaluates the boundaries, checks every row, writes ``samples.parquet`` and forces everything
to disk, within the time.

The stock loop is well fed: row groups decoded by Arrow, lengths from their column, numpy slices handed to one
writer per bucket. ``decode`` reads the tokens and does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS_PER_GROUP = 1000
NUM_FILES = 4
VOCABULARY = 128_000


def make_input(folder: Path, lengths: np.ndarray) -> list[str]:
    """Write tokens of these lengths to a few Parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    paths = []
    for number, part in enumerate(np.array_split(lengths, NUM_FILES)):
        path = folder / f"part-{number}.parquet"
        schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("seq_len", pa.int32())])
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for first in range(0, len(part), ROWS_PER_GROUP):
                group = part[first : first + ROWS_PER_GROUP].astype(np.int32)
                offsets = np.concatenate([[0], np.cumsum(group)]).astype(np.int32)
                # log-uniform ids: frequent tokens are frequent, as in text
                ids = np.exp(rng.random(int(offsets[-1]), np.float32) * np.log(VOCABULARY)).astype(np.int32)
                writer.write_table(pa.table([pa.ListArray.from_arrays(offsets, ids), group], schema=schema))
        paths.append(str(path))
    return paths


def run_stock(paths: list[str], out: str, boundaries: list[int], encoding: str) -> float:
    """A well-fed loop over ``MDSWriter``; seconds."""
    import pyarrow.parquet as pq
    from streaming import MDSWriter

    dtype = encoding.removeprefix("ndarray:")
    began = time.perf_counter()
    writers = [
        MDSWriter(
            columns={"input_ids": encoding}, out=f"{out}/bucket-{k:02}", hashes=["xxh64"], size_limit="64mb"
        )
        for k in range(len(boundaries) - 1)
    ]
    for path in paths:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            tokens = file.read_row_group(group, columns=["input_ids"])["input_ids"].combine_chunks()
            values = tokens.values.to_numpy().astype(dtype, copy=False)
            offsets = tokens.offsets.to_numpy()
            buckets = np.searchsorted(boundaries, np.diff(offsets)) - 1
            for bucket, start, end in zip(
                buckets.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True
            ):
                writers[bucket].write({"input_ids": values[start:end]})
    for writer in writers:
        writer.finish()
    return time.perf_counter() - began


def run_decode(paths: list[str]) -> float:
    """Arrow decoding the tokens alone; seconds."""
    import pyarrow.parquet as pq

    began = time.perf_counter()
    for path in paths:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=["input_ids"])
    return time.perf_counter() - began


def run_ours(paths: list[str], out: str, boundaries: list[int], workers: int) -> float:
    """``shardgen build`` with the same boundaries; seconds."""
    from shardgen.build import build
    from shardgen.options import BuildOptions

    options = BuildOptions(boundaries=tuple(boundaries[1:]), workers=workers)
    return build(paths, out, options).seconds


def family(leader: int) -> list[int]:
    """Processes of the session that ``leader`` leads."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader:
                found.append(int(entry))
    return found


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process, shared pages in proportion."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    sizes = dict(line.split(":", 1) for line in lines[1:])
    return int(sizes.get("Pss_Anon", "0 kB").split()[0]) << 10


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Watch(threading.Thread):
    """Highest anonymous memory, summed over a session's processes, and their processor time."""

    def __init__(self, leader: int) -> None:
        super().__init__(daemon=True)
        self.leader, self.peak, self.stop = leader, 0, threading.Event()
        self.cpu: dict[int, float] = {}

    def run(self) -> None:
        while not self.stop.wait(0.05):
            members = family(self.leader)
            self.peak = max(self.peak, sum(map(anonymous_bytes, members)))
            for pid in members:
                self.cpu[pid] = max(self.cpu.get(pid, 0.0), cpu_seconds(pid))


def measure(what: str, paths: list[str], work: Path, extra: dict[str, object]) -> dict[str, float]:
    """One run in a process of its own."""
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    if what == "stock":
        out.mkdir()
    task = json.dumps({"what": what, "paths": paths, "out": str(out), **extra})
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, __file__, "--one", task], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    watch = Watch(process.pid)
    watch.start()
    stdout, _ = process.communicate()
    whole = time.perf_counter() - began
    watch.stop.set()
    watch.join()
    if process.returncode:
        raise SystemExit(f"{what} failed")
    shutil.rmtree(out, ignore_errors=True)
    seconds, before = map(float, stdout.splitlines()[-1].split())
    return {
        "seconds": seconds,
        "process_seconds": whole,
        "cpu_seconds": sum(watch.cpu.values()) - before,
        "anonymous_bytes": watch.peak,
    }


def run_one(task: dict[str, Any]) -> tuple[float, float]:
    """Body of a measured process: seconds, and the processor time that its imports took before."""
    what, paths = task["what"], task["paths"]
    if what == "stock":
        import streaming  # noqa: F401
    else:
        import shardgen.finish
        import shardgen.read_parquet  # noqa: F401
    before = time.process_time()
    if what == "decode":
        return run_decode(paths), before
    if what == "stock":
        return run_stock(paths, task["out"], task["boundaries"], task["encoding"]), before
    return run_ours(paths, task["out"], task["boundaries"], int(what.split()[1])), before


def draw_lengths(source: str | None, count: int) -> np.ndarray:
    """``count`` lengths from a file, or log-normal ones."""
    rng = np.random.default_rng(1)
    if source is None:
        return np.clip(rng.lognormal(7.35, 0.7, count), 8, 8192).astype(np.int64)
    from shardgen.lengths import read_lengths_file

    known = read_lengths_file(source)
    return rng.choice(known, count, replace=count > len(known))


def plan(paths: list[str]) -> tuple[list[int], str, int, int]:
    """Boundaries for both sides, the encoding of the tokens, samples and tokens."""
    from shardgen.options import BuildOptions
    from shardgen.prepare import find_boundaries
    from shardgen.schema import resolve_column
    from shardgen.sources import open_sources, read_lengths

    lengths = read_lengths(paths).lengths
    boundaries = find_boundaries(
        lengths, BuildOptions(token_budget=max(49152, int(lengths.max())))
    ).boundaries
    encoding = resolve_column(open_sources(paths), "input_ids", token_dtype="auto").encoding
    return list(boundaries), encoding, len(lengths), int(lengths.sum())


def bench(paths: list[str], work: Path, workers: list[int], repeats: int) -> dict[str, object]:
    """Medians and ratios over ``repeats`` rounds of all contestants."""
    boundaries, encoding, num_samples, num_tokens = plan(paths)
    contestants = ["decode", "stock", *(f"ours {n}" for n in workers)]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for repeat in range(repeats):
        for name in contestants:
            runs[name].append(measure(name, paths, work, {"boundaries": boundaries, "encoding": encoding}))
            seconds = runs[name][-1]["seconds"]
            print(f"round {repeat + 1}: {name:8} {num_samples / seconds:10,.0f} samples/s", file=sys.stderr)
    median = {name: statistics.median(run["seconds"] for run in found) for name, found in runs.items()}
    return {
        "num_samples": num_samples,
        "num_tokens": num_tokens,
        "encoding": encoding,
        "boundaries": boundaries,
        "repeats": repeats,
        "contestants": {
            name: {
                "samples_per_second": num_samples / median[name],
                "tokens_per_second": num_tokens / median[name],
                "seconds": median[name],
                "process_seconds": statistics.median(run["process_seconds"] for run in runs[name]),
                "cpu_seconds": statistics.median(run["cpu_seconds"] for run in runs[name]),
                "anonymous_bytes": max(run["anonymous_bytes"] for run in runs[name]),
                "times_stock": median["stock"] / median[name],
            }
            for name in contestants
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="*", help="Parquet files with input_ids and seq_len")
    parser.add_argument("--lengths", help=".npy or .npz file to draw lengths from")
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", help="directory for the files (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(*run_one(json.loads(arguments.one)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        work = Path(folder)
        paths = arguments.inputs
        if not paths:
            print(f"making {arguments.samples:,} samples", file=sys.stderr)
            paths = make_input(work, draw_lengths(arguments.lengths, arguments.samples))
        result = bench(
            [str(Path(p).resolve()) for p in paths],
            work,
            [int(n) for n in arguments.workers.split(",")],
            arguments.repeats,
        )
    print(
        f"{result['num_samples']:,} samples, {result['num_tokens']:,} tokens, medians of {result['repeats']}"
    )
    print(
        f"{'':10}{'samples/s':>12}{'Mtokens/s':>12}{'x stock':>9}{'process s':>11}{'CPU s':>8}"
        f"{'anonymous MB':>14}"
    )
    for name, found in result["contestants"].items():
        print(
            f"{name:10}{found['samples_per_second']:12,.0f}{found['tokens_per_second'] / 1e6:12.1f}"
            f"{found['times_stock']:9.2f}{found['process_seconds']:11.1f}{found['cpu_seconds']:8.1f}"
            f"{found['anonymous_bytes'] / 1e6:14.0f}"
        )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
