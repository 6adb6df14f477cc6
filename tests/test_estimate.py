"""Estimates of what buckets will cost, against exact chains, against packed rows and against the loader."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from corpora import DRAFTER_OPTIMAL, DRAFTER_PUBLISHED, drafter_lengths, function_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.plan import EpochOptions, EpochPlanner, PlanOptions, plan_block
from loader.simulate import corpus_of_lengths
from shardgen.batching import cut_in_order, padded_tokens
from shardgen.buckets import Buckets, TokenBudget
from shardgen.cells import Cells, even_ends
from shardgen.cost import CostModel
from shardgen.errors import UserError
from shardgen.estimate import Estimator, check_fits, estimate_efficiency, sorted_efficiency
from shardgen.lengths import Histogram
from shardgen.optimize import optimize
from shardgen.shuffled import shuffled_rows
from shardgen.static import static_batches

# ---------------------------------------------------------------- order statistics, exactly


def chain(lengths, chances, budget: TokenBudget):
    """Rows, padded tokens and cost of a batch of endless random rows, from its Markov chain."""
    limit = dict(zip(lengths, budget.max_rows(lengths).tolist(), strict=True))
    padded = dict(zip(lengths, budget.padded_length(lengths).tolist(), strict=True))
    model = budget.cost_model
    first = dict(zip(lengths, chances, strict=True))
    for _ in range(400):
        states, opens = {(1, x): p for x, p in first.items()}, defaultdict(float)
        rows = tokens = cost = 0.0
        while states:
            following = defaultdict(float)
            for (n, longest), p in states.items():
                for y, q in zip(lengths, chances, strict=True):
                    if n + 1 <= limit[max(longest, y)]:
                        following[n + 1, max(longest, y)] += p * q
                    else:
                        opens[y] += p * q
                        rows += p * q * n
                        tokens += p * q * n * padded[longest]
                        cost += p * q * float(model.cost(n, padded[longest]))
            states = following
        first = opens
    return rows, tokens, cost


@pytest.mark.parametrize("limits", [{}, {"max_batch_size": 4}, {"pad_to_multiple_of": 4}])
@pytest.mark.parametrize(
    ("lengths", "weights"),
    [
        ([2, 3, 5, 9], [4, 3, 2, 1]),
        ([1, 12], [9, 1]),
        ([1, 11, 12], [1, 1, 5]),
        ([6, 7], [1, 1]),
        ([2, 3, 4, 5, 6, 7, 8], [1, 5, 1, 5, 1, 5, 1]),
    ],
)
def test_a_shuffled_bucket_is_its_markov_chain(lengths, weights, limits, monkeypatch):
    model = CostModel(quadratic_length=7, overhead_tokens=3)
    budget = TokenBudget(tokens=24, cost_model=model, **limits)
    rows, tokens, cost = chain(lengths, np.array(weights) / sum(weights), budget)
    histogram = Histogram(lengths=np.array(lengths), counts=np.array(weights) * 10**9)
    cells = Cells.gather(histogram, budget, even_ends(histogram, 100))
    # The distribution of first rows is iterated: few steps come near, many arrive.
    for steps, tolerance in ((None, 2e-3), (200, 1e-8)):
        if steps:
            monkeypatch.setattr("shardgen.shuffled.FIRST_ROW_STEPS", steps)
        found = shuffled_rows(cells, cells.num_cells, np.array([0]))
        assert found[0] == pytest.approx(rows, rel=tolerance)
        assert found[1] == pytest.approx(tokens / rows, rel=tolerance)
        assert found[2] + model.overhead_tokens / found[0] == pytest.approx(cost / rows, rel=tolerance)


def test_batches_of_thousands_of_rows_are_counted_in_steps(monkeypatch):
    lengths = np.arange(1, 400)
    histogram = Histogram(lengths=lengths, counts=10**9 // lengths**2 + 1)
    buckets = Buckets(boundaries=(0, 40, 399))
    for tokens in (400, 20_000, 400_000):
        budget = TokenBudget(tokens=tokens)
        quick = estimate_efficiency(histogram, buckets, budget, 1)
        with monkeypatch.context() as patch:
            patch.setattr("shardgen.shuffled.SIZE_STEPS", 10**9)
            assert quick == pytest.approx(estimate_efficiency(histogram, buckets, budget, 1), abs=1e-4)


# ---------------------------------------------------------------- the estimate is honest


def distributions():
    rng = np.random.default_rng(1)
    size = 60_000
    modes = np.where(rng.random(size) < 0.7, rng.normal(200, 30, size), rng.normal(4000, 300, size))
    return {
        "bimodal": np.clip(modes, 1, 8000).astype(np.int64),
        "power law": np.minimum(20 * rng.random(size) ** (-1 / 1.2), 16384).astype(np.int64),
        "uniform": rng.integers(1, 4097, size),
        "few values": rng.choice([100, 150, 400, 1000, 1100, 3000], size, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1]),
        "constant": np.full(size, 777),
        "functions": np.minimum(function_lengths(), 8192),
    }


DISTRIBUTIONS = distributions()


def packed_efficiency(lengths, options: PlanOptions, seeds=1) -> float:
    """What the loader's plans of an epoch reach, the mean over seeds."""
    corpus = corpus_of_lengths(lengths, options.boundaries, 64 << 20)
    reached = []
    for seed in range(seeds):
        epoch_options = EpochOptions(seed=seed)
        planner = EpochPlanner(corpus, epoch_options, 0)
        padded = 0
        for block in range(planner.num_blocks):
            plan = plan_block(corpus, planner.pool(block), options, epoch_options, 0)
            padded += int((plan.batch_num_rows * plan.batch_padded_length).sum())
        reached.append(int(lengths.sum()) / padded)
    return float(np.mean(reached))


def check_honest(lengths, budget: TokenBudget, boundaries, lookahead: int, seeds: int) -> None:
    estimate = estimate_efficiency(
        Histogram.from_lengths(lengths), Buckets(boundaries=boundaries), budget, lookahead
    )
    options = PlanOptions(
        boundaries=boundaries,
        token_budget=budget.tokens,
        max_batch_size=budget.max_batch_size,
        pad_to_multiple_of=budget.pad_to_multiple_of,
        lookahead=lookahead,
    )
    packed = packed_efficiency(lengths, options, seeds)
    assert estimate == pytest.approx(packed, abs=0.003 if lookahead == 1 else 0.005)


@pytest.mark.parametrize("lookahead", [1, 4, 16, 64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_estimate_is_what_the_loader_packs(name, lookahead):
    lengths = DISTRIBUTIONS[name]
    budget = TokenBudget(tokens=16384)
    boundaries = optimize(Histogram.from_lengths(lengths), num_buckets=6, budget=budget).boundaries
    check_honest(lengths, budget, boundaries, lookahead, seeds=4 if lookahead < 64 else 2)


@pytest.mark.parametrize("lookahead", [1, 4, 16, 64])
@pytest.mark.parametrize("boundaries", [DRAFTER_OPTIMAL, DRAFTER_PUBLISHED])
def test_the_estimate_holds_on_a_real_training_set(boundaries, lookahead):
    check_honest(drafter_lengths(), TokenBudget(tokens=49152), boundaries, lookahead, seeds=1)


@pytest.mark.parametrize("lookahead", [1, 4, 16, 64])
@pytest.mark.parametrize("limits", [{"pad_to_multiple_of": 64}, {"max_batch_size": 40}])
def test_the_estimate_keeps_all_limits(limits, lookahead):
    lengths = DISTRIBUTIONS["uniform"]
    check_honest(lengths, TokenBudget(tokens=16384, **limits), (0, 500, 1500, 4096), lookahead, seeds=2)


def test_a_long_lookahead_is_sorted_packing():
    lengths = DISTRIBUTIONS["bimodal"]
    histogram, budget = Histogram.from_lengths(lengths), TokenBudget(tokens=16384)
    boundaries = (0, histogram.longest)
    estimate = estimate_efficiency(histogram, Buckets(boundaries=boundaries), budget, 10**6)
    assert estimate == pytest.approx(sorted_efficiency(histogram, budget, boundaries), abs=1e-3)


def test_lookahead_never_looks_worse():
    for lengths in DISTRIBUTIONS.values():
        histogram, budget = Histogram.from_lengths(lengths), TokenBudget(tokens=16384)
        buckets = Buckets.from_upper_bounds([500], histogram.longest)
        ladder = [estimate_efficiency(histogram, buckets, budget, w) for w in (1, 4, 16, 64)]
        assert all(b >= a - 1e-9 for a, b in pairwise(ladder)), ladder


# ---------------------------------------------------------------- small sets


@pytest.mark.parametrize("lookahead", [1, 8])
def test_a_bucket_of_less_than_a_batch_is_one_batch(lookahead):
    histogram = Histogram(lengths=np.array([3, 5, 8]), counts=np.array([1, 2, 1]))
    buckets = Buckets(boundaries=(0, 5, 8))
    assert estimate_efficiency(histogram, buckets, TokenBudget(tokens=100), lookahead) == pytest.approx(
        21 / (3 * 5 + 8)
    )


@pytest.mark.parametrize("padding", ["longest", "boundary"])
@pytest.mark.parametrize("lookahead", [1, 8])
def test_one_sample_has_no_padding(lookahead, padding):
    histogram = Histogram.from_lengths(np.array([40]))
    budget = TokenBudget(tokens=79, padding=padding)
    assert estimate_efficiency(histogram, Buckets(boundaries=(0, 40)), budget, lookahead) == 1.0


@given(
    st.dictionaries(st.integers(1, 60), st.integers(1, 500), min_size=1, max_size=20),
    st.integers(60, 700),
    st.sampled_from([1, 2, 5, 40]),
    st.sampled_from([1, 8]),
)
@settings(max_examples=150)
def test_estimates_stay_between_nothing_and_the_whole(counts, tokens, lookahead, multiple):
    histogram = Histogram(
        lengths=np.array(sorted(counts)), counts=np.array([counts[n] for n in sorted(counts)])
    )
    budget = TokenBudget(tokens=max(tokens, 64), pad_to_multiple_of=multiple)
    efficiency = estimate_efficiency(histogram, Buckets(boundaries=(0, histogram.longest)), budget, lookahead)
    # Padded to at least its own multiple, at most to the longest.
    alone = histogram.num_tokens / float(histogram.counts @ budget.padded_length(histogram.lengths))
    worst = histogram.num_tokens / (histogram.num_samples * float(budget.padded_length(histogram.longest)))
    assert worst - 1e-9 <= efficiency <= alone + 1e-9


def test_small_sets_are_estimated_too():
    rng = np.random.default_rng(3)
    for size in (5, 17, 60, 200):
        lengths = rng.integers(10, 100, size)
        budget = TokenBudget(tokens=1000)
        padded = []
        for _ in range(300):
            rows = rng.permutation(lengths)
            padded.append(padded_tokens(rows, cut_in_order(rows, budget), budget).sum())
        estimate = estimate_efficiency(
            Histogram.from_lengths(lengths), Buckets(boundaries=(0, int(lengths.max()))), budget, 1
        )
        # The last batch of each order is smaller and padded less: the estimate knows full batches only.
        assert estimate == pytest.approx(lengths.sum() / np.mean(padded), rel=0.03)


# ---------------------------------------------------------------- large sets


@pytest.mark.parametrize("model", [CostModel(), CostModel(quadratic_length=8192, overhead_tokens=100_000)])
@pytest.mark.parametrize("padding", ["longest", "boundary"])
@pytest.mark.parametrize("lookahead", [1, 32])
def test_a_million_times_a_million_tokens(padding, model, lookahead, recwarn):
    lengths = np.unique(np.geomspace(1, 10**6, 900).astype(np.int64))
    histogram = Histogram(lengths=lengths, counts=np.full(len(lengths), 10**7))
    assert histogram.num_tokens > 10**12
    budget = TokenBudget(tokens=2 * 10**6, cost_model=model, padding=padding)
    estimator = Estimator(histogram, budget, lookahead)
    padded, cost = estimator.evaluate((0, 100, 10_000, 10**6))
    assert np.isfinite(padded).all() and np.isfinite(cost).all()
    assert (cost >= padded).all() and padded.sum() >= histogram.num_tokens
    assert not recwarn.list


def test_more_samples_of_the_same_kind_change_nothing():
    lengths, counts = np.unique(DISTRIBUTIONS["uniform"], return_counts=True)
    buckets, budget = Buckets(boundaries=(0, 1000, 4096)), TokenBudget(tokens=16384)
    for lookahead in (1, 16):
        some = estimate_efficiency(Histogram(lengths=lengths, counts=counts), buckets, budget, lookahead)
        many = Histogram(lengths=lengths, counts=counts * 10**6)
        assert estimate_efficiency(many, buckets, budget, lookahead) == pytest.approx(some, abs=5e-4)


def test_cells_stand_for_their_lengths():
    lengths = DISTRIBUTIONS["uniform"]
    histogram, budget = Histogram.from_lengths(lengths), TokenBudget(tokens=16384)
    for lookahead in (1, 16):
        exact = Estimator(histogram, budget, lookahead, 5000)
        coarse = Estimator(histogram, budget, lookahead, 400)
        assert exact.cells.num_cells == len(histogram.lengths) > coarse.cells.num_cells
        boundaries = (0, int(histogram.lengths[coarse.cells.ends[200] - 1]), histogram.longest)
        assert coarse.efficiency(boundaries) == pytest.approx(exact.efficiency(boundaries), abs=5e-4)


@given(st.integers(1, 3000), st.integers(1, 200))
def test_cell_ends_ascend_to_the_last(num_distinct, num_cells):
    histogram = Histogram(lengths=np.arange(1, num_distinct + 1) * 3, counts=np.full(num_distinct, 2))
    ends = even_ends(histogram, num_cells)
    assert (np.diff(ends) > 0).all() and ends[0] >= 1 and ends[-1] == num_distinct
    assert len(ends) <= max(num_cells, 1) + (num_distinct <= num_cells) * num_distinct


# ---------------------------------------------------------------- static shapes, sorted packing


def test_static_batches_are_filled():
    budget = TokenBudget(tokens=100, padding="boundary", cost_model=CostModel(quadratic_length=10))
    padded, cost = static_batches(np.array([1.0, 7.0, 8.0]), np.array([30, 14, 14]), budget)
    assert padded.tolist() == [90.0, 98.0, 196.0]  # (3, 30) once, (7, 14) once, (7, 14) twice
    assert cost == pytest.approx([90 * 4, 98 * 2.4, 196 * 2.4])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(50, 300))
def test_sorted_packing_is_what_cutting_sorted_rows_gives(lengths, tokens):
    budget = TokenBudget(tokens=tokens, pad_to_multiple_of=2)
    rows = np.sort(np.array(lengths))[::-1]
    padded = padded_tokens(rows, cut_in_order(rows, budget), budget).sum()
    histogram = Histogram.from_lengths(rows)
    assert sorted_efficiency(histogram, budget, (0, int(rows.max()))) == pytest.approx(rows.sum() / padded)


# ---------------------------------------------------------------- refusals


def test_a_length_above_the_budget_is_named():
    histogram = Histogram.from_lengths(np.array([5, 100, 101, 101]))
    with pytest.raises(UserError, match=r"length 101 .* token_budget 100 .*\(100; 2 samples are too long\)"):
        check_fits(histogram, TokenBudget(tokens=100))
    with pytest.raises(UserError, match=r"pad_to_multiple_of 8 .*\(96; 3 samples"):
        estimate_efficiency(
            histogram, Buckets(boundaries=(0, 101)), TokenBudget(tokens=100, pad_to_multiple_of=8), 1
        )


def test_a_length_above_the_boundaries_is_named():
    with pytest.raises(UserError, match="length 12"):
        estimate_efficiency(
            Histogram.from_lengths(np.array([3, 12])), Buckets(boundaries=(0, 10)), TokenBudget(tokens=50), 1
        )
