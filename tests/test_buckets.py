"""Buckets, budgets, costs and cuts."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardgen.batching import cut_in_order, padded_tokens, window_counts
from shardgen.buckets import Buckets, TokenBudget, assign
from shardgen.cost import CostModel
from shardgen.errors import UserError


def test_upper_bounds_are_inclusive():
    assert assign(np.array([1, 10, 11, 20]), (0, 10, 20)).tolist() == [0, 0, 1, 1]
    with pytest.raises(UserError, match=r"sample 1 has length 21, outside the boundaries 0\.\.20 \(2 such"):
        assign(np.array([20, 21, 30]), (0, 10, 20))
    with pytest.raises(UserError, match="sample 0 has length 0"):
        assign(np.array([0]), (0, 10))


@given(st.sets(st.integers(1, 100), min_size=1), st.lists(st.integers(1, 150), min_size=1))
def test_assign_is_the_definition(bounds, lengths):
    buckets = Buckets.from_upper_bounds(sorted(bounds), max(lengths))
    for k, n in zip(buckets.assign(lengths), lengths, strict=True):
        assert buckets.boundaries[k] < n <= buckets.boundaries[k + 1]
    assert (
        buckets.counts(lengths).sum() == len(lengths) and len(buckets.counts(lengths)) == buckets.num_buckets
    )


def test_bounds_as_people_write_them():
    assert Buckets.from_upper_bounds([10, 20], 25).boundaries == (0, 10, 20, 25)
    assert Buckets.from_upper_bounds([0, 10, 20], 20).boundaries == (0, 10, 20)
    assert Buckets.from_upper_bounds([10, 20], 5).boundaries == (0, 10, 20)
    for wrong in ((0,), (5, 10), (0, 10, 10), (0, 10, 5)):
        with pytest.raises(UserError, match="boundaries"):
            Buckets(boundaries=wrong)


@given(
    st.integers(1, 5000),
    st.integers(1, 300),
    st.sampled_from([None, 1, 7]),
    st.sampled_from([1, 8]),
    st.sampled_from([None, 500, 3000]),
    st.sampled_from([None, 64]),
    st.sampled_from([0, 50]),
)
def test_max_rows_is_the_largest_that_fits(
    tokens, length, max_batch_size, multiple, cost_budget, quadratic, overhead
):
    model = CostModel(quadratic_length=quadratic, overhead_tokens=overhead)
    budget = TokenBudget(
        tokens=tokens,
        max_batch_size=max_batch_size,
        pad_to_multiple_of=multiple,
        cost_budget=cost_budget,
        cost_model=model,
    )
    padded = -(-length // multiple) * multiple

    def fits(rows):
        cost = rows * padded * ((quadratic or 1) + (padded if quadratic else 0)) + overhead * (quadratic or 1)
        return (
            rows * padded <= tokens
            and (max_batch_size is None or rows <= max_batch_size)
            and (cost_budget is None or cost <= cost_budget * (quadratic or 1))
        )

    rows = int(budget.max_rows(length))
    assert (rows == 0 or fits(rows)) and not fits(rows + 1)
    allowed = budget.longest_allowed
    assert (allowed == 0 or budget.max_rows(allowed) >= 1) and budget.max_rows(allowed + 1) == 0


def test_too_long_a_sample_is_named():
    budget = TokenBudget(tokens=512, pad_to_multiple_of=8)
    with pytest.raises(
        UserError,
        match=r"sample 1 has 600 tokens but token_budget 512 with pad_to_multiple_of 8 .* 512 \(2 samples",
    ):
        budget.check_longest(np.array([512, 600, 513]))
    budget.check_longest(np.array([512]))
    for field in ("tokens", "max_batch_size", "pad_to_multiple_of", "cost_budget"):
        with pytest.raises(UserError, match="below 1"):
            TokenBudget(**{"tokens": 10, field: 0})


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200), st.integers(50, 300))
def test_cut_in_order_is_greedy_with_a_running_maximum(lengths, tokens):
    budget = TokenBudget(tokens=tokens)
    expected, longest = [0], 0
    for i, n in enumerate(lengths):
        longest = max(longest, n)
        if (i - expected[-1] + 1) * longest > tokens:
            expected.append(i)
            longest = n
    expected.append(len(lengths))
    starts = cut_in_order(np.array(lengths), budget)
    assert starts.tolist() == expected
    padded = [(b - a) * max(lengths[a:b]) for a, b in pairwise(expected)]
    assert padded_tokens(np.array(lengths), starts, budget).tolist() == padded


def test_cost_is_the_formula_and_scaled_is_exact():
    model = CostModel(quadratic_length=8192, overhead_tokens=100)
    assert model.cost(3, 4096) == 3 * 4096 * 1.5 + 100
    assert model.scaled(3, 4096) == 3 * 4096 * (8192 + 4096) + 100 * 8192
    assert CostModel().cost(3, 4096) == 3 * 4096 and CostModel().scale == 1
    # 10^6 rows of 10^6 tokens: far beyond 32 bits, well inside 64.
    assert int(CostModel().scaled(10**6, 10**6)) == 10**12
    with pytest.raises(UserError, match="quadratic_length 0"):
        CostModel(quadratic_length=0)


def test_cost_model_files(tmp_path):
    path = tmp_path / "cost.json"
    model = CostModel(quadratic_length=4096, overhead_tokens=7)
    path.write_text(json.dumps(model.to_json()))
    assert CostModel.load(path) == model
    path.write_text('{"quadratic": 3}')
    with pytest.raises(UserError, match=r"unknown fields \['quadratic'\]"):
        CostModel.load(path)
    with pytest.raises(UserError, match="cannot be read"):
        CostModel.load(tmp_path / "missing.json")


def test_windows_are_worth_the_lookahead():
    alike = window_counts(np.array([6400, 6400]), np.array([64.0, 64.0]), 8)
    assert alike.tolist() == [8, 8]
    many_rows = window_counts(np.array([16_000, 1000]), np.array([100.0, 100.0]), 10)
    assert many_rows[0] > 10 > many_rows[1] >= 1
    assert window_counts(np.array([3, 0]), np.array([0.1, 0.0]), 32).tolist() == [1, 1]
