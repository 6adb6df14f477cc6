"""Measures against plain loops, and the figures of the published case."""

from itertools import combinations

import numpy as np
import pytest
from corpora import DRAFTER_OPTIMAL, DRAFTER_PUBLISHED, drafter_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.measures import assess, length_bins, recurrence, step_histograms
from loader.plan import EpochOptions, EpochPlanner, PlanOptions, plan_block
from loader.simulate import STRATEGIES, corpus_of_lengths, simulate
from shardgen.errors import UserError


def batches_of(plans):
    for plan in plans:
        for b in range(len(plan.batch_start) - 1):
            yield plan, b, plan.sample_ids[plan.batch_start[b] : plan.batch_start[b + 1]].tolist()


def epoch_of(corpus, options, epoch):
    epoch_options = EpochOptions(seed=3)
    pool = EpochPlanner(corpus, epoch_options, epoch).pool(0)
    return [plan_block(corpus, pool, options, epoch_options, epoch, resumed=True)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=4, max_size=150),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([None, 30]),
    st.sampled_from(["padded", "packed"]),
)
def test_measures_are_their_definitions(lengths, world_size, accumulate, quadratic, layout):
    lengths = np.array(lengths)
    corpus = corpus_of_lengths(lengths, (0, 15, 40))
    options = PlanOptions(
        boundaries=(0, 15, 40),
        token_budget=90,
        world_size=world_size,
        accumulate=accumulate,
        quadratic_length=quadratic,
        overhead_tokens=7,
        lookahead=2,
        layout=layout,
    )
    first, second = epoch_of(corpus, options, 0), epoch_of(corpus, options, 1)
    quality = assess(first, corpus, options)
    real = padded = 0
    costs: list[list[float]] = []
    shapes = set()
    for plan, b, ids in batches_of(first):
        own = [int(corpus.lengths[i]) for i in ids]
        shown = own or [int(corpus.lengths[plan.batch_filler[b]])]
        area = sum(shown) if layout == "packed" else len(shown) * max(shown)
        real, padded = real + sum(own), padded + area
        shapes.add((1, area) if layout == "packed" else (len(shown), max(shown)))
        q = quadratic or float("inf")
        if layout == "packed":
            cost = sum(n * (1 + n / q) for n in own) + 7
        else:
            cost = area * (1 + max(shown) / q) + 7
        if b % world_size == 0:
            costs.append([])
        costs[-1].append(cost if own else 0.0)
    assert quality.padding_efficiency == pytest.approx(real / padded, rel=1e-12)
    mean, most = sum(sum(c) / len(c) for c in costs), sum(max(c) for c in costs)
    assert quality.rank_balance == pytest.approx(mean / most, rel=1e-9)
    assert quality.overall == quality.padding_efficiency * quality.rank_balance
    assert quality.num_shapes == len(shapes)
    assert quality.num_batches == len(costs) * world_size

    def pairs(plans):
        return {p for _, _, ids in batches_of(plans) for p in combinations(sorted(ids), 2)}

    before, after = pairs(first), pairs(second)
    expected = len(before & after) / len(before) if before else 0.0
    assert recurrence(first, second, corpus.num_samples) == pytest.approx(expected)


def test_step_divergence_is_the_mean_total_variation():
    lengths = drafter_lengths()[:5000]
    corpus = corpus_of_lengths(lengths, (0, 2000, 6534))
    options = PlanOptions(boundaries=(0, 2000, 6534), token_budget=49_152, world_size=4)
    plans = epoch_of(corpus, options, 0)
    bins = length_bins(corpus.lengths)
    mass = np.bincount(np.searchsorted(bins, lengths), weights=lengths, minlength=16) / lengths.sum()
    assert len(bins) == 15 and np.abs(mass - 1 / 16).max() < 0.002  # equal token mass
    (plan,) = plans
    total = []
    for step in range(plan.num_steps):
        a, b = plan.batch_start[plan.step_start[step : step + 2] * 4]
        own = corpus.lengths[plan.sample_ids[a:b]]
        share = [own[np.searchsorted(bins, own) == k].sum() / own.sum() for k in range(16)]
        assert np.allclose(step_histograms(plan, corpus.lengths, bins)[step], share)
        total.append(0.5 * sum(abs(x - y) for x, y in zip(share, mass, strict=True)))
    assert assess(plans, corpus, options).step_divergence == pytest.approx(np.mean(total))


def test_the_published_case():
    """Sorted, shuffled and bucketed batches come out as published; the loader's own code beats them."""
    published = corpus_of_lengths(drafter_lengths(), DRAFTER_PUBLISHED)
    options = PlanOptions(boundaries=DRAFTER_PUBLISHED, token_budget=49_152, world_size=8)
    bucket = simulate(published, options, EpochOptions(), "bucket-shuffle")
    assert bucket.quality.padding_efficiency == pytest.approx(0.858, abs=0.003)
    assert bucket.quality.overall == pytest.approx(0.832, abs=0.003)
    full = simulate(published, options, EpochOptions(), "full-shuffle")
    assert full.quality.padding_efficiency == pytest.approx(0.52, abs=0.005)
    static = simulate(published, options, EpochOptions(), "sorted-static")
    assert static.quality.padding_efficiency > 0.999 and static.recurrence == 1.0

    best = corpus_of_lengths(drafter_lengths(), DRAFTER_OPTIMAL)
    options = PlanOptions(boundaries=DRAFTER_OPTIMAL, token_budget=49_152, world_size=8)
    ours = simulate(best, options, EpochOptions(), "loader")
    assert ours.quality.overall >= 0.985 and ours.recurrence <= 0.01
    assert (ours.dropped, ours.repeated, ours.quality.fillers) == (0, 0, 0)


def test_plain_bucket_shuffles_hardly_meet_again():
    corpus = corpus_of_lengths(drafter_lengths()[:4000], (0, 1200, 2000, 2800, 6534))
    options = PlanOptions(boundaries=(0, 1200, 2000, 2800, 6534), token_budget=32_768, lookahead=1)
    assert simulate(corpus, options, EpochOptions(), "loader").recurrence < 0.05


def test_every_strategy_delivers_everything_once():
    corpus = corpus_of_lengths(drafter_lengths()[:777], (0, 1200, 6534), shard_bytes=1 << 18)
    options = PlanOptions(boundaries=(0, 1200, 6534), token_budget=16_384, world_size=3, accumulate=2)
    for name, make in STRATEGIES.items():
        plans = make(corpus, options, EpochOptions(), 0)
        assert sorted(np.concatenate([p.sample_ids for p in plans]).tolist()) == list(range(777)), name
        result = simulate(corpus, options, EpochOptions(), name)
        assert (result.dropped, result.repeated) == (0, 0)
        assert set(result.to_json()) == {
            "padding_efficiency",
            "rank_balance",
            "overall",
            "num_batches",
            "num_steps",
            "recurrence",
            "step_divergence",
            "dropped",
            "repeated",
            "fillers",
            "num_shapes",
            "plan_seconds",
        }
    with pytest.raises(UserError, match="'sorted' is not one of sorted-static"):
        simulate(corpus, options, EpochOptions(), "sorted")


def test_a_weighted_epoch_counts_what_it_repeats():
    corpus = corpus_of_lengths(np.arange(1, 101), (0, 50, 100))
    options = PlanOptions(boundaries=(0, 50, 100), token_budget=400)
    result = simulate(corpus, options, EpochOptions(weights=(2.0, 0.5)), "loader")
    assert (result.dropped, result.repeated) == (0, 0)  # relative to the pool, which holds the copies
