"""Train, kill every process in the middle of an epoch, resume, and count what was delivered.

    python scripts/demo_restart.py SHARDS RUN [--ranks 2]

A step counts once it is in a checkpoint: what the killed run did after its last checkpoint is lost with its
weights, and the resumed run delivers those samples again. So the epoch is the finished steps of the first run
plus all steps of the second one, and every sample of the dataset must be there exactly once.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardgen.manifest import Manifest

TRAIN = Path(__file__).with_name("demo_train.py")
POLL_SECONDS = 0.05


def start(shards: Path, run: Path, ranks: int) -> "subprocess.Popen[bytes]":
    # The ranks share the machine's cores; more threads than cores only slow each other down.
    threads = max(1, (os.cpu_count() or 1) // ranks)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, str(TRAIN), str(shards), str(run)], env={**os.environ, "OMP_NUM_THREADS": str(threads)}
    )


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file; a line that the kill cut short was not finished, so it is left out."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def wait_for_share_of_epoch(run: Path, trainer: "subprocess.Popen[bytes]", share: float) -> None:
    losses = run / "losses.jsonl"
    while True:
        if trainer.poll() is not None:
            sys.exit(f"error: the training ended by itself, with exit code {trainer.returncode}")
        done = list(json_lines(losses)) if losses.exists() else []
        if done and done[-1]["step"] >= share * done[-1]["num_steps"] and (run / "checkpoint.pt").exists():
            return
        time.sleep(POLL_SECONDS)


def kill(run: Path, trainer: "subprocess.Popen[bytes]") -> None:
    """kill -9 the launcher and every rank: no handler, no clean-up, as when a machine goes away."""
    trainer.kill()
    for pid in run.glob("pid-*"):
        os.kill(int(pid.read_text()), signal.SIGKILL)
    trainer.wait()


def delivered(run: Path, start_step: int, ranks: int, end_step: float) -> Counter[int]:
    """Count the sample ids that a run begun at `start_step` trained on before step `end_step`."""
    counts: Counter[int] = Counter()
    for rank in range(ranks):
        for record in json_lines(run / f"delivered-{start_step}-{rank}.jsonl"):
            if record["step"] < end_step:
                counts.update(record["sample_ids"])
    return counts


def mean_loss(records: list[dict[str, Any]]) -> float:
    return sum(record["loss"] for record in records) / len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, kill, resume, and count.")
    parser.add_argument("shards", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    shards, run, ranks = arguments.shards, arguments.run, arguments.ranks
    run.mkdir(parents=True)

    trainer = start(shards, run, ranks)
    wait_for_share_of_epoch(run, trainer, 0.4)
    kill(run, trainer)
    done = list(json_lines(run / "losses.jsonl"))[-1]["step"]
    import torch  # late: the ranks need the cores first

    resumed_at = torch.load(run / "checkpoint.pt")["step"]
    print(
        f"-- kill -9 in step {done + 1}; the last checkpoint holds {resumed_at} steps; starting again",
        flush=True,
    )

    trainer = start(shards, run, ranks)
    if trainer.wait() != 0:
        sys.exit(f"error: the resumed training failed with exit code {trainer.returncode}")

    counts = delivered(run, 0, ranks, resumed_at) + delivered(run, resumed_at, ranks, float("inf"))
    num_samples = Manifest.load(shards).num_samples
    missing = [i for i in range(num_samples) if counts[i] == 0]
    repeated = [i for i, count in counts.items() if count > 1]
    losses = list(json_lines(run / "losses.jsonl"))
    first, last = mean_loss(losses[:10]), mean_loss(losses[-10:])
    print(f"loss: {first:.3f} in the first 10 steps, {last:.3f} in the last 10")
    if missing or repeated or len(counts) != num_samples:
        sys.exit(
            f"error: {len(missing)} samples missing {missing[:10]}, {len(repeated)} repeated {repeated[:10]}"
        )
    print(f"restart: {num_samples:,} samples, each exactly once")


if __name__ == "__main__":
    main()
