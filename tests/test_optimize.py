"""The boundary search: equal to brute force, never worse than any other way."""

import json
from itertools import combinations, pairwise

import numpy as np
import pytest
from corpora import DRAFTER_OPTIMAL, drafter_lengths, function_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from shardgen.alternatives import (
    ALTERNATIVES,
    coordinate_descent,
    equal_token,
    equal_width,
    geometric,
    hand_picked,
    quantile,
)
from shardgen.batching import cut_in_order, padded_tokens
from shardgen.buckets import Buckets, TokenBudget
from shardgen.cost import CostModel
from shardgen.errors import UserError
from shardgen.estimate import Estimator, sorted_efficiency
from shardgen.lengths import Histogram
from shardgen.optimize import optimize, partitions
from shardgen.static import static_partitions

MODELS = [CostModel(), CostModel(quadratic_length=50, overhead_tokens=40)]


def random_histogram(seed: int, num_distinct: int, longest: int) -> Histogram:
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.choice(np.arange(1, longest + 1), num_distinct, replace=False))
    return Histogram(lengths=lengths, counts=np.maximum(1, rng.geometric(0.02, num_distinct)))


def every_choice(histogram: Histogram, most: int):
    """All boundaries of at most so many buckets."""
    inner, last = histogram.lengths[:-1].tolist(), histogram.longest
    for number in range(min(most, len(histogram.lengths))):
        for chosen in combinations(inner, number):
            yield (0, *chosen, last)


def cheapest(histogram: Histogram, budget: TokenBudget, lookahead: int, most: int) -> float:
    estimator = Estimator(histogram, budget, lookahead)
    return min(estimator.cost(boundaries) for boundaries in every_choice(histogram, most))


# ---------------------------------------------------------------- equal to brute force


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("padding", ["longest", "boundary"])
@pytest.mark.parametrize(("seed", "num_distinct"), [(0, 40), (1, 25), (2, 12), (3, 3)])
def test_it_is_the_best_of_all_choices(seed, num_distinct, padding, model):
    histogram = random_histogram(seed, num_distinct, 120)
    budget = TokenBudget(tokens=700, cost_model=model, padding=padding)
    for num_buckets in (1, 2, 3, 4) if num_distinct < 40 else (3,):
        result = optimize(histogram, num_buckets=num_buckets, budget=budget, lookahead=1)
        found = Estimator(histogram, budget, 1).cost(result.boundaries)
        assert found == pytest.approx(cheapest(histogram, budget, 1, num_buckets), rel=1e-12)
        assert result.grid_step == 1


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("lookahead", "num_distinct"), [(4, 14), (32, 9)])
def test_it_is_the_best_of_all_choices_for_a_lookahead(lookahead, num_distinct, model):
    histogram = random_histogram(5, num_distinct, 120)
    histogram = Histogram(lengths=histogram.lengths, counts=histogram.counts * 50)
    budget = TokenBudget(tokens=700, cost_model=model)
    for num_buckets in (2, 4):
        result = optimize(
            histogram, num_buckets=num_buckets, budget=budget, optimize_for_lookahead=lookahead, lookahead=1
        )
        found = Estimator(histogram, budget, lookahead).cost(result.boundaries)
        assert found == pytest.approx(cheapest(histogram, budget, lookahead, num_buckets), rel=1e-9)


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_partitions_are_the_cheapest_of_all(seed, num_cells):
    cost = np.random.default_rng(seed).integers(0, 20, (num_cells + 1, num_cells + 1)).astype(float)
    cost[np.tril_indices(num_cells + 1)] = np.inf
    found = list(partitions(cost))
    assert len(found) == num_cells
    for number, (ends, total) in enumerate(found, start=1):
        assert len(ends) == number and ends[-1] == num_cells
        assert total == sum(cost[a, b] for a, b in pairwise([0, *ends.tolist()]))
        brute = min(
            sum(cost[a, b] for a, b in pairwise((0, *inner, num_cells)))
            for inner in combinations(range(1, num_cells), number - 1)
        )
        assert total == brute


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("seed", "tokens"), [(0, 3000), (1, 3000), (2, 50_000)])
def test_static_shapes_are_best_at_full_resolution(seed, tokens, model):
    rng = np.random.default_rng(seed)
    lengths = np.unique(rng.integers(1, 3000, 700))
    histogram = Histogram(lengths=lengths, counts=rng.integers(1, 30, len(lengths)))
    budget = TokenBudget(tokens=tokens, cost_model=model, padding="boundary")
    # The same programme without any pruning: all pairs of ends at once.
    up_to = np.append(0, np.cumsum(histogram.counts))
    rows, padded = budget.max_rows(lengths), budget.padded_length(lengths)
    batches = -((up_to[None, :-1].T - up_to[None, 1:]) // rows)  # (i, j - 1)
    cost = np.full((len(up_to), len(up_to)), np.inf)
    cost[:-1, 1:] = np.where(batches > 0, batches * model.cost(rows, padded), np.inf)
    searches = zip(static_partitions(histogram, budget), partitions(cost), range(5), strict=False)
    for (ends, found), (_, best), number in searches:
        assert found == best
        assert len(ends) == number + 1
        boundaries = (0, *lengths[ends - 1].tolist())
        assert Estimator(histogram, budget, 1).cost(boundaries) == pytest.approx(best)


# ---------------------------------------------------------------- never worse


histograms = st.dictionaries(st.integers(1, 400), st.integers(1, 3000), min_size=1, max_size=60).map(
    lambda counts: Histogram(
        lengths=np.array(sorted(counts)), counts=np.array([counts[n] for n in sorted(counts)])
    )
)


@given(
    histograms,
    st.integers(1, 6),
    st.integers(400, 9000),
    st.sampled_from(["longest", "boundary"]),
    st.sampled_from(MODELS),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_no_other_way_is_better(histogram, num_buckets, tokens, padding, model, seed):
    budget = TokenBudget(tokens=tokens, cost_model=model, padding=padding)
    result = optimize(histogram, num_buckets=num_buckets, budget=budget, lookahead=1)
    cost = Estimator(histogram, budget, 1).cost
    found = cost(result.boundaries)
    for choose in (hand_picked, quantile, equal_token, geometric, equal_width):
        assert found <= cost(choose(histogram, num_buckets)) * (1 + 1e-12), choose.__name__
    rng = np.random.default_rng(seed)
    inner = histogram.lengths[:-1]
    for _ in range(20):
        some = rng.choice(inner, min(num_buckets - 1, len(inner)), replace=False)
        start = (0, *sorted(some.tolist()), histogram.longest)
        descended = coordinate_descent(start, histogram, cost, step=max(1, len(inner) // 4))
        assert cost(descended) <= cost(start)
        assert found <= cost(descended) * (1 + 1e-12)


@pytest.mark.parametrize("num_buckets", [2, 8])
def test_a_grid_of_cells_is_as_good_as_all_lengths(num_buckets, monkeypatch):
    lengths = np.random.default_rng(0).integers(20, 320, 200_000)
    histogram, budget = Histogram.from_lengths(lengths), TokenBudget(tokens=4096)
    cost = Estimator(histogram, budget, 1).cost
    monkeypatch.setattr("shardgen.optimize.SHUFFLED_GRID", 300)
    exact = optimize(histogram, num_buckets=num_buckets, budget=budget, lookahead=1)
    monkeypatch.setattr("shardgen.optimize.SHUFFLED_GRID", 40)
    coarse = optimize(histogram, num_buckets=num_buckets, budget=budget, lookahead=1)
    assert (exact.grid_step, coarse.grid_step > 5) == (1, True)
    assert cost(exact.boundaries) <= cost(coarse.boundaries) <= cost(exact.boundaries) * (1 + 2e-5)


def packed(lengths, boundaries, budget) -> float:
    """Efficiency of a plain bucket shuffle, packed."""
    bucket = Buckets(boundaries=boundaries).assign(lengths)
    padded = 0
    for number in range(len(boundaries) - 1):
        rows = lengths[bucket == number]  # in a random order already
        padded += int(padded_tokens(rows, cut_in_order(rows, budget), budget).sum())
    return int(lengths.sum()) / padded


def test_the_published_optimum_is_found():
    lengths, budget = drafter_lengths(), TokenBudget(tokens=49152)
    histogram = Histogram.from_lengths(lengths)
    result = optimize(histogram, num_buckets=6, budget=budget)
    assert result.padding_efficiency == pytest.approx(0.868, abs=0.003)
    assert packed(lengths, result.boundaries, budget) >= packed(lengths, DRAFTER_OPTIMAL, budget) - 0.0005
    assert result.padding_efficiency == pytest.approx(packed(lengths, result.boundaries, budget), abs=0.003)
    curve = dict(result.curve)
    assert [curve[k] for k in (8, 12, 16)] == pytest.approx([0.898, 0.929, 0.945], abs=0.003)
    reached = {name: other.padding_efficiency for name, other in result.alternatives.items()}
    assert reached["hand"] == pytest.approx(0.835, abs=0.003)
    assert reached["equal_token"] == pytest.approx(0.844, abs=0.003)
    assert result.lookahead_padding_efficiency == pytest.approx(0.994, abs=0.001)
    # Nothing near is better: the estimate's optimum is one.
    estimator = Estimator(histogram, budget, 1)
    rng = np.random.default_rng(0)
    for _ in range(200):
        moved = np.array(result.boundaries[1:-1]) + rng.integers(-60, 61, 5)
        assert estimator.efficiency((0, *moved.tolist(), 6534)) <= result.padding_efficiency


# ---------------------------------------------------------------- the result


def test_the_numbers_fit_together():
    lengths = np.minimum(function_lengths(), 8192)
    histogram, budget = Histogram.from_lengths(lengths), TokenBudget(tokens=16384)
    result = optimize(histogram, num_buckets=5, budget=budget, lookahead=16)
    bucket = Buckets(boundaries=result.boundaries).assign(lengths)
    for number, stats in enumerate(result.buckets):
        inside = lengths[bucket == number]
        assert (stats.lower, stats.upper) == result.boundaries[number : number + 2]
        assert (stats.num_samples, stats.num_tokens) == (len(inside), inside.sum())
        assert stats.mean_length == pytest.approx(inside.mean())
        assert stats.batch_size == 16384 // stats.upper
    assert sum(s.num_tokens / s.padding_efficiency for s in result.buckets) == pytest.approx(
        result.num_tokens / result.padding_efficiency
    )
    efficiencies = [efficiency for _, efficiency in result.curve]
    assert efficiencies == sorted(efficiencies)
    assert dict(result.curve)[5] == result.padding_efficiency
    assert result.padding_efficiency < result.lookahead_padding_efficiency <= result.lower_bound_efficiency
    assert result.lower_bound_efficiency == sorted_efficiency(histogram, budget, result.boundaries)
    assert result.notes == ()


def test_json_has_these_keys_and_plain_values():
    histogram = random_histogram(0, 30, 100)
    result = optimize(histogram, num_buckets=3, budget=TokenBudget(tokens=700))
    report = json.loads(json.dumps(result.to_json()))
    assert list(report) == [
        "num_samples",
        "num_tokens",
        "token_budget",
        "boundaries",
        "padding_efficiency",
        "lookahead_padding_efficiency",
        "buckets",
        "curve",
        "alternatives",
        "lower_bound_efficiency",
        "grid_step",
        "seconds",
    ]
    assert report["boundaries"] == list(result.boundaries)
    assert list(report["buckets"][0]) == [
        "lower",
        "upper",
        "num_samples",
        "num_tokens",
        "mean_length",
        "batch_size",
        "padding_efficiency",
    ]
    assert report["curve"][2] == {"num_buckets": 3, "padding_efficiency": result.padding_efficiency}
    assert list(report["alternatives"]) == ["hand", "quantile", "equal_token", "geometric"]
    assert list(report["alternatives"]["hand"]) == ["boundaries", "padding_efficiency"]


def test_auto_stops_where_the_next_bucket_gains_little():
    lengths, budget = np.random.default_rng(1).integers(1, 1000, 50_000), TokenBudget(tokens=8192)
    result = optimize(Histogram.from_lengths(lengths), num_buckets="auto", budget=budget)
    count = len(result.boundaries) - 1
    curve = [efficiency for _, efficiency in result.curve]
    gains = np.diff(curve)
    assert (gains[: count - 1] >= 0.005 - 1e-4).all() and gains[count - 1] < 0.005
    fixed = optimize(Histogram.from_lengths(lengths), num_buckets=count, budget=budget)
    assert fixed.boundaries == result.boundaries


def test_a_thousand_times_the_samples_have_the_same_boundaries():
    histogram = Histogram.from_lengths(np.minimum(function_lengths(), 8192))
    budget = TokenBudget(tokens=16384)
    many = Histogram(lengths=histogram.lengths, counts=histogram.counts * 50_000)
    assert many.num_samples == 10**9
    few = optimize(histogram, num_buckets=6, budget=budget)
    more = optimize(many, num_buckets=6, budget=budget)
    # Not quite the same question: without replacement few samples differ a little from endless ones.
    assert more.padding_efficiency == pytest.approx(few.padding_efficiency, abs=0.005)
    assert np.abs(np.log(np.array(more.boundaries[1:]) / np.array(few.boundaries[1:]))).max() < 0.15


@pytest.mark.parametrize("padding", ["longest", "boundary"])
def test_a_million_times_a_million_tokens(padding, recwarn):
    lengths = np.unique(np.geomspace(1, 10**6, 150).astype(np.int64))
    histogram = Histogram(lengths=lengths, counts=np.full(len(lengths), 10**7))
    budget = TokenBudget(
        tokens=10**6, padding=padding, cost_model=CostModel(quadratic_length=8192, overhead_tokens=10**5)
    )
    result = optimize(histogram, num_buckets=6, budget=budget)
    assert result.num_tokens == sum(n * 10**7 for n in lengths.tolist()) > 10**12
    assert all(np.isfinite(efficiency) and 0 < efficiency <= 1 for _, efficiency in result.curve)
    assert not recwarn.list


# ---------------------------------------------------------------- odd inputs


@pytest.mark.parametrize("padding", ["longest", "boundary"])
@pytest.mark.parametrize("num_buckets", [6, "auto"])
def test_one_sample_and_one_length(num_buckets, padding):
    budget = TokenBudget(tokens=100, padding=padding)
    for counts in ([1], [10_000]):
        histogram = Histogram(lengths=np.array([50]), counts=np.array(counts))
        result = optimize(histogram, num_buckets=num_buckets, budget=budget)
        assert result.boundaries == (0, 50)
        if num_buckets == 6:
            assert result.notes == ("1 bucket instead of 6: all samples have one length",)
    assert result.padding_efficiency == 1.0


def test_fewer_lengths_than_buckets_make_fewer_buckets_and_say_so():
    histogram = Histogram(lengths=np.array([5, 9, 30]), counts=np.array([100, 200, 300]))
    result = optimize(histogram, num_buckets=6, budget=TokenBudget(tokens=100))
    assert result.boundaries == (0, 5, 9, 30)
    assert result.padding_efficiency == 1.0
    assert result.notes == ("3 buckets instead of 6: there are only 3 distinct lengths",)


def test_static_shapes_are_fewer_where_filling_costs_more():
    histogram = Histogram(lengths=np.array([99, 100]), counts=np.array([1, 9]))
    budget = TokenBudget(tokens=1000, padding="boundary")
    result = optimize(histogram, num_buckets=2, budget=budget)
    assert result.boundaries == (0, 100)
    assert result.notes == ("1 bucket instead of 2: a further one would cost more than it saves",)


def test_given_boundaries_are_evaluated_by_the_same_model():
    histogram, budget = random_histogram(7, 60, 200), TokenBudget(tokens=900)
    best = optimize(histogram, num_buckets=3, budget=budget)
    again = optimize(histogram, num_buckets=6, budget=budget, boundaries=best.boundaries)
    assert (again.boundaries, again.padding_efficiency) == (best.boundaries, best.padding_efficiency)
    assert again.notes == ()
    worse = optimize(histogram, num_buckets=6, budget=budget, boundaries=(3, 40, 500))
    assert worse.boundaries == (0, 3, 40, 500)
    assert worse.padding_efficiency < best.padding_efficiency
    assert worse.notes[0].startswith(f"the best 3 boundaries would be {best.boundaries[1]},")
    empty = optimize(histogram, num_buckets=6, budget=budget, boundaries=(300,)).buckets
    assert [(s.lower, s.upper) for s in empty] == [(0, 300)]


def test_an_empty_bucket_keeps_its_place():
    histogram = Histogram(lengths=np.array([10, 90]), counts=np.array([5, 5]))
    result = optimize(histogram, num_buckets=6, budget=TokenBudget(tokens=100), boundaries=(10, 50, 90))
    middle = result.buckets[1]
    assert (middle.lower, middle.upper, middle.num_samples, middle.num_tokens) == (10, 50, 0, 0)
    assert (middle.mean_length, middle.padding_efficiency, middle.batch_size) == (0.0, 1.0, 2)


def test_refusals_name_the_value_and_the_limit():
    histogram = Histogram(lengths=np.array([10, 120]), counts=np.array([5, 3]))
    with pytest.raises(UserError, match=r"length 120 .*token_budget 100.*3 samples"):
        optimize(histogram, num_buckets=2, budget=TokenBudget(tokens=100))
    with pytest.raises(UserError, match="0 buckets"):
        optimize(histogram, num_buckets=0, budget=TokenBudget(tokens=200))
    with pytest.raises(UserError, match="lookahead 0"):
        optimize(histogram, num_buckets=2, budget=TokenBudget(tokens=200), lookahead=0)
    with pytest.raises(UserError, match=r"boundary 300 .*token_budget 200"):
        optimize(
            histogram,
            num_buckets=2,
            budget=TokenBudget(tokens=200, padding="boundary"),
            boundaries=(10, 300),
        )


# ---------------------------------------------------------------- alternatives


def test_alternatives_are_what_they_say():
    histogram = Histogram(lengths=np.arange(1, 5001), counts=np.full(5000, 2))
    assert hand_picked(histogram, 6) == (0, 512, 1024, 2048, 3072, 4096, 5000)
    assert quantile(histogram, 4) == (0, 1250, 2500, 3750, 5000)
    assert equal_width(histogram, 4) == (0, 1250, 2500, 3750, 5000)
    assert geometric(histogram, 2) == (0, 70, 5000)
    tokens = [
        histogram.lengths[a:b].sum() for a, b in pairwise(equal_token(histogram, 4))
    ]  # lengths are their own places
    assert max(tokens) - min(tokens) < 2 * 5000


@given(histograms, st.integers(1, 70))
def test_alternatives_are_boundaries_of_at_most_that_many_buckets(histogram, num_buckets):
    for choose in (*ALTERNATIVES.values(), equal_width):
        boundaries = choose(histogram, num_buckets)
        assert boundaries[0] == 0 and boundaries[-1] == histogram.longest
        assert all(a < b for a, b in pairwise(boundaries))
        assert len(boundaries) - 1 <= num_buckets
