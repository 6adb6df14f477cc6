"""Real ranks: equal counts, the same batches after a restart, every sample once on any other world."""

import json
import os

import pytest
from datasets import make_dataset, mixed_lengths

from loader import BucketedDataLoader, BucketedDataset

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]
NUM_SAMPLES = 2000


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    lengths = mixed_lengths(NUM_SAMPLES, 400, seed=5)
    return make_dataset(tmp_path_factory.mktemp("ranks"), lengths, token_budget=1000, num_buckets=4)


@pytest.fixture(scope="module")
def ranks(out, tmp_path_factory, python, root):
    """Records of two ranks with two workers each."""
    results = tmp_path_factory.mktemp("results")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = python(*launch, root / "tests/ranks.py", out, results, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(2)]


def flat(batches):
    return [i for ids in batches for i in ids]


def test_ranks_see_the_process_group(ranks):
    assert [r["seen"] for r in ranks] == [[0, 2], [1, 2]]
    for record in ranks:
        assert "torch.distributed says rank" in record["disagreement"]


def test_equal_counts_and_every_sample_once_per_epoch(ranks):
    for epoch in range(3):
        first, second = (r["epochs"][epoch] for r in ranks)
        assert len(first) == len(second) == ranks[0]["lengths"][epoch] == ranks[1]["lengths"][epoch]
        assert sorted(flat(first) + flat(second)) == list(range(NUM_SAMPLES))
    assert ranks[0]["epochs"][0] != ranks[0]["epochs"][1]


def test_the_same_batches_after_a_restart(ranks):
    assert ranks[0]["state"] == ranks[1]["state"]
    for record in ranks:
        whole = record["epochs"][0]
        assert record["first_12_steps"] == whole[: len(record["first_12_steps"])]
        rest = whole[len(record["first_12_steps"]) :]
        assert record["resumed"] == {"0": rest, "2": rest}


@pytest.mark.parametrize(
    ("world", "num_workers", "change"),
    [
        (1, 0, {}),
        (3, 0, {}),
        (4, 2, {}),
        (1, 2, {}),
        (2, 0, {"accumulate": 5}),
        (2, 0, {"token_budget": 500}),
        (3, 0, {"accumulate": 1, "token_budget": 500, "lookahead": 4}),
    ],
)
def test_every_remaining_sample_once_whatever_changes(ranks, out, monkeypatch, world, num_workers, change):
    rest, counts = [], set()
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        dataset = BucketedDataset(local=str(out), seed=11, block_samples=700, **{"accumulate": 2, **change})
        loader = BucketedDataLoader(dataset, num_workers=num_workers)
        loader.load_state_dict(ranks[0]["state"])
        batches = [batch.meta.sample_ids.tolist() for batch in loader]
        counts.add(len(batches))
        rest += flat(batches)
        loader.close()
    done = flat(ranks[0]["first_12_steps"]) + flat(ranks[1]["first_12_steps"])
    assert len(counts) == 1
    assert sorted(done + rest) == list(range(NUM_SAMPLES))


def test_eight_workers_change_nothing(ranks, out, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = BucketedDataLoader(
        BucketedDataset(local=str(out), accumulate=2, seed=11, block_samples=700), num_workers=8
    )
    loader.load_state_dict(ranks[0]["state"])
    assert [batch.meta.sample_ids.tolist() for batch in loader] == ranks[1]["resumed"]["0"]
    loader.close()
