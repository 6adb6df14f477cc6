"""The state of a position: small, plain, read back unchanged, and picky about what it is loaded into."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.options import EpochOptions, PlanOptions
from loader.state import ResumeState, Segment, digest_ids
from shardgen.errors import UserError

FINGERPRINT = "ab" * 32


def options(boundaries=(0, 10, 20), **kwargs):
    return PlanOptions(boundaries=tuple(boundaries), **{"token_budget": 100, **kwargs})


def state(segments=(), **kwargs):
    values = {"fingerprint": FINGERPRINT, "epoch_options": EpochOptions(seed=17), "segments": tuple(segments)}
    return ResumeState(**{**values, **kwargs})


def many_segments(num_segments):
    """What a long, troubled run would do: other ranks, budgets and boundaries every few steps, 64 buckets."""
    first = tuple(np.cumsum([0] + [517] * 64).tolist())
    second = tuple(np.cumsum([0] + [499] * 64 + [1200]).tolist())
    return [
        Segment(
            options=options(
                boundaries=first if number % 3 else second,
                token_budget=1_000_000 + 4096 * (number % 5),
                world_size=8 >> (number % 2),
                accumulate=1 + number % 4,
                lookahead=32,
            ),
            steps=100_000 + number,
        )
        for number in range(num_segments)
    ]


plan_options = st.builds(
    options,
    boundaries=st.sampled_from([(0, 10, 20), (0, 5, 20), (0, 20)]),
    token_budget=st.integers(20, 10**9),
    cost_budget=st.none() | st.integers(1, 10**9),
    max_batch_size=st.none() | st.integers(1, 999),
    lookahead=st.integers(1, 64),
    world_size=st.integers(1, 999),
    accumulate=st.integers(1, 99),
    quadratic_length=st.none() | st.integers(1, 9999),
    layout=st.sampled_from(["padded", "packed"]),
    tail=st.sampled_from(["fill", "error"]),
)
states = st.builds(
    state,
    segments=st.lists(st.builds(Segment, options=plan_options, steps=st.integers(1, 10**7)), max_size=6),
    epoch=st.integers(0, 10**6),
    block=st.integers(0, 10**4),
    steps_before_block=st.integers(0, 10**9),
    num_dealt=st.integers(0, 10**9),
    digest=st.integers(0, 2**64 - 1),
    epoch_options=st.builds(
        EpochOptions,
        seed=st.integers(0, 2**63),
        shuffle=st.booleans(),
        buckets=st.none() | st.just((0, 2)),
        weights=st.none() | st.just((0.5, 1.0, 2.25)),
    ),
)


@given(states)
def test_reads_back_equal_through_json(original):
    obj = original.to_json()
    assert ResumeState.from_json(json.loads(json.dumps(obj))) == original
    assert json.loads(json.dumps(obj)) == obj  # plain JSON types: nothing changes its type on the way
    assert ResumeState.from_json(obj).to_json() == obj


def test_survives_torch_save_with_weights_only():
    obj = state(many_segments(3), epoch=2, digest=2**64 - 1).to_json()
    file = io.BytesIO()
    torch.save({"loader": obj}, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["loader"] == obj


def test_size_with_64_buckets_and_20_segments():
    obj = state(many_segments(20), block=380, steps_before_block=12_345_678, num_dealt=262_000).to_json()
    assert len(json.dumps(obj)) < 4096


def test_200_segments_read_back():
    original = state(many_segments(200))
    assert ResumeState.from_json(json.loads(json.dumps(original.to_json()))) == original


def test_a_segment_stores_only_what_differs_from_the_one_before():
    same, other = options(), options(token_budget=50)
    obj = state([Segment(options=o, steps=3) for o in (same, same, other, same)]).to_json()
    first, second, third, fourth = obj["segments"]
    assert first["token_budget"] == 100 and first["boundaries"] == 0
    assert second == {"steps": 3}
    assert third == {"steps": 3, "token_budget": 50}
    assert fourth == {"steps": 3, "token_budget": 100}
    assert obj["boundaries"] == [[0, 10, 20]]


def test_an_option_that_goes_back_to_none_is_stored():
    segments = [Segment(options=options(max_batch_size=m), steps=1) for m in (4, None)]
    assert ResumeState.from_json(state(segments).to_json()).segments == tuple(segments)


def test_refusal_names_each_differing_field():
    saved = state([Segment(options=options(), steps=7)], epoch=3, steps_before_block=5)
    now = EpochOptions(seed=18, block_samples=1000, num_canonical_nodes=2, buckets=(0,), weights=(2.0,))
    with pytest.raises(UserError) as refused:
        saved.check_fixed("cd" * 32, now)
    message = str(refused.value)
    for part in (
        "data fingerprint: saved abababababab, now cdcdcdcdcdcd",
        "seed: saved 17, now 18",
        "block_samples: saved 262144, now 1000",
        "num_canonical_nodes: saved 1, now 2",
        "buckets: saved None, now (0,)",
        "weights: saved None, now (2.0,)",
        "epoch 3 (after step 12)",
    ):
        assert part in message
    assert "shuffle" not in message and "\n" not in message
    saved.check_fixed(FINGERPRINT, EpochOptions(seed=17))  # the same is accepted


def test_fields_of_a_later_compatible_version_are_ignored():
    original = state([Segment(options=options(), steps=1)])
    assert ResumeState.from_json({**original.to_json(), "version": 2, "comment": "new"}) == original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9, "min_version": 9}, "needs a loader that reads version 9"),
        ({"version": None}, "not a state of this loader"),
        ({"segments": [{"steps": 0, "boundaries": 0, "token_budget": 1}]}, "0 steps"),
        ({"segments": [{"steps": 1, "boundaries": 5, "token_budget": 1}]}, "damaged"),
        ({"segments": [{"steps": 1, "boundaries": 0, "token_budget": 1, "speed": 3}]}, "speed"),
        ({"segments": 3}, "damaged"),
        ({"digest": "xyz"}, "damaged"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": "0"}, "epoch"),
        ({"fingerprint": 3}, "fingerprint"),
    ],
)
def test_what_is_no_state_is_refused(change, message):
    obj = state([Segment(options=options(), steps=1)]).to_json()
    with pytest.raises(UserError, match=message):
        ResumeState.from_json({**obj, **change})


@pytest.mark.parametrize("obj", [{}, {"epoch": 0, "sample_in_epoch": 3, "shuffle_seed": 1}])
def test_other_dicts_are_refused(obj):
    with pytest.raises(UserError, match="not a state of this loader"):
        ResumeState.from_json(obj)


@pytest.mark.parametrize("key", sorted(state().to_json()))
def test_every_field_is_needed(key):
    obj = state().to_json()
    del obj[key]
    with pytest.raises(UserError):
        ResumeState.from_json(obj)


@given(st.lists(st.integers(0, 2**40), max_size=50), st.randoms())
def test_digest_depends_on_the_multiset_alone(ids, random):
    shuffled = list(ids)
    random.shuffle(shuffled)
    assert digest_ids(np.array(ids, np.int64)) == digest_ids(np.array(shuffled, np.int64))
    parts = digest_ids(np.array(ids[:7], np.int64)) + digest_ids(np.array(ids[7:], np.int64))
    assert digest_ids(np.array(ids, np.int64)) == parts % 2**64


def test_digest_tells_a_swap_of_ids_apart():
    # Sums of the ids themselves would be equal.
    assert digest_ids(np.array([1, 4])) != digest_ids(np.array([2, 3]))
    assert digest_ids(np.array([5, 5])) != digest_ids(np.array([5]))
