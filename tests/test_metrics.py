"""What a loader says of itself, by itself and on a real set with a slow trainer or a slow reader."""

import time

import numpy as np
import pytest
from datasets import make_dataset

from loader import BucketedDataLoader, BucketedDataset
from loader.batch import BatchMeta
from loader.metrics import Meter


def meta_of(lengths, bucket):
    lengths = np.array(lengths)
    return BatchMeta.of(
        epoch=0,
        step=0,
        micro_step=0,
        num_micro_steps=1,
        bucket=bucket,
        filler=False,
        sample_ids=np.arange(len(lengths)),
        lengths=lengths,
        num_loss_tokens=1,
        step_num_tokens=100,
        step_num_loss_tokens=100,
        world_size=1,
    )


def test_counts():
    meter = Meter()
    assert set(meter.values().values()) == {0.0}
    meter.note(meta_of([3, 5], 0), 10, 16, 9.0)
    meter.note(meta_of([7], 2), 8, 14, 0.0)
    values = meter.values()
    assert values["padding_efficiency"] == 15 / 18
    assert values["bytes_read"] == 30.0
    assert (values["bucket_0_samples"], values["bucket_2_samples"]) == (2.0, 1.0)
    assert values["data_wait_fraction"] == 0.0  # the wait for the first batch is start-up
    assert values["tokens_per_s"] > 0


def test_the_clock_stops_at_the_end():
    meter = Meter()
    meter.note(meta_of([3], 0), 3, 6, 0.0)
    meter.note(meta_of([3], 0), 3, 6, 0.0)
    meter.end()
    before = meter.values()
    time.sleep(0.02)
    assert meter.values() == before


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("set"), [20] * 300, token_budget=100, num_buckets=1)


def test_a_slow_trainer_hardly_waits(out):
    loader = BucketedDataLoader(BucketedDataset(local=str(out)))
    for _ in loader:
        time.sleep(0.02)
    assert loader.metrics()["data_wait_fraction"] < 0.05


@pytest.mark.parametrize("prefetch", [0, 2])
def test_behind_a_slow_reader_the_trainer_waits(out, prefetch):
    def slow(samples):
        time.sleep(0.01)
        return len(samples)

    loader = BucketedDataLoader(BucketedDataset(local=str(out)), collate_fn=slow, prefetch=prefetch)
    assert sum(loader) == 300
    assert loader.metrics()["data_wait_fraction"] > 0.8


def test_a_full_queue_is_seen(out):
    loader = BucketedDataLoader(BucketedDataset(local=str(out)), prefetch=3)
    running = iter(loader)
    next(running)
    end = time.monotonic() + 10
    while loader.metrics()["queue_depth"] != 3.0:
        assert time.monotonic() < end
        time.sleep(0.01)
    loader.close()
