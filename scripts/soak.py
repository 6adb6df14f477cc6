"""Start, kill and resume training processes at random, and count what was delivered.

    python scripts/soak.py [--kills 60] [--samples 6000] [--seed 0]

Each run has 1 to 4 ranks (gloo), a random number of workers, accumulation and token budget (down to the
longest sample), and resumes from the last checkpoint. A third of the kills are SIGKILL of the whole group,
workers included; the others hit one rank or one worker. A step counts when a checkpoint holds it: what a run
did after its last checkpoint is lost with its weights, and the next run delivers those samples again. At the
end every sample must have been delivered exactly once per epoch.
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 400
BLOCKS = 3
# A run that has not done a step for so long hangs.
STUCK_SECONDS = 120.0
COLLECTIVE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one start does.

    Attributes:
        number: Number of the run.
        world: Ranks.
        num_workers: Worker processes of each.
        accumulate: Micro-steps of a step.
        token_budget: Of a batch.
        hold: Steps before the end of the epoch at which all ranks wait for their kill, or ``None``.
    """

    number: int
    world: int
    num_workers: int
    accumulate: int
    token_budget: int
    hold: int | None


def build_dataset(folder: Path, num_samples: int, seed: int) -> Path:
    """A dataset of long-tailed lengths, in plain shards."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shardgen.build import build
    from shardgen.options import BuildOptions

    draw = np.random.default_rng(seed).beta(0.8, 3.0, num_samples)
    lengths = 1 + (draw * (LONGEST - 1)).astype(np.int64)
    lengths[0] = LONGEST
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    tokens = pa.array(np.arange(offsets[-1], dtype=np.int32) % 1000)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(pa.array(offsets), tokens)})
    pq.write_table(table, folder / "source.parquet")
    options = BuildOptions(token_budget=2048, num_buckets=4, shard_size=1 << 17)
    build([str(folder / "source.parquet")], str(folder / "out"), options)
    return folder / "out"


def train(
    rank: int, run: Run, out: str, folder: str, epochs: int, num_samples: int, report: Connection
) -> None:
    """What a rank does: deliver, write down what it got, meet the others, save."""
    import torch.distributed as dist

    from loader import BucketedDataLoader, BucketedDataset

    # Ranks that lose a companion end with a traceback; it is read only when that was not to be expected.
    stderr = os.open(f"{folder}/stderr-{run.number}-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, 2)
    faulthandler.dump_traceback_later(COLLECTIVE_SECONDS + 20, repeat=True)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(run.world))
    store = dist.FileStore(f"{folder}/store-{run.number}", run.world)
    # A companion may die before all have met; by default the others would wait for it for half an hour.
    limit = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.world, timeout=limit)
    dataset = BucketedDataset(
        remote=out,  # a cache is shared by the ranks, and survives them
        local=f"{folder}/cache",
        token_budget=run.token_budget,
        accumulate=run.accumulate,
        seed=3,
        block_samples=-(-num_samples // BLOCKS),
        lookahead=8,
    )
    # Named, because a child of a fork server would start another one for its workers.
    method = "fork" if run.num_workers else None
    loader = BucketedDataLoader(dataset, num_workers=run.num_workers, multiprocessing_context=method)
    checkpoint = Path(folder) / "checkpoint.json"
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text())["loader"])
    log = open(f"{folder}/log-{run.number}-{rank}.jsonl", "w", buffering=1)  # noqa: SIM115
    while (epoch := loader.epoch) < epochs:
        num_steps = loader.num_steps(epoch)
        ids: list[int] = []
        for batch in loader:
            meta = batch.meta
            if run.hold is not None and meta.step >= num_steps - run.hold and not meta.filler:
                report.send(("hold", epoch, meta.step))
                time.sleep(STUCK_SECONDS)
            ids += meta.sample_ids.tolist()
            if not meta.last_micro_step:
                continue
            log.write(json.dumps({"epoch": epoch, "step": meta.step, "ids": ids}) + "\n")
            ids = []
            dist.barrier()  # all have written the step down
            if rank == 0:
                temporary = checkpoint.with_suffix(".tmp")
                record = {"run": run.number, "epoch": epoch, "step": meta.step, "loader": loader.state_dict()}
                temporary.write_text(json.dumps(record))
                os.replace(temporary, checkpoint)
            report.send(("step", epoch, meta.step))
    report.send(("done", epochs, 0))
    loader.close()
    dist.destroy_process_group()


def descendants(pid: int) -> list[int]:
    """Children of a process, theirs included."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue
    return [*children, *(d for child in children for d in descendants(child))]


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Soak:
    """Runs until enough processes were killed and enough epochs are done."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.folder = folder
        self.arguments = arguments
        self.random = random.Random(arguments.seed)
        self.out = build_dataset(folder, arguments.samples, arguments.seed)
        self.context: Any = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["loader.dataloader", "torch.distributed"])
        self.kills = self.group_kills = self.late_restarts = 0
        self.runs: list[Run] = []
        self.starts: list[
            tuple[int, int, int] | None
        ] = []  # checkpoint (run, epoch, step) each run began from

    def choose(self, last: bool) -> Run:
        """A random run; every third kill comes in the last three steps of an epoch."""
        pick = self.random
        hold = None
        if not last and self.late_restarts * 3 < self.arguments.kills:
            hold = pick.randint(1, 3)
        return Run(
            number=len(self.runs),
            world=pick.randint(1, 4),
            num_workers=pick.choice([0, 0, 1, 2]),
            accumulate=pick.randint(1, 4),
            token_budget=pick.choice([LONGEST, LONGEST + 1, 1000, 2048, 5000]),
            hold=hold,
        )

    def checkpoint(self) -> tuple[int, int, int] | None:
        path = self.folder / "checkpoint.json"
        if not path.exists():
            return None
        record = json.loads(path.read_text())
        return record["run"], record["epoch"], record["step"]

    def start(self, run: Run, epochs: int) -> None:
        """One run, up to its kill or to the end of all epochs."""
        self.runs.append(run)
        self.starts.append(self.checkpoint())
        pipes = [self.context.Pipe(duplex=False) for _ in range(run.world)]
        processes = [
            self.context.Process(
                target=train,
                args=(rank, run, str(self.out), str(self.folder), epochs, self.arguments.samples, pipe[1]),
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            self.watch(run, processes, [receiver for receiver, _ in pipes], epochs)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(30)

    def watch(self, run: Run, processes: list[Any], receivers: list[Connection], epochs: int) -> None:
        final = self.kills >= self.arguments.kills
        # By time or by step: a random moment inside a step, of the start too.
        moment = None if run.hold is not None or final else time.monotonic() + self.random.uniform(0.2, 3.0)
        open_pipes, held, done = list(receivers), set[int](), 0
        deadline = time.monotonic() + STUCK_SECONDS
        while open_pipes:
            if time.monotonic() > deadline:
                sys.exit(f"error: no step for {STUCK_SECONDS:.0f} s in {run}")
            for ready in wait(open_pipes, timeout=0.02):
                assert isinstance(ready, Connection)
                try:
                    kind, _, _ = ready.recv()
                except EOFError:
                    open_pipes.remove(ready)
                    continue
                deadline = time.monotonic() + STUCK_SECONDS
                done += kind == "done"
                if kind == "hold":
                    held.add(receivers.index(ready))
            if (moment is not None and time.monotonic() > moment) or held:
                self.strike(processes)
                self.late_restarts += run.hold is not None
                break
        else:
            if done < run.world:
                errors = [path.read_text() for path in self.folder.glob(f"stderr-{run.number}-*")]
                sys.exit(f"error: {run} ended without having been killed\n" + "\n".join(errors))
            return
        # Whoever lost a companion must notice, not hang.
        end = time.monotonic() + 60
        for process in processes:
            process.join(max(0.1, end - time.monotonic()) if run.hold is None else 0.1)
            if process.is_alive() and run.hold is None:
                faults = [path.read_text() for path in self.folder.glob(f"stderr-{run.number}-*")]
                sys.exit(
                    f"error: a rank hangs 60 s after its companion was killed in {run}\n" + "\n".join(faults)
                )

    def strike(self, processes: list[Any]) -> None:
        living = [process.pid for process in processes if process.is_alive()]
        if not living:
            return
        workers = {pid: descendants(pid) for pid in living}
        everything = [*living, *(w for group in workers.values() for w in group)]
        self.kills += 1
        if self.group_kills * 3 < self.kills:
            self.group_kills += 1
            victims = everything
        elif any(workers.values()) and self.random.random() < 0.5:
            victims = [self.random.choice([w for group in workers.values() for w in group])]
        else:
            victims = [self.random.choice(living)]
        for victim in victims:
            kill(victim)

    def count(self) -> dict[int, Counter[int]]:
        """Samples by epoch, from the steps that checkpoints held when the next run began."""
        delivered: dict[int, Counter[int]] = {}
        place = self.checkpoint()
        for run in reversed(self.runs):
            begin = self.starts[run.number]
            if place is None or place[0] != run.number:
                continue  # not one step of this run was saved
            for rank in range(run.world):
                for line in (self.folder / f"log-{run.number}-{rank}.jsonl").read_text().splitlines():
                    try:
                        record = json.loads(line)
                    except json.JSONDecodeError:
                        continue  # cut short by the kill, so it was never saved
                    if (record["epoch"], record["step"]) <= place[1:]:
                        delivered.setdefault(record["epoch"], Counter()).update(record["ids"])
            place = begin
        return delivered

    def finish(self) -> int:
        """One last run that nobody kills; the number of epochs."""
        begun = self.checkpoint()
        epochs = (begun[1] if begun else 0) + 2
        self.start(self.choose(last=True), epochs)
        return epochs


def main() -> None:
    parser = argparse.ArgumentParser(description="Start, kill, resume, and count.")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), arguments)
        while soak.kills < arguments.kills:
            run = soak.choose(last=False)
            soak.start(run, 1 << 30)
            if sys.stderr.isatty():
                print(f"{soak.kills} kills, {asdict(run)}", file=sys.stderr)
        epochs = soak.finish()
        delivered = soak.count()
    for epoch in range(epochs):
        counts = delivered.get(epoch, Counter())
        wrong = [i for i in range(arguments.samples) if counts[i] != 1]
        if wrong or len(counts) != arguments.samples:
            sys.exit(f"error: epoch {epoch}: {len(wrong)} samples not exactly once, such as {wrong[:10]}")
    worlds = Counter(run.world for run in soak.runs)
    print(
        f"{len(soak.runs)} runs of {', '.join(f'{w} ({n})' for w, n in sorted(worlds.items()))} ranks, "
        f"{soak.group_kills} kills of the whole group, {soak.late_restarts} kills in the last 3 steps of "
        "an epoch, "
        f"{time.monotonic() - began:.0f} s"
    )
    print(
        f"{epochs} epochs, {arguments.samples} samples, each exactly once per epoch; {soak.kills} kills",
        flush=True,
    )


if __name__ == "__main__":
    main()
