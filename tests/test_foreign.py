"""State by numbers of samples, as Composer asks for it, and epochs under another loader's workers."""

import numpy as np
import pytest
from datasets import make_dataset
from torch.utils.data import DataLoader

from loader import BucketedDataLoader, BucketedDataset
from shardgen.errors import UserError

NUM_SAMPLES = 600


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    lengths = np.random.default_rng(8).integers(1, 60, NUM_SAMPLES)
    return make_dataset(tmp_path_factory.mktemp("set"), lengths, token_budget=200, num_buckets=3)


def dataset_of(out, **kwargs):
    return BucketedDataset(local=str(out), accumulate=2, block_samples=250, **kwargs)


def steps_of(loader):
    """Samples after each step, and the state there."""
    states, total, rows = [], 0, [0]
    for batch in loader:
        total += len(batch["input_ids"])
        if batch.meta.last_micro_step:
            rows.append(total)
            states.append(loader.state_dict())
    return rows, states


def test_a_number_of_samples_since_the_epochs_start(out):
    loader = BucketedDataLoader(dataset_of(out))
    first = loader.state_dict()
    rows, states = steps_of(loader)
    assert rows[-1] == NUM_SAMPLES and states[-1]["epoch"] == 1
    assert any(state["block"] > 0 for state in states)
    dataset = dataset_of(out)
    assert dataset.state_dict(0, True) == first
    for step in (1, 2, len(states) // 2, len(states) - 1, len(states)):
        assert dataset.state_dict(rows[step], True) == states[step - 1]
        # Between two steps the earlier one counts.
        assert dataset.state_dict(rows[step] - 1, True) == ([first, *states])[step - 1]


def test_counting_from_where_the_pass_began(out):
    loader = BucketedDataLoader(dataset_of(out))
    rows, states = steps_of(loader)
    dataset = dataset_of(out)
    dataset.load_state_dict(states[6])
    assert dataset.state_dict(0, False) == states[6]
    assert dataset.state_dict(rows[12] - rows[7], False) == states[11]
    assert dataset.state_dict(rows[12], True) == states[11]
    assert dataset.state_dict(rows[3], True) == states[6]  # nothing before the loaded position is repeated
    last = len(states)
    assert dataset.state_dict(rows[last - 1] - rows[7], False) == states[last - 2]


def test_while_a_stock_loaders_workers_iterate(out):
    rows, states = steps_of(BucketedDataLoader(dataset_of(out)))
    for num_workers in (0, 2):
        dataset = dataset_of(out)
        stock = DataLoader(dataset, batch_size=None, num_workers=num_workers)
        taken = 0
        for batch in stock:
            taken += len(batch["input_ids"])
            if taken == rows[9]:
                break
        assert dataset.state_dict(taken, True) == states[8]
        assert dataset.next_epoch == 1
        resumed = dataset_of(out)
        resumed.load_state_dict(dataset.state_dict(taken, True))
        ids = [i for b in DataLoader(resumed, batch_size=None) for i in b.meta.sample_ids.tolist()]
        assert len(set(ids)) == len(ids) == NUM_SAMPLES - taken
        if num_workers:
            resumed = dataset_of(out)
            resumed.load_state_dict(states[8])
            next(iter(DataLoader(resumed, batch_size=None, num_workers=num_workers)))
            assert resumed.state_dict(0, False) == states[8]
            assert resumed.state_dict(rows[11] - rows[9], False) == states[10]


def test_two_epochs_with_workers(out):
    dataset = dataset_of(out)
    stock = DataLoader(dataset, batch_size=None, num_workers=2)
    for epoch in range(2):
        metas = [batch.meta for batch in stock]
        assert {meta.epoch for meta in metas} == {epoch}
        assert dataset.next_epoch == epoch + 1
    dataset.next_epoch = 0
    assert {batch.meta.epoch for batch in stock} == {0}
    assert dataset.state_dict(0, True)["epoch"] == 0


def test_skipped_samples_do_not_count(out):
    skip = [3, 77, 500]
    loader = BucketedDataLoader(dataset_of(out, skip=skip))
    rows, states = steps_of(loader)
    assert rows[-1] == NUM_SAMPLES - 3
    dataset = dataset_of(out, skip=skip)
    assert dataset.state_dict(rows[10], True) == states[9]
    dataset.load_state_dict(states[9])
    assert dataset.state_dict(rows[12] - rows[10], False) == states[11]
    assert dataset.state_dict(rows[-2], True) == states[-2]


@pytest.mark.parametrize("change", [{"padding": "boundary"}, {"layout": "packed"}], ids=str)
def test_refused_where_rows_are_not_samples(out, change):
    dataset = dataset_of(out, **change)
    with pytest.raises(UserError, match=r"cannot be told.*loader\.state_dict\(\)"):
        dataset.state_dict(NUM_SAMPLES - 1, True)


def test_refused_behind_a_filler(tmp_path, monkeypatch):
    out = make_dataset(tmp_path, [10] * 9, token_budget=10, num_buckets=1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dataset = BucketedDataset(local=str(out))
    assert sum(s["steps"] for s in dataset.state_dict(8, True)["segments"]) == 2
    with pytest.raises(UserError, match="filler rows"):
        dataset.state_dict(9, True)
    with pytest.raises(UserError, match="num_samples is -1"):
        dataset.state_dict(-1, True)
