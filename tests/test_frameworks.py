"""The frameworks that people train with, for real, on two ranks.

The examples deliver every sample exactly once in each of two epochs and after a restart, and what people try
first names the right call.
"""

import json
import math
import os

import pytest
from datasets import make_dataset, mixed_lengths

from loader import BucketedDataLoader, BucketedDataset

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
NUM_SAMPLES = 297


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    lengths = 1 + mixed_lengths(NUM_SAMPLES, 40, seed=3)
    return make_dataset(tmp_path_factory.mktemp("shards"), lengths, token_budget=48, num_buckets=3)


@pytest.fixture(scope="module")
def launch(out, tmp_path_factory, python, root):
    """Records of two ranks that ran a framework's scenarios."""
    results = tmp_path_factory.mktemp("frameworks")

    def run(framework: str) -> list[dict]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
        arguments = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        script = root / "tests/framework_ranks.py"
        done = python(*arguments, script, framework, out, results, env=environment, timeout=240)
        assert done.returncode == 0, done.stderr
        ranks = [json.loads((results / f"{framework}-{rank}.json").read_text()) for rank in range(2)]
        # Epochs of unequal length, the second longer: arithmetic from the first would cut it short.
        assert [record["lengths"] for record in ranks] == [[36, 38]] * 2
        return [{**record, "results": results} for record in ranks]

    return run


def flat(ranks, name, first=0, last=None):
    """Rows of some forward passes of both ranks, sorted."""
    return sorted(row for record in ranks for rows in record[name][first:last] for row in rows)


def check_two_epochs(ranks, name):
    everything = list(range(NUM_SAMPLES))
    assert [len(record[name]) for record in ranks] == [74, 74]
    assert flat(ranks, name, 0, 36) == everything
    assert flat(ranks, name, 36, 74) == everything
    assert ranks[0][name][:36] != ranks[0][name][36:72]


def check_rest(ranks, name, whole, after):
    """A resumed run is the very same forward passes as the uninterrupted one's after so many."""
    for record in ranks:
        assert record[name] == record[whole][after:]


def check_other_budget(ranks, name, whole, after):
    """New batches, and every remaining sample exactly once."""
    assert flat(ranks, name) == flat(ranks, whole, after)
    assert len(ranks[0][name]) == len(ranks[1][name]) != 74 - after


REFUSAL = "already gives each rank its own batches: iterate BucketedDataLoader(dataset)"


def test_ddp_accelerate_and_tensorboard(launch):
    ranks = launch("plain")
    for name in ("ddp", "accelerate"):
        check_two_epochs(ranks, f"{name} whole")
        check_rest(ranks, f"{name} resumed", f"{name} whole", 36 + 20)  # saved after step 10 of epoch 1
    check_two_epochs(ranks, "tensorboard whole")
    for record in ranks:
        assert REFUSAL in record["refused"][0]
    check_events(ranks[0]["results"] / "events")


def check_events(folder):
    """What a TensorBoard that reads the files shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss/all", "loss/bucket_0", "loss/bucket_1", "loss/bucket_2"} <= tags
    assert {"loader/padding_efficiency", "loader/tokens_per_s", "loader/data_wait_fraction"} <= tags
    losses = events.Scalars("loss/all")
    assert len(losses) == 37 // 6
    at = [event.step for event in losses]
    assert at == sorted(set(at)) and at[0] > 0  # real tokens so far
    # An untrained model guesses: anything but the exact mean over tokens would be far from ln V.
    for tag in ("loss/all", "loss/bucket_0", "loss/bucket_2"):
        assert events.Scalars(tag)[0].value == pytest.approx(math.log(30_000), rel=0.03)
    assert all(0 < event.value <= 1 for event in events.Scalars("loader/padding_efficiency"))


def test_trainer(launch):
    ranks = launch("trainer")
    check_two_epochs(ranks, "trainer whole")
    check_rest(ranks, "trainer mid", "trainer whole", 36 + 18)  # step 27 is the 9th of epoch 1
    check_rest(ranks, "trainer end", "trainer whole", 36)
    for name in ("smaller", "larger"):
        check_other_budget(ranks, f"trainer {name}", "trainer whole", 36 + 18)
    for record in ranks:
        assert [record[f"steps {name}"] for name in ("whole", "mid", "end")] == [37, 37, 37]
        assert record["losses whole"][0] == pytest.approx(record["first loss"], abs=1e-3)
        dataset, skipping, own_skipping, accumulate, short_steps = record["refused"]
        assert REFUSAL in dataset
        for message in (skipping, own_skipping):
            assert "TrainingArguments(ignore_data_skip=True)" in message
        assert "gradient_accumulation_steps 1 is not the dataset's accumulate 2" in accumulate
        assert "make the dataset with block_samples at least the number of samples" in short_steps
        # The log of a resumed run holds that of the run before: the same weights met the same batches.
        assert record["losses mid"] == pytest.approx(record["losses whole"], abs=1e-3)


@pytest.mark.parametrize("set_epoch", [True, False])
def test_a_framework_that_never_asks_for_the_end_of_a_pass(out, monkeypatch, set_epoch):
    """It takes as many batches as `len` says, sets the next epoch and asks for its length."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = BucketedDataLoader(BucketedDataset(local=str(out), accumulate=2, seed=9))
    batches = iter(loader)
    for left in range(len(loader), 0, -1):
        next(batches)
        if left == 5:
            loader.set_epoch(1)
            assert (loader.epoch, len(loader)) == (0, 36)
    if set_epoch:
        loader.set_epoch(1)
        assert (loader.epoch, len(loader)) == (1, 38)
    assert list(batches) == []  # and it can still be asked
    assert (loader.epoch, len(loader)) == (1, 38)


def test_lightning(launch):
    ranks = launch("lightning")
    check_two_epochs(ranks, "lightning whole")
    check_rest(ranks, "lightning mid", "lightning whole", 36 + 18)
    for name in ("end", "epoch"):  # saved after the last batch, and after the epoch
        check_rest(ranks, f"lightning {name}", "lightning whole", 36)
    for name in ("smaller", "larger"):
        check_other_budget(ranks, f"lightning {name}", "lightning whole", 36 + 18)
    for record in ranks:
        stock, reload = record["refused"]
        assert REFUSAL in stock
        assert "use Trainer(reload_dataloaders_every_n_epochs=1)" in reload
