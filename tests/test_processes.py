"""Processes that start together, die badly and come back: nothing is cleaned by hand, nobody hangs."""

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from datasets import make_dataset

from loader import BucketedDataLoader, BucketedDataset

pytestmark = pytest.mark.distributed
NUM_SAMPLES = 500


@pytest.fixture(scope="module")
def context():
    """Children of a server that has imported everything: a start costs milliseconds, not seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["loader.dataloader", "torch.distributed"])
    return context


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    lengths = np.random.default_rng(1).integers(1, 100, NUM_SAMPLES)
    return make_dataset(
        tmp_path_factory.mktemp("set"), lengths, token_budget=400, num_buckets=3, shard_size=1 << 12
    )


def leftovers(folder):
    """What our runs have left under a temp directory."""
    ours = [p.name for root in Path(folder).glob("shardgen-*") for p in (root, *root.rglob("*"))]
    return sorted(ours)


def _rank(rank, world, temp, out, local, num_workers, report, stall, state):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), TMPDIR=str(temp))
    tempfile.tempdir = None  # the fork server has looked it up
    dataset = BucketedDataset(remote=str(out), local=str(local), accumulate=2)
    loader = BucketedDataLoader(
        dataset, num_workers=num_workers, multiprocessing_context="fork" if num_workers else None
    )
    if state is not None:
        loader.load_state_dict(state)
    ids = []
    for number, batch in enumerate(loader):
        ids.append(batch.meta.sample_ids.tolist())
        if number == 0:
            report.send("running")
        if stall:
            time.sleep(0.01)
    report.send((ids, loader.state_dict()))
    loader.close()


class Group:
    """The ranks of one start."""

    def __init__(self, context, world, temp, out, local, num_workers=1, stall=False, state=None):
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        self.reports = [receiver for receiver, _ in pipes]
        self.processes = [
            context.Process(
                target=_rank, args=(rank, world, temp, out, local, num_workers, pipe[1], stall, state)
            )
            for rank, pipe in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        for _, sender in pipes:
            sender.close()

    def receive(self, rank):
        assert self.reports[rank].poll(60), "a rank hangs"
        return self.reports[rank].recv()

    def results(self):
        found = []
        for rank, process in enumerate(self.processes):
            assert self.receive(rank) == "running"
            found.append(self.receive(rank))
            process.join(60)
            assert process.exitcode == 0
        return found

    def kill(self):
        """SIGKILL to every rank and worker."""
        pids = [p.pid for p in self.processes]
        children = [c for pid in pids for c in descendants(pid)]
        for pid in [*pids, *children]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.join(30)


def descendants(pid):
    children = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children += map(int, (task / "children").read_text().split())
        except FileNotFoundError:
            continue
    return [*children, *(d for child in children for d in descendants(child))]


def flat(results):
    return sorted(i for ids, _ in results for batch in ids for i in batch)


def test_ten_kills_of_all_and_restarts_at_once(context, out, tmp_path, monkeypatch):
    temp, local = tmp_path / "temp", tmp_path / "local"
    temp.mkdir()
    # Another run on this machine that must not notice anything.
    monkeypatch.setenv("TMPDIR", str(temp))
    monkeypatch.setattr("tempfile.tempdir", None)
    other = BucketedDataset(remote=str(out), local=str(tmp_path / "other"))
    foreign = Path("/dev/shm/000000_locals")
    made = Path("/dev/shm").is_dir() and not foreign.exists()
    if made:
        foreign.write_bytes(b"somebody else's")
    try:
        counts, random = [], np.random.default_rng(0)
        for number in range(10):
            group = Group(context, 2, temp, out, local, stall=True)
            if number % 3:
                assert group.receive(0) == "running"
            time.sleep(random.uniform(0, 0.3))
            group.kill()
            counts.append(leftovers(temp))
            if number == 4:
                shutil.rmtree(local)  # so that later kills hit downloads too
        results = Group(context, 2, temp, out, local).results()
        assert flat(results) == list(range(NUM_SAMPLES))
        # Restarts add nothing to what the first killed run left (one that had come to its first batch).
        assert all(len(names) <= len(counts[1]) for names in counts[2:])
        assert len(leftovers(temp)) < len(counts[1])
        if made:
            assert foreign.read_bytes() == b"somebody else's"
    finally:
        if made:
            foreign.unlink()
    loader = BucketedDataLoader(other)
    assert sorted(i for b in loader for i in b.meta.sample_ids.tolist()) == list(range(NUM_SAMPLES))
    assert not list(local.rglob("*.part*"))
    del loader, other
    assert leftovers(temp) == ["door", f"shardgen-{os.getuid()}"]  # with the last user everything else goes


def test_eight_processes_starting_together(context, out, tmp_path):
    temp = tmp_path / "temp"
    temp.mkdir()
    expected = None
    for number in range(3):
        # Into an empty cache each time: all of them want the same files at once.
        group = Group(context, 8, temp, out, tmp_path / f"local-{number}", num_workers=0)
        results = group.results()
        assert flat(results) == list(range(NUM_SAMPLES))
        expected = expected or results
        assert results == expected
    assert leftovers(temp) == ["door", f"shardgen-{os.getuid()}"]


def test_a_killed_rank_does_not_hold_up_the_others_downloads(context, out, tmp_path):
    temp = tmp_path / "temp"
    temp.mkdir()
    group = Group(context, 2, temp, out, tmp_path / "local", num_workers=0, stall=True)
    assert group.receive(0) == "running"
    os.kill(group.processes[0].pid, signal.SIGKILL)
    assert group.receive(1) == "running"
    ids, _ = group.receive(1)
    assert len(ids) > 10
    group.kill()


def test_a_killed_worker_is_an_error_and_the_restart_works(context, out, tmp_path):
    temp = tmp_path / "temp"
    temp.mkdir()
    group = Group(context, 1, temp, out, tmp_path / "local", num_workers=2, stall=True)
    assert group.receive(0) == "running"
    workers = descendants(group.processes[0].pid)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    group.processes[0].join(60)
    assert group.processes[0].exitcode == 1
    results = Group(context, 1, temp, out, tmp_path / "local", num_workers=2).results()
    assert flat(results) == list(range(NUM_SAMPLES))


def _synchronised(rank, world, store, out, report):
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    for number, batch in enumerate(BucketedDataLoader(BucketedDataset(local=str(out)))):
        dist.all_reduce(torch.tensor([batch.meta.step]))
        if number == 0:
            report.send("running")
        if rank == 1 and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_makes_the_others_fail(context, out, tmp_path):
    _, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=_synchronised, args=(rank, 3, str(tmp_path / "store"), out, sender))
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 60
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    assert codes == [1, -signal.SIGKILL, 1]


NODE = """
import json, os, sys, time
from pathlib import Path
from loader import BucketedDataLoader, BucketedDataset
out, local, go = sys.argv[1:]
while not os.path.exists(go):
    time.sleep(0.01)
dataset = BucketedDataset(remote=out, local=local)
ids = [i for b in BucketedDataLoader(dataset) for i in b.meta.sample_ids.tolist()]
print(json.dumps([ids, sorted(os.listdir("/dev/shm"))]))
"""


def test_two_nodes_on_one_machine_with_their_own_shared_memory(out, tmp_path, root):
    import subprocess
    import sys

    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    ):
        pytest.skip("this machine does not permit `unshare -rm`, which gives a process its own /dev/shm")
    nodes = []
    for node in range(2):
        temp = tmp_path / f"temp-{node}"
        temp.mkdir()
        environment = {
            **os.environ,
            **{"RANK": str(node), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "TMPDIR": str(temp)},
            **{"PYTHONPATH": str(root)},
        }
        shell = 'mount -t tmpfs tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "-rm", "sh", "-c", shell, "node", sys.executable, "-c", NODE]
        arguments = [str(out), str(tmp_path / f"local-{node}"), str(tmp_path / "go")]
        nodes.append(
            subprocess.Popen([*command, *arguments], env=environment, stdout=-1, stderr=-1, text=True)
        )
    time.sleep(1)
    (tmp_path / "go").touch()
    delivered = []
    for node in nodes:
        stdout, stderr = node.communicate(timeout=120)
        assert node.returncode == 0, stderr
        ids, segments = json.loads(stdout)
        delivered += ids
        assert segments == []
    assert sorted(delivered) == list(range(NUM_SAMPLES))
