"""The loader on real shards: order, position, epochs, workers, ranks."""

import json
import multiprocessing
import pickle
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from datasets import make_dataset, mixed_lengths, row_tokens
from torch.utils.data import DataLoader

from loader import BucketedDataLoader, BucketedDataset
from shardgen.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """1000 samples of 1..64 tokens."""
    lengths = np.random.default_rng(3).integers(1, 65, 1000)
    return make_dataset(tmp_path_factory.mktemp("mixed"), lengths, token_budget=256, num_buckets=4)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """103 samples whose length is 1 + row mod 7."""
    return make_dataset(
        tmp_path_factory.mktemp("odd"), [1 + i % 7 for i in range(103)], token_budget=16, num_buckets=3
    )


@pytest.fixture(scope="module")
def even(tmp_path_factory):
    """128 samples of 8 tokens: 64 batches of two."""
    return make_dataset(tmp_path_factory.mktemp("even"), [8] * 128, token_budget=16, num_buckets=1)


def loader_of(out, dataset=None, **kwargs):
    return BucketedDataLoader(BucketedDataset(local=str(out), **(dataset or {})), **kwargs)


def ids_of(loader, most=None):
    ids = []
    for number, batch in enumerate(loader, start=1):
        ids.append(batch.meta.sample_ids.tolist())
        if number == most:
            break
    return ids


def as_rank(monkeypatch, rank, world):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))


WAYS = [
    {},
    {"prefetch": 0},
    {"prefetch": 7},
    {"num_workers": 1},
    {"num_workers": 3, "prefetch": 1},
    {"num_workers": 2, "prefetch": 4, "persistent_workers": True},
]


# --- content ------------------------------------------------------------------------------------------


def test_batches_hold_the_source_rows(mixed):
    loader = loader_of(mixed, {"columns": ["row"]})
    rows = []
    for batch in loader:
        tensors = batch["input_ids"], batch["attention_mask"], batch["labels"]
        assert batch["input_ids"].numel() <= 256
        for ids, mask, labels, row in zip(*tensors, batch["row"].tolist(), strict=True):
            length = int(mask.sum())
            assert mask[:length].all() and not mask[length:].any()
            np.testing.assert_array_equal(ids[:length], row_tokens(row, length))
            assert not ids[length:].any() and (labels[length:] == -100).all() and labels[0] == -100
            np.testing.assert_array_equal(labels[1:length], row_tokens(row, length)[1:])
        assert batch.meta.num_tokens == int(batch["attention_mask"].sum())
        assert batch.meta.num_loss_tokens == int((batch["labels"] != -100).sum())
        assert loader.last_meta is batch.meta
        rows += batch["row"].tolist()
    assert sorted(rows) == list(range(1000))


def test_step_counts_add_up(mixed):
    steps = {}
    for batch in loader_of(mixed, {"accumulate": 3}):
        meta = batch.meta
        steps.setdefault(meta.step, []).append(meta)
        assert meta.last_micro_step == (meta.micro_step == meta.num_micro_steps - 1)
    assert sorted(steps) == list(range(len(steps)))
    for metas in steps.values():
        assert [m.micro_step for m in metas] == list(range(metas[0].num_micro_steps))
        assert {m.step_num_tokens for m in metas} == {sum(m.num_tokens for m in metas)}
        assert {m.step_num_loss_tokens for m in metas} == {sum(m.num_loss_tokens for m in metas)}
        assert {m.loss_denominator for m in metas} == {float(metas[0].step_num_loss_tokens)}


def test_one_order_for_any_workers_and_prefetch(mixed):
    expected = None
    for way in WAYS:
        loader = loader_of(mixed, {"seed": 4}, **way)
        epochs = [ids_of(loader), ids_of(loader)]
        loader.close()
        expected = expected or epochs
        assert epochs == expected
        assert epochs[0] != epochs[1]


def test_spawned_workers_give_the_same(mixed):
    loader = loader_of(mixed, num_workers=1, multiprocessing_context="spawn")
    assert ids_of(loader) == ids_of(loader_of(mixed))
    loader.close()


def test_user_collate_fn(mixed):
    def collate(samples):
        return {"rows": [int(s["row"]) for s in samples], "tokens": sum(len(s["input_ids"]) for s in samples)}

    for way in ({}, {"num_workers": 2}):
        loader = loader_of(mixed, collate_fn=collate, **way)
        rows = []
        for batch in loader:
            assert batch["tokens"] == batch.meta.num_tokens == loader.last_meta.num_tokens
            rows += batch["rows"]
        assert sorted(rows) == list(range(1000))
        loader.close()


def test_user_collate_fn_may_return_anything(odd):
    loader = loader_of(odd, collate_fn=len)
    sizes = [(size, len(loader.last_meta.sample_ids)) for size in loader]
    assert all(size == rows for size, rows in sizes)
    assert sum(size for size, _ in sizes) == 103


# --- position -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [{}, {"num_workers": 2}], ids=str)
def test_resume_gives_what_an_uninterrupted_run_would(odd, way):
    whole = ids_of(loader_of(odd))
    for stop in (1, 7, len(whole) - 1):
        first = loader_of(odd, **way)
        assert ids_of(first, stop) == whole[:stop]
        state = json.loads(json.dumps(first.state_dict()))
        first.close()
        second = loader_of(odd, **way)
        second.load_state_dict(state)
        assert len(second) == len(whole) - stop
        assert ids_of(second) == whole[stop:]
        second.close()


def test_position_counts_what_the_loop_took_not_what_workers_made(mixed):
    whole = ids_of(loader_of(mixed))
    loader = loader_of(mixed, num_workers=4, prefetch=4)
    running = iter(loader)
    taken = [next(running).meta.sample_ids.tolist() for _ in range(7)]
    state = loader.state_dict()
    loader.close()
    resumed = loader_of(mixed)
    resumed.load_state_dict(state)
    assert taken == whole[:7]
    assert ids_of(resumed)[0] == whole[7]


def test_state_at_the_end_of_an_epoch(tmp_path):
    out = make_dataset(tmp_path, [8] * 64, token_budget=32, num_buckets=1)
    loader = loader_of(out)
    epochs = [ids_of(loader), ids_of(loader)]
    assert epochs[0] != epochs[1]
    loader = loader_of(out)
    for _ in loader:  # saved inside the loop body of the last batch
        state = loader.state_dict()
    assert loader.state_dict() == state
    again = loader_of(out)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert again.epoch == 1 and len(again) == 16 and again.num_steps(1) == 16
    assert ids_of(again) == epochs[1]
    assert again.epoch == 2


@pytest.mark.parametrize("persistent", [True, False])
def test_an_offset_is_used_once_in_the_workers_too(even, persistent):
    way = {"num_workers": 2, "persistent_workers": persistent}
    loader = loader_of(even, **way)
    assert len(ids_of(loader, 61)) == 61
    state = loader.state_dict()
    loader.close()
    loader = loader_of(even, **way)
    loader.load_state_dict(state)
    assert [len(ids_of(loader)) for _ in range(3)] == [3, 64, 64]
    loader.close()


def test_loading_again_while_workers_live_on(even):
    loader = loader_of(even, num_workers=2, persistent_workers=True)
    whole = ids_of(loader)
    loader.set_epoch(0)
    assert ids_of(loader, 10) == whole[:10]
    state = loader.state_dict()
    ids_of(loader, 3)
    loader.load_state_dict(state)
    assert ids_of(loader) == whole[10:]
    loader.close()


def test_three_runs_joined_equal_one(mixed):
    whole = ids_of(loader_of(mixed))
    parts, state = [], None
    for most in (30, 10, None):
        loader = loader_of(mixed)
        if state:
            loader.load_state_dict(state)
        parts += ids_of(loader, most)
        state = loader.state_dict()
    assert parts == whole


def test_inside_a_step_the_position_is_its_start(mixed):
    loader = loader_of(mixed, {"accumulate": 4})
    running, states = iter(loader), []
    for _ in range(9):
        next(running)
        states.append(loader.state_dict())
    steps = [sum(s["steps"] for s in state["segments"]) for state in states]
    assert steps == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_whatever_may_change_mid_epoch_does(mixed):
    changes = [
        {"token_budget": 128},
        {"accumulate": 3},
        {"boundaries": [10, 30]},
        {"num_buckets": 2},
        {"lookahead": 1},
        {"max_batch_size": 3},
        {"padding": "boundary"},
        {"layout": "packed"},
        {"pad_to_multiple_of": 8},
        {"cost_budget": 200},
        {"labels": "tokens"},
        {"skip": ()},
    ]
    first = loader_of(mixed)
    ids = [i for batch in ids_of(first, 40) for i in batch]
    state = first.state_dict()
    for change in changes:
        loader = loader_of(mixed, change)
        loader.load_state_dict(state)
        count = len(loader)
        rest = ids_of(loader)
        assert len(rest) == count
        assert sorted(ids + [i for batch in rest for i in batch]) == list(range(1000)), change
        assert loader.epoch == 1


def test_what_is_fixed_within_an_epoch_is_refused(mixed, odd):
    loader = loader_of(mixed)
    ids_of(loader, 5)
    state = loader.state_dict()
    for change, name in (
        ({"seed": 1}, "seed"),
        ({"block_samples": 300}, "block_samples"),
        ({"num_canonical_nodes": 1, "shuffle": False}, "shuffle"),
        ({"buckets": [0, 1, 2]}, "buckets"),
        ({"weights": [1, 1, 1, 2]}, "weights"),
    ):
        other = loader_of(mixed, change)
        before = other.state_dict()
        with pytest.raises(UserError, match=f"{name}: saved"):
            other.load_state_dict(state)
        assert other.state_dict() == before
    with pytest.raises(UserError, match="data fingerprint"):
        loader_of(odd).load_state_dict(state)
    # Before an epoch's first step nothing is fixed yet.
    fresh = loader_of(mixed).state_dict()
    other = loader_of(mixed, {"seed": 1})
    with pytest.warns(UserWarning, match="seed: saved 0, now 1"):
        other.load_state_dict(fresh)
    assert ids_of(other) == ids_of(loader_of(mixed, {"seed": 1}))


def test_a_damaged_state_is_refused_and_changes_nothing(mixed):
    loader = loader_of(mixed)
    ids_of(loader, 5)
    state = loader.state_dict()
    for bad in ({**state, "digest": "0" * 16}, {**state, "num_dealt": 3}, {}):
        with pytest.raises(UserError):
            loader.load_state_dict(bad)
    assert loader.state_dict() == state


def test_the_last_of_several_loads_wins(mixed):
    loader = loader_of(mixed)
    whole = ids_of(loader)
    states = []
    loader.set_epoch(0)
    for number, _ in enumerate(loader):
        if number in (3, 9):
            states.append(loader.state_dict())
    loader.load_state_dict(states[1])
    loader.load_state_dict(states[0])
    assert loader.state_dict() == states[0]
    assert ids_of(loader) == whole[4:]


# --- epochs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [{}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_set_epoch_decides_the_order(mixed, way):
    loader = loader_of(mixed, **way)
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        assert loader.epoch == epoch
        orders.append(ids_of(loader))
    assert orders[0] == orders[2] != orders[1]
    loader.close()


def test_an_unfinished_epoch_is_followed_by_the_next(mixed):
    loader = loader_of(mixed)
    ids_of(loader, 3)
    assert loader.epoch == 1  # the next pass
    assert loader.state_dict()["epoch"] == 0  # the position
    other = loader_of(mixed)
    other.set_epoch(1)
    assert ids_of(loader) == ids_of(other)


def test_a_loaded_state_wins_over_set_epoch_until_it_was_iterated(mixed):
    loader = loader_of(mixed)
    whole = ids_of(loader)
    loader.set_epoch(0)
    ids_of(loader, 4)
    state = loader.state_dict()
    loader = loader_of(mixed)
    loader.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.set_epoch(0)  # the same: no warning
    with pytest.warns(UserWarning, match=r"set_epoch\(3\) is ignored"):
        loader.set_epoch(3)
    assert loader.epoch == 0
    assert ids_of(loader) == whole[4:]
    loader.set_epoch(3)
    assert loader.epoch == 3
    with pytest.raises(UserError, match="epoch -1"):
        loader.set_epoch(-1)


def test_set_epoch_moves_the_position_between_passes(mixed):
    loader = loader_of(mixed)
    ids_of(loader, 3)
    loader.set_epoch(5)
    assert loader.state_dict()["epoch"] == 5 and not loader.state_dict()["segments"]


def test_epoch_and_len_while_a_pass_runs(mixed):
    loader = loader_of(mixed, {"accumulate": 2})
    total = len(loader)
    for number, _ in enumerate(loader):
        assert loader.epoch == 0 and len(loader) == total
        if number == 5:
            break
    assert loader.epoch == 1


def test_a_newer_pass_ends_the_older(mixed):
    loader = loader_of(mixed)
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    with pytest.raises(StopIteration):
        next(old)
    assert loader.epoch == 1


def test_two_loaders_of_one_dataset_count_apart(mixed):
    dataset = BucketedDataset(local=str(mixed))
    first, second = BucketedDataLoader(dataset), BucketedDataLoader(dataset)
    assert ids_of(first, 5) == ids_of(second, 5)
    assert first.state_dict() == second.state_dict()


# --- sizes --------------------------------------------------------------------------------------------


def test_len_for_every_epoch_and_after_a_resume(tmp_path, monkeypatch):
    out = make_dataset(tmp_path, mixed_lengths(700, 300), token_budget=600, num_buckets=4)
    for rank in range(8):
        as_rank(monkeypatch, rank, 8)
        loader = loader_of(out, {"accumulate": 2, "block_samples": 300})
        for _ in range(2):
            count, steps, epoch = len(loader), loader.num_steps(loader.epoch), loader.epoch
            metas = [batch.meta for batch in loader]
            assert count == len(metas)
            assert steps == metas[-1].step + 1 == loader.num_steps(epoch)
        ids_of(loader, 9)
        state = loader.state_dict()
        loader = loader_of(out, {"accumulate": 3, "block_samples": 300})
        loader.load_state_dict(state)
        count, steps = len(loader), loader.num_steps(2)
        metas = [batch.meta for batch in loader]
        assert (count, steps) == (len(metas), metas[-1].step + 1)
        assert metas[0].step == 4  # 9 batches are 4 whole steps of 2


def test_len_reads_no_shard(mixed, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in mixed.rglob("*"):
        if path.is_file() and path.suffix != ".mds":
            target = copy / path.relative_to(mixed)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
    loader = loader_of(copy)
    assert len(loader) == len(loader_of(mixed))
    with pytest.raises(UserError, match=r"shard\.00000\.mds"):
        next(iter(loader))


def test_four_ranks_share_100_samples(tmp_path, monkeypatch):
    out = make_dataset(tmp_path, [10] * 100, token_budget=20, num_buckets=1)
    delivered, counts = [], []
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        loader = loader_of(out)
        metas = [(batch.meta, batch["input_ids"].numel()) for batch in loader]
        assert len(loader_of(out)) == len(metas)
        counts.append(len(metas))
        assert all(len(meta.sample_ids) and size <= 20 for meta, size in metas)
        delivered += [i for meta, _ in metas for i in meta.sample_ids.tolist()]
    assert counts == [13] * 4
    assert sorted(delivered) == list(range(100))


def test_more_ranks_than_rows_of_a_step_get_fillers(tmp_path, monkeypatch):
    out = make_dataset(tmp_path, [100] * 5, token_budget=100, num_buckets=1)
    delivered, fillers = [], 0
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        loader = loader_of(out)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = [*loader, *loader][:2]
        mine = sum(batch.meta.filler for batch in batches)
        told = [str(w.message) for w in caught if "filler" in str(w.message)]
        assert len(told) <= 1  # once, however many epochs
        if mine:
            assert told[0].startswith("epoch 0 needs 3 filler batches")
        for batch in batches:
            weight = torch.ones(30_000, requires_grad=True)
            logits = weight[batch["input_ids"]].sum() * 1.0
            labels = batch["labels"]
            loss = (weight[batch["input_ids"]] * (labels != -100)).sum() / batch.meta.loss_denominator
            (loss + 0 * logits).backward()
            assert torch.isfinite(weight.grad).all()
            if batch.meta.filler:
                fillers += 1
                assert (labels == -100).all() and loss.item() == 0
                assert len(batch.meta.sample_ids) == 0 and batch.meta.num_tokens == 0
            delivered += batch.meta.sample_ids.tolist()
        with pytest.raises(UserError, match=r"filler|tail"):
            iter(loader_of(out, {"tail": "error"}))
    assert sorted(delivered) == list(range(5))
    assert fillers == 3


def test_fewer_samples_than_ranks_are_refused(tmp_path, monkeypatch):
    out = make_dataset(tmp_path, [5] * 3, token_budget=10, num_buckets=1)
    as_rank(monkeypatch, 1, 4)
    with pytest.raises(UserError, match=r"3 samples.*4 ranks"):
        iter(loader_of(out))


def test_uneven_empty_and_tiny_buckets(tmp_path, monkeypatch):
    lengths = [5] * 1003 + [15] * 517 + [25] * 13 + [35]  # nothing between 35 and 50
    out = make_dataset(tmp_path, lengths, token_budget=64, boundaries=(10, 20, 30, 40, 50), max_length=50)
    assert sorted(p.name for p in out.iterdir() if p.is_dir()) == [f"bucket-0{k}" for k in range(4)]
    delivered = []
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        delivered += [i for ids in ids_of(loader_of(out)) for i in ids]
    assert sorted(delivered) == list(range(len(lengths)))


def test_replicated_ranks_get_the_same(mixed, monkeypatch):
    orders = []
    for rank in range(4):
        as_rank(monkeypatch, rank, 4)
        orders.append(ids_of(loader_of(mixed, {"replication": 2})))
    assert orders[0] == orders[1] != orders[2] == orders[3]
    assert sorted(i for order in (orders[0], orders[2]) for ids in order for i in ids) == list(range(1000))
    as_rank(monkeypatch, 0, 3)
    with pytest.raises(UserError, match="replication 2 does not divide the 3 ranks"):
        loader_of(mixed, {"replication": 2})


# --- other loaders ------------------------------------------------------------------------------------


def test_a_stock_dataloader_iterates_the_dataset(mixed):
    expected = [ids_of(loader_of(mixed))]
    second = loader_of(mixed)
    second.set_epoch(1)
    expected.append(ids_of(second))
    for num_workers, persistent in ((0, False), (3, False), (3, True)):
        stock = DataLoader(
            BucketedDataset(local=str(mixed)),
            batch_size=None,
            num_workers=num_workers,
            persistent_workers=persistent,
        )
        assert len(stock) == len(expected[0])
        assert [ids_of(stock), ids_of(stock)] == expected


def test_a_stock_dataloader_resumes_from_the_dataset(mixed):
    whole = ids_of(loader_of(mixed))
    dataset = BucketedDataset(local=str(mixed))
    stock = DataLoader(dataset, batch_size=None)
    assert ids_of(stock, 8) == whole[:8]
    state = dataset.state_dict()
    for num_workers in (0, 2):
        dataset = BucketedDataset(local=str(mixed))
        dataset.load_state_dict(state)
        stock = DataLoader(dataset, batch_size=None, num_workers=num_workers)
        assert ids_of(stock) == whole[8:]
        other = loader_of(mixed)
        other.set_epoch(1)
        assert ids_of(stock) == ids_of(other)


def test_a_foreign_loader_on_several_ranks_must_say_so(mixed, monkeypatch):
    as_rank(monkeypatch, 0, 2)
    with pytest.raises(UserError, match=r"BucketedDataLoader\(dataset\).*foreign_loader=True"):
        next(iter(DataLoader(BucketedDataset(local=str(mixed)), batch_size=None)))
    stock = DataLoader(BucketedDataset(local=str(mixed), foreign_loader=True), batch_size=None)
    assert ids_of(stock) == ids_of(loader_of(mixed))


def test_loading_into_the_dataset_reaches_its_loaders(mixed):
    first = loader_of(mixed)
    whole = ids_of(first)
    first.set_epoch(0)
    ids_of(first, 6)
    assert first.dataset.state_dict() == first.state_dict()  # of the loader that iterates
    dataset = BucketedDataset(local=str(mixed))
    loader = BucketedDataLoader(dataset)
    dataset.load_state_dict(first.state_dict())
    assert ids_of(loader) == whole[6:]
    dataset.load_state_dict(first.state_dict())
    assert ids_of(BucketedDataLoader(dataset)) == whole[6:]  # also one made afterwards


def test_it_is_no_torch_dataloader_and_takes_no_other_dataset(mixed):
    assert not isinstance(loader_of(mixed), DataLoader)
    with pytest.raises(TypeError, match="needs a BucketedDataset, not a list"):
        BucketedDataLoader([1, 2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": -1}, "num_workers -1"),
        ({"prefetch": -1}, "prefetch -1"),
        ({"num_workers": 2, "prefetch": 0}, "prefetch 0 is below 1"),
        ({"timeout": -3}, "timeout -3"),
        ({"persistent_workers": True}, "persistent_workers"),
    ],
)
def test_arguments_that_make_no_sense(mixed, arguments, message):
    with pytest.raises(UserError, match=message):
        loader_of(mixed, **arguments)


# --- ends ---------------------------------------------------------------------------------------------


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name == "loader-prefetch"]


def test_threads_end_with_break_exception_close_and_del(mixed):
    for _ in loader_of(mixed):
        assert prefetch_threads()
        break
    assert not prefetch_threads()
    with pytest.raises(KeyError):
        for _ in loader_of(mixed):
            raise KeyError
    loader = loader_of(mixed)
    running = iter(loader)
    next(running)
    loader.close()
    assert not prefetch_threads()
    with pytest.raises(StopIteration):
        next(running)
    with loader_of(mixed) as loader:
        running = iter(loader)
        next(running)
    del loader, running
    assert not prefetch_threads()


def test_worker_processes_end_with_the_loader(mixed):
    loader = loader_of(mixed, num_workers=2, persistent_workers=True)
    ids_of(loader, 3)
    children = multiprocessing.active_children()
    assert len(children) == 2
    loader.close()
    for child in children:
        child.join(10)
        assert not child.is_alive()
    assert ids_of(loader, 2)  # and can begin anew
    loader.close()


def test_errors_of_the_reader_are_raised_in_the_loop(mixed, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(mixed, copy)
    shard = next(copy.rglob("*.mds"))
    shard.write_bytes(shard.read_bytes()[:-100])
    for way in ({}, {"prefetch": 0}, {"num_workers": 1}):
        loader = loader_of(copy, **way)
        with pytest.raises(UserError, match=r"shard\.00000\.mds"):
            ids_of(loader)
        loader.close()


def test_a_batch_that_does_not_come_is_a_timeout(mixed):
    def stuck(samples):
        time.sleep(1.5)

    with pytest.raises(TimeoutError, match=r"timeout=0\.3"):
        next(iter(loader_of(mixed, collate_fn=stuck, timeout=0.3)))


def test_a_forked_child_is_told_to_iterate_anew(mixed):
    running = iter(loader_of(mixed))
    expected = next(running).meta.sample_ids.tolist()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child():
        try:
            next(running)
        except RuntimeError as error:
            queue.put(str(error))
        queue.put(ids_of(loader_of(mixed), 1))

    process = context.Process(target=child)
    process.start()
    assert "iterate the loader anew" in queue.get(timeout=30)
    assert queue.get(timeout=30) == [expected]
    process.join(10)
    assert process.exitcode == 0


def test_metrics(mixed):
    loader = loader_of(mixed)
    assert loader.metrics()["padding_efficiency"] == 0
    padded = tokens = 0
    for batch in loader:
        padded += batch["input_ids"].numel()
        tokens += batch.meta.num_tokens
        last = loader.metrics()
    values = loader.metrics()
    assert all(isinstance(value, float) for value in values.values())
    assert values["padding_efficiency"] == tokens / padded
    assert sum(values[f"bucket_{k}_samples"] for k in range(4)) == 1000
    assert values["bytes_read"] > 0 and values["tokens_per_s"] > 0
    assert 0 <= values["data_wait_fraction"] <= 1
    assert last["shards_resident"] == 4
    assert set(values) >= {"queue_depth", "tokens_per_s"}


def test_a_pickled_dataset_iterates_the_same(mixed):
    dataset = BucketedDataset(local=str(mixed))
    copy = pickle.loads(pickle.dumps(dataset))
    assert ids_of(BucketedDataLoader(copy)) == ids_of(BucketedDataLoader(dataset))
    np.testing.assert_array_equal(copy[17]["input_ids"], dataset[17]["input_ids"])
