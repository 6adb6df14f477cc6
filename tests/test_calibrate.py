"""Cost models fitted from measured times, and the script that measures."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
