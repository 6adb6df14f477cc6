"""Train one epoch with kills on the way, resume each time, and count what was delivered.

    python scripts/demo_restart.py SHARDS RUN [--ranks 2,3,2] [options of demo_train.py]

trains on 2 ranks, kills every process in the middle of the epoch, goes on with 3 ranks, kills those, and ends
the epoch with 2. A step counts once it is in a checkpoint: what a killed run did after its last checkpoint is
lost with its weights, and the next run delivers those samples again. So the epoch is the finished steps of
the killed runs plus all steps of the last one, and every sample of the dataset must be there exactly once.
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


def start(shards: Path, run: Path, ranks: int, options: list[str]) -> "subprocess.Popen[bytes]":
    # The ranks share the machine's cores; more threads than cores only slow each other down.
    threads = max(1, (os.cpu_count() or 1) // ranks)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen([*launcher, str(TRAIN), str(shards), str(run), *options], env=environment)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file; a line that the kill cut short was not finished, so it is left out."""
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def wait_for_share_of_epoch(
    run: Path, trainer: "subprocess.Popen[bytes]", start_step: int, share: float
) -> int:
    """Wait until that share of the epoch is trained and a checkpoint is some steps old; return the step."""
    losses = run / "losses.jsonl"
    while True:
        if trainer.poll() is not None:
            sys.exit(f"error: the training ended by itself, with exit code {trainer.returncode}")
        done = list(json_lines(losses)) if losses.exists() else []
        if done and start_step < done[-1]["saved_step"] < done[-1]["step"] >= share * done[-1]["num_steps"]:
            return done[-1]["step"]
        time.sleep(POLL_SECONDS)


def kill(run: Path, trainer: "subprocess.Popen[bytes]") -> None:
    """kill -9 the launcher and every rank: no handler, no clean-up, as when a machine goes away."""
    trainer.kill()
    for file in run.glob("pid-*"):
        os.kill(int(file.read_text()), signal.SIGKILL)
        file.unlink()
    trainer.wait()


def delivered(run: Path, start_step: int, end_step: float) -> Counter[int]:
    """Count the sample ids that the run begun at `start_step` trained on before step `end_step`."""
    counts: Counter[int] = Counter()
    for file in run.glob(f"delivered-{start_step}-*.jsonl"):
        for record in json_lines(file):
            if record["step"] < end_step:
                counts.update(record["sample_ids"])
    return counts


def mean_loss(records: list[dict[str, Any]]) -> float:
    return sum(record["loss"] for record in records) / len(records)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, kill, resume, and count.")
    parser.add_argument("shards", type=Path)
    parser.add_argument("run", type=Path, help="a new directory for checkpoints and logs")
    parser.add_argument("--ranks", default="2,3,2", help="of each start; between two starts lies a kill")
    arguments, options = parser.parse_known_args()
    shards, run, worlds = arguments.shards, arguments.run, [int(n) for n in arguments.ranks.split(",")]
    run.mkdir(parents=True)

    starts = [0]
    for number, ranks in enumerate(worlds, 1):
        trainer = start(shards, run, ranks, options)
        if number == len(worlds):
            break
        step = wait_for_share_of_epoch(run, trainer, starts[-1], number / len(worlds))
        kill(run, trainer)
        import torch  # late, so that the first ranks need not wait for it

        starts.append(torch.load(run / "checkpoint.pt")["step"])
        print(f"-- kill -9 after step {step}; the last checkpoint holds {starts[-1]} steps", flush=True)
    if trainer.wait() != 0:
        sys.exit(f"error: the resumed training failed with exit code {trainer.returncode}")

    counts: Counter[int] = Counter()
    for begin, end in zip(starts, [*starts[1:], float("inf")], strict=True):
        counts += delivered(run, begin, end)
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
