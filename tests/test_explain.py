"""What the command line says of batches and samples is what is delivered; the hardest are found."""

import json
import random

import numpy as np
import pytest
from datasets import make_dataset, mixed_lengths

from loader import BucketedDataLoader, BucketedDataset
from shardgen.cli import run

PLANNING = {"accumulate": 2, "seed": 5, "block_samples": 300}
FLAGS = ["--accumulate", "2", "--seed", "5", "--block-samples", "300", "--world-size", "3"]
NUM_SAMPLES = 800


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    lengths = mixed_lengths(NUM_SAMPLES, 200, seed=4)
    return make_dataset(tmp_path_factory.mktemp("set"), lengths, token_budget=500, num_buckets=3)


def loader_of(out, monkeypatch, rank, world=3, **change):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world))
    options = {**PLANNING, "columns": ["row"], **change}
    return BucketedDataLoader(BucketedDataset(local=str(out), **options))


def delivered(loader, rank, seen, most=None):
    """Rows by (epoch, step, micro-step, rank)."""
    for number, batch in enumerate(loader, start=1):
        meta = batch.meta
        place = (meta.epoch, meta.step, meta.micro_step, rank)
        rows = [] if meta.filler else batch["row"].tolist()
        seen[place] = list(zip(rows, meta.sample_ids.tolist(), meta.lengths.tolist(), strict=True))
        if number == most:
            break


@pytest.fixture
def explain(out, capsys):
    def call(*flags, code=0):
        assert run(["explain", str(out), *map(str, flags), "--json"]) == code
        captured = capsys.readouterr()
        return json.loads(captured.out.splitlines()[-1]) if code == 0 else captured.err

    return call


def assert_explained(explain, seen, flags, places):
    for epoch, step, micro_step, rank in places:
        told = explain(*flags, "--epoch", epoch, "--step", step, "--micro-step", micro_step, "--rank", rank)
        (batch,) = told["batches"]
        rows = [(s["source_row"], s["sample_id"], s["length"]) for s in batch["samples"]]
        assert rows == seen[epoch, step, micro_step, rank]
        for sample in batch["samples"][:2]:
            where = explain(*flags, "--sample", sample["sample_id"], "--epoch", epoch)
            assert where["source_row"] == sample["source_row"]
            expected = {
                "epoch": epoch,
                "step": step,
                "micro_step": micro_step,
                "rank": rank,
                "row": batch["samples"].index(sample),
                "block": told["block"],
            }
            assert where["deliveries"] == [expected]


def test_batches_and_samples_of_whole_epochs(out, monkeypatch, explain):
    seen = {}
    for rank in range(3):
        loader = loader_of(out, monkeypatch, rank)
        for _ in range(2):
            delivered(loader, rank, seen)
    places = random.Random(0).sample(sorted(seen), 20)
    assert_explained(explain, seen, FLAGS, places)


def test_batches_after_a_resume_with_other_options(out, monkeypatch, explain, tmp_path):
    seen, states = {}, []
    change = {"accumulate": 1, "token_budget": 300}
    for rank in range(3):
        loader = loader_of(out, monkeypatch, rank)
        delivered(loader, rank, seen, most=7)  # 3 steps of 2 and a batch that is lost
        del seen[0, 3, 0, rank]
        states.append(loader.state_dict())
    for rank in range(2):
        loader = loader_of(out, monkeypatch, rank, world=2, **change)
        loader.load_state_dict(states[0])
        delivered(loader, rank, seen)
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"loader": states[0]}))
    flags = ["--state", path, "--world-size", 2, "--accumulate", 1, "--token-budget", 300]
    places = random.Random(1).sample(sorted(p for p in seen if p[1] >= 3), 16)
    early = random.Random(1).sample(sorted(p for p in seen if p[1] < 3), 4)
    assert_explained(explain, seen, flags, places + early)
    # Without other options, the run continues as it was.
    whole = {}
    delivered(loader_of(out, monkeypatch, 1), 1, whole)
    assert_explained(explain, whole, ["--state", path], [(0, 5, 1, 1), (0, 1, 0, 1)])


def test_a_step_without_a_micro_step_shows_all(out, monkeypatch, explain):
    seen = {}
    delivered(loader_of(out, monkeypatch, 2), 2, seen)
    told = explain(*FLAGS, "--step", 1, "--rank", 2)
    assert [b["micro_step"] for b in told["batches"]] == [0, 1]
    for batch in told["batches"]:
        rows = [s["sample_id"] for s in batch["samples"]]
        assert rows == [i for _, i, _ in seen[0, 1, batch["micro_step"], 2]]


def test_a_state_alone(out, monkeypatch, explain, tmp_path):
    loader = loader_of(out, monkeypatch, 0)
    delivered(loader, 0, {}, most=6)
    state = loader.state_dict()
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    told = explain("--state", path)
    assert (told["epoch"], told["step"], told["block"], told["num_blocks"]) == (0, 3, 0, 3)
    assert told["samples_done_in_block"] == state["num_dealt"]
    total = told["samples_done_in_block"] + told["samples_left_in_block"]
    planner = loader.dataset.plans.planner(0)
    assert total == len(planner.pool(0).ids)
    assert [(s["steps"], s["world_size"], s["accumulate"]) for s in told["segments"]] == [(3, 3, 2)]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", 100000, "--rank", 0], "step 100000 is outside the"),
        (["--step", 0, "--rank", 3], "rank 3 is outside the 3 ranks"),
        (["--step", 0, "--rank", 0, "--micro-step", 2], "micro-step 2 is outside the 2"),
        (["--sample", NUM_SAMPLES], f"sample {NUM_SAMPLES} is outside 0..{NUM_SAMPLES - 1}"),
        (["--sample", 1, "--token-budget", 10], "raise the budget"),
    ],
)
def test_places_that_do_not_exist(explain, flags, message):
    error = explain(*FLAGS, *flags, code=1)
    assert error.startswith("error: ") and message in error


@pytest.mark.parametrize(
    "flags", [[], ["--step", 1], ["--rank", 1], ["--micro-step", 1, "--sample", 2], ["--state", "/nowhere"]]
)
def test_calls_that_ask_for_nothing_are_usage_errors(explain, flags):
    explain(*FLAGS, *flags, code=2)


def test_states_of_other_data_and_damaged_ones(out, explain, tmp_path, monkeypatch):
    loader = loader_of(out, monkeypatch, 0)
    delivered(loader, 0, {}, most=6)
    state, path = loader.state_dict(), tmp_path / "state.json"
    for content, message in (
        ("no json", "is not a JSON file"),
        ("[1]", "holds no loader state"),
        (json.dumps({**state, "fingerprint": "0" * 64}), "fingerprint 000000000000"),
        (json.dumps({**state, "digest": "0" * 16}), "replaying the state"),
    ):
        path.write_text(content)
        assert message in explain("--state", path, "--step", 4, "--rank", 0, code=1)


def test_steps_of_a_finished_block_are_not_told(out, monkeypatch, explain, tmp_path):
    loader = loader_of(out, monkeypatch, 0)
    for _ in loader:
        state = loader.state_dict()
        if state["block"] == 1:
            break
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    error = explain("--state", path, *FLAGS, "--step", 0, "--rank", 0, code=1)
    assert "in a block that the state has finished" in error


# --- the hardest batches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{}, {"padding": "boundary"}, {"layout": "packed"}, {"cost_budget": 4000}], ids=str
)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_preflight_batches_are_the_hardest_of_all_ranks(out, monkeypatch, change, n):
    orders, metas = {}, {}
    for rank in range(3):
        loader = loader_of(out, monkeypatch, rank, **change)
        cost_model = loader.dataset.plan_options.cost_model()
        for batch in loader:
            place = (batch.meta.step, batch.meta.micro_step, rank)
            if loader.dataset.plan_options.layout == "packed":
                rows, tokens = len(batch.meta.lengths), batch["input_ids"].numel()
                cost = sum(float(cost_model.cost(1, n)) for n in batch.meta.lengths)
            else:
                rows, tokens = batch["input_ids"].shape[0], batch["input_ids"].numel()
                cost = float(cost_model.cost(*batch["input_ids"].shape))
            for name, value in (("tokens", tokens), ("rows", rows), ("cost", cost)):
                orders.setdefault(name, []).append((-value, place))
            metas[place] = batch.meta.sample_ids.tolist()
    expected = []
    ranked = [[place for _, place in sorted(orders[name])] for name in ("tokens", "rows", "cost")]
    for turn in zip(*ranked, strict=True):
        expected += [place for place in dict.fromkeys(turn) if place not in expected]
    for rank in range(3):
        loader = loader_of(out, monkeypatch, rank, **change)
        before = loader.state_dict()
        found = loader.dataset.preflight_batches(n)
        assert [b.meta.sample_ids.tolist() for b in found] == [metas[place] for place in expected[:n]]
        assert loader.state_dict() == before
        first = next(iter(loader))
        assert first.meta.sample_ids.tolist() == metas[0, 0, rank]


def test_preflight_looks_at_the_pass_that_comes(out, monkeypatch):
    loader = loader_of(out, monkeypatch, 0, world=1)
    delivered(loader, 0, {}, most=20)
    state = loader.state_dict()
    resumed = loader_of(out, monkeypatch, 0, world=1)
    resumed.load_state_dict(state)
    rest = {}
    delivered(resumed, 0, rest)
    again = loader_of(out, monkeypatch, 0, world=1)
    again.load_state_dict(state)
    left = {i for rows in rest.values() for _, i, _ in rows}
    dataset = again.dataset
    dataset.load_state_dict(state)
    found = dataset.preflight_batches(10_000)
    assert {i for batch in found for i in batch.meta.sample_ids.tolist()} == left
    assert len(found) == len(rest)
    assert np.unique([b.meta.step for b in found]).min() == 10
