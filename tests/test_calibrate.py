"""Cost models fitted from measured times, and the script that measures."""

import itertools
import json
import os

import numpy as np
import pytest
from datasets import make_dataset, mixed_lengths
from hypothesis import given
from hypothesis import strategies as st

from loader import BucketedDataLoader, BucketedDataset
from shardgen.cost import CostModel, FittedCost, _non_negative
from shardgen.errors import UserError

GRID = np.array(list(itertools.product((1, 4, 16), (64, 256, 1024))))


@given(
    quadratic_length=st.one_of(st.none(), st.integers(200, 50_000)),
    overhead=st.integers(0, 20_000),
    microseconds=st.floats(0.01, 1000),
)
def test_exact_times_give_the_model_back(quadratic_length, overhead, microseconds):
    model = CostModel(quadratic_length=quadratic_length, overhead_tokens=overhead)
    fitted = CostModel.fit(*GRID.T, model.cost(*GRID.T) * microseconds * 1e-6)
    assert fitted.model == model
    assert fitted.seconds_per_token == pytest.approx(microseconds * 1e-6, rel=1e-6)
    assert fitted.seconds(3, 500) == pytest.approx(model.cost(3, 500) * microseconds * 1e-6, rel=1e-6)


def test_noise_is_averaged_and_small_batches_count_as_much_as_large_ones():
    rng = np.random.default_rng(0)
    model = CostModel(quadratic_length=2000, overhead_tokens=500)
    rows, length = np.repeat(GRID, 20, axis=0).T
    seconds = model.cost(rows, length) * 2e-6 * rng.normal(1, 0.03, len(rows))
    fitted = CostModel.fit(rows, length, seconds)
    held_out = np.array([(2, 128), (8, 512), (1, 1500), (32, 96)]).T
    error = fitted.seconds(*held_out) / (model.cost(*held_out) * 2e-6) - 1
    assert np.abs(error).max() < 0.02


@given(seconds=st.lists(st.floats(1e-3, 1.0), min_size=9, max_size=9))
def test_no_non_negative_coefficients_are_better(seconds):
    terms = (
        np.stack((GRID.prod(axis=1), GRID[:, 0] * GRID[:, 1] ** 2, np.ones(9)), axis=1)
        / (np.array(seconds)[:, None])
    )
    found = _non_negative(terms)
    assert (found >= 0).all()
    # The optimum of a convex problem: no slope along a positive coefficient, none downhill along a zero one.
    slope = terms.T @ (terms @ found - 1) / np.linalg.norm(terms, axis=0)
    assert (slope > -1e-6).all()
    assert np.abs(slope[found > 0]).max() < 1e-6


def test_times_that_no_model_explains_still_predict_positive_seconds():
    # Falling times per token: no overhead and no attention can be less than none.
    fitted = CostModel.fit(*GRID.T, GRID.prod(axis=1) ** 1.2 * 1e-6)
    assert fitted.model.overhead_tokens == 0
    assert (fitted.seconds(*GRID.T) > 0).all()


def test_attention_alone_gives_the_shortest_quadratic_length():
    fitted = CostModel.fit(*GRID.T, GRID[:, 0] * GRID[:, 1] ** 2 * 1e-9)
    assert fitted.model.quadratic_length == 1
    assert fitted.seconds(4, 1024) == pytest.approx(4 * 1024**2 * 1e-9, rel=0.02)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(1, 512), (2, 512), (4, 512), (8, 512)], "lengths 512..512 in batches of 512..4096 tokens"),
        ([(32, 128), (16, 256), (8, 512), (4, 1024)], "in batches of 4096..4096 tokens are too alike"),
        ([(8, 500), (8, 510), (9, 505), (9, 500)], "differ by a factor of 4"),
        ([(8, 500), (8, 500), (2, 100)], "fewer than 3 shapes"),
        ([], "fewer than 3 shapes"),
    ],
)
def test_measurements_that_are_too_alike_are_refused(shapes, message):
    rows, length = np.array(shapes, np.int64).reshape(-1, 2).T
    with pytest.raises(UserError, match=message):
        CostModel.fit(rows, length, CostModel(quadratic_length=800, overhead_tokens=70).cost(rows, length))


@pytest.mark.parametrize(
    ("batch_size", "length", "seconds", "message"),
    [
        ([1, 2], [3, 4], [1.0], "2 batch sizes, 2 lengths and 1 times"),
        ([1, 0, 2], [3, 4, 5], [1.0, 1.0, 1.0], "batch size 0.0 of measurement 1"),
        ([1, 1, 2], [3, 4, 5], [1.0, 1.0, float("nan")], "time nan of measurement 2"),
    ],
)
def test_values_that_are_no_measurements_are_refused(batch_size, length, seconds, message):
    with pytest.raises(UserError, match=message):
        CostModel.fit(batch_size, length, seconds)


def test_times_that_do_not_grow_are_refused():
    with pytest.raises(UserError, match="do not grow with the batch"):
        CostModel.fit(*GRID.T, np.full(len(GRID), 0.01))


def test_a_fitted_model_travels_through_its_file(tmp_path):
    fitted = CostModel.fit(*GRID.T, CostModel(quadratic_length=900, overhead_tokens=64).cost(*GRID.T) * 1e-6)
    assert isinstance(fitted, FittedCost)
    (tmp_path / "cost.json").write_text(json.dumps(fitted.model.to_json()))
    assert CostModel.load(tmp_path / "cost.json") == fitted.model


STEP = """
def step(batch_size, length):
    return (batch_size * length * (1 + length / 700) + 250) * 3e-6
"""


def test_the_script_fits_what_a_step_tells_and_predicts_a_real_epoch(tmp_path, python, root):
    """The step tells its time, so the figures are exact, held out or not, and of a whole epoch too."""
    out = make_dataset(tmp_path, mixed_lengths(200, 300, seed=1), token_budget=1000, num_buckets=3)
    (tmp_path / "steps.py").write_text(STEP)
    done = python(
        *(root / "scripts/calibrate.py", f"{tmp_path}/steps.py:step", "--out", tmp_path / "cost.json"),
        *("--token-budget", 1000, "--longest", 300, "--rounds", 3, "--epoch", out),
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    model = CostModel.load(tmp_path / "cost.json")
    assert model == CostModel(quadratic_length=700, overhead_tokens=250)
    held_out = done.stdout.split("held out:\n")[1].splitlines()
    shapes = [line for line in held_out if line.endswith("%") and line.split()[0].isdigit()]
    assert len(shapes) == 5
    for line in shapes:
        rows, length, measured, unit = line.split()[:4]
        assert unit == "ms"
        assert float(measured) == pytest.approx(float(model.cost(int(rows), int(length))) * 3e-3, abs=0.006)
        assert line.split()[-1] in ("+0.0%", "-0.0%")
    epoch = next(line for line in held_out if line.startswith("a real epoch"))
    assert epoch.endswith(("+0.0%", "-0.0%"))
    dataset = BucketedDataset(local=str(out))
    assert f"{len(BucketedDataLoader(dataset))} batches" in epoch
    # and the commands take the file
    simulated = python("-m", "shardgen", "simulate", out, "--cost-model", tmp_path / "cost.json", "--json")
    assert simulated.returncode == 0, simulated.stderr


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("steps", "names no function"),
        ("{folder}/steps.py:nothing", "has no function nothing"),
        ("{folder}/none.py:step", "there is no file"),
    ],
)
def test_a_step_that_cannot_be_found_is_one_line(tmp_path, python, root, step, message):
    (tmp_path / "steps.py").write_text(STEP)
    done = python(
        *(root / "scripts/calibrate.py", step.format(folder=tmp_path)),
        *("--token-budget", 100, "--longest", 30, "--out", tmp_path / "cost.json"),
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr
    assert not (tmp_path / "cost.json").exists()


@pytest.mark.distributed
def test_throughput_trains_all_strategies_on_two_ranks(tmp_path, python, root):
    """No figure of speed is asserted; only that everybody trained on the tokens of the plan."""
    out = make_dataset(tmp_path, mixed_lengths(400, 90, seed=1), token_budget=300, num_buckets=3)
    script = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        root / "scripts/throughput.py",
    )
    size = ("--vocabulary", 30_000, "--width", 32, "--layers", 1, "--rounds", 2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = python(*script, out, tmp_path / "result", *size, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "result/throughput.json").read_text())
    assert list(record["strategies"]) == ["sorted-static", "full-shuffle", "bucket-shuffle", "loader"]
    for figures in record["strategies"].values():
        assert figures["num_tokens"] == int(np.sum(mixed_lengths(400, 90, seed=1)))
        assert figures["tokens_per_s"] > 0 and figures["predicted_tokens_per_s"] > 0
    assert record["strategies"]["sorted-static"]["ratio"] == 1.0
    assert (tmp_path / "result/loss.png").read_bytes().startswith(b"\x89PNG")
