"""Random epochs with random restarts: every entry exactly once, whatever changes on the way."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.delivered import Delivered
from loader.options import EpochOptions, PlanOptions
from loader.pool import Corpus
from loader.state import ResumeState
from loader.walk import Plans, Size, longest_allowed, tasks
from shardgen.errors import UserError

BOUNDARIES = ((0, 10, 25, 60), (0, 60), (0, 30, 60))


def make_corpus(num_samples, seed=0, longest=60, shard_size=13):
    lengths = np.sort(1 + np.random.default_rng(seed).integers(0, longest, num_samples)).astype(np.int32)
    bucket = np.searchsorted(np.array(BOUNDARIES[0][1:]), lengths)
    sizes = []
    for count in np.bincount(bucket, minlength=3).tolist():
        whole, rest = divmod(count, shard_size)
        sizes.append(np.array([shard_size] * whole + [rest] * (rest > 0), np.int64))
    return Corpus(lengths=lengths, shard_sizes=tuple(sizes))


def plans_of(corpus, skip=(), **epoch_options):
    epoch_options.setdefault("seed", 5)
    return Plans(corpus, "print", EpochOptions(**epoch_options), np.array(sorted(skip), np.int64))


def options(**kwargs):
    return PlanOptions(**{"boundaries": BOUNDARIES[0], "token_budget": 200, "lookahead": 4, **kwargs})


def walk_groups(plans, state, plan_options):
    """All groups' tasks, checked to have the same steps and micro-steps."""
    groups = [list(tasks(plans, state, plan_options, group)) for group in range(plan_options.world_size)]
    places = [[(t.planned.step, t.planned.micro_step, t.planned.num_micro_steps) for t in g] for g in groups]
    assert all(place == places[0] for place in places)
    return groups


def ids_of(task):
    return [] if task.planned.filler else task.planned.sample_ids.tolist()


def state_after_step(plans, state, plan_options, num_steps):
    """State when ``num_steps`` more steps are done, and the ids delivered meanwhile by all groups."""
    groups = walk_groups(plans, state, plan_options)
    ends = [t for t in groups[0] if t.ends_step]
    last = ends[num_steps - 1]
    stop = groups[0].index(last) + 1
    ids = [i for group in groups for task in group[:stop] for i in ids_of(task)]
    return last.run.state_after(last.step + 1), ids


plan_options = st.builds(
    options,
    boundaries=st.sampled_from(BOUNDARIES),
    token_budget=st.sampled_from([60, 100, 333]),
    world_size=st.integers(1, 4),
    accumulate=st.integers(1, 3),
    lookahead=st.sampled_from([1, 4]),
    max_batch_size=st.none() | st.just(3),
    layout=st.sampled_from(["padded", "packed"]),
)


@settings(max_examples=60)
@given(
    num_samples=st.integers(20, 250),
    block_samples=st.sampled_from([40, 97, 10_000]),
    weights=st.none() | st.just((0.5, 1.0, 2.3)),
    changes=st.lists(st.tuples(plan_options, st.floats(0, 1)), min_size=1, max_size=6),
    data=st.data(),
)
def test_every_entry_once_over_random_restarts(num_samples, block_samples, weights, changes, data):
    corpus = make_corpus(num_samples, seed=num_samples)
    plans = plans_of(corpus, block_samples=block_samples, weights=weights)
    state = plans.at(2)
    expected = Counter()
    for block in range(plans.planner(2).num_blocks):
        expected.update(plans.planner(2).pool(block).ids.tolist())
    delivered = Counter()
    for now, share in changes:
        saved = ResumeState.from_json(state.to_json())
        assert saved == state
        num_steps = plans.size(state, now).steps
        take = int(share * num_steps)
        if take == 0:
            continue
        state, ids = state_after_step(plans, state, now, take)
        delivered.update(ids)
        if state.epoch == 3:
            break
        assert state.step == saved.step + take
    if state.epoch == 2:
        last = data.draw(plan_options)
        delivered.update(i for g in walk_groups(plans, state, last) for t in g for i in ids_of(t))
    assert delivered == expected


@settings(max_examples=30)
@given(stop=st.integers(1, 1000), world=st.integers(1, 3), accumulate=st.integers(1, 3))
def test_equal_options_continue_with_the_same_batches(stop, world, accumulate):
    plans = plans_of(make_corpus(150), block_samples=60)
    now = options(world_size=world, accumulate=accumulate)
    whole = walk_groups(plans, plans.at(0), now)
    num_steps = plans.size(plans.at(0), now).steps
    stop = 1 + (stop - 1) % num_steps
    state, _ = state_after_step(plans, plans.at(0), now, stop)
    if stop == num_steps:
        assert state == plans.at(1)
        return
    rest = walk_groups(plans_of(plans.corpus, block_samples=60), state, now)
    for all_tasks, rest_tasks in zip(whole, rest, strict=True):
        tail = [t for t in all_tasks if t.planned.step >= stop]
        assert [ids_of(t) for t in tail] == [ids_of(t) for t in rest_tasks]
        assert [t.planned.step for t in tail] == [t.planned.step for t in rest_tasks]
        assert [t.planned.padded_length for t in tail] == [t.planned.padded_length for t in rest_tasks]


def test_continuing_extends_the_segment_and_changing_adds_one():
    plans = plans_of(make_corpus(200))
    first, second = options(), options(token_budget=120)
    state, _ = state_after_step(plans, plans.at(0), first, 3)
    state, _ = state_after_step(plans, state, first, 2)
    assert [(s.options, s.steps) for s in state.segments] == [(first, 5)]
    state, _ = state_after_step(plans, state, second, 4)
    assert [(s.options, s.steps) for s in state.segments] == [(first, 5), (second, 4)]
    assert state.step == 9


def test_a_finished_block_drops_its_segments():
    plans = plans_of(make_corpus(200), block_samples=70)
    assert plans.planner(0).num_blocks == 3
    first_block = plans.run(plans.at(0), options()).plan.num_steps
    state, ids = state_after_step(plans, plans.at(0), options(), first_block)
    assert (state.block, state.segments, state.steps_before_block, state.num_dealt) == (1, (), first_block, 0)
    assert sorted(ids) == sorted(plans.planner(0).pool(0).ids.tolist())


def test_replay_refuses_another_digest_count_or_lengths():
    plans = plans_of(make_corpus(200))
    state, _ = state_after_step(plans, plans.at(0), options(), 3)
    for change in ({"digest": state.digest ^ 1}, {"num_dealt": state.num_dealt + 1}):
        with pytest.raises(UserError, match="replaying the state"):
            plans.run(replace(state, **change), options())
    with pytest.raises(UserError, match="another planner, other data"):
        plans_of(make_corpus(200, seed=1)).run(state, options())
    with pytest.raises(UserError, match="block 4 of an epoch with 1"):
        plans.run(replace(state, block=4), options())
    long = replace(state.segments[0], steps=10_000)
    with pytest.raises(UserError, match="counts 10000 steps"):
        plans.run(replace(state, segments=(long,)), options())


@pytest.mark.parametrize("block_samples", [50, 10_000])
def test_size_is_what_is_walked(block_samples):
    plans = plans_of(make_corpus(180), block_samples=block_samples)
    now = options(world_size=3, accumulate=2)
    state = plans.at(0)
    for _ in range(3):
        groups = walk_groups(plans, state, now)
        size = plans_of(plans.corpus, block_samples=block_samples).size(state, now)
        assert size.batches == len(groups[0])
        assert size.steps == sum(t.ends_step for t in groups[0])
        assert size.rows == sum(len(ids_of(t)) for g in groups for t in g)
        state, _ = state_after_step(plans, state, now, 2)


def test_size_knows_fillers_and_static_shapes():
    plans = plans_of(make_corpus(5))
    assert plans.size(plans.at(0), options()).plain
    few = plans.size(plans.at(0), options(world_size=4, token_budget=60, max_batch_size=1))
    assert few == Size(steps=2, batches=2, rows=5, plain=False)
    assert not plans.size(plans.at(0), options(padding="boundary")).plain


def test_skipped_samples_leave_all_else_in_place():
    corpus = make_corpus(200)
    now = options(world_size=2, accumulate=2)
    whole = walk_groups(plans_of(corpus), plans_of(corpus).at(0), now)
    victim = next(t for t in whole[1] if len(ids_of(t)) == 1 or t is whole[1][-1])
    skip = {0, 7, 99, 150, *ids_of(victim)}
    plans = plans_of(corpus, skip)
    for all_tasks, left in zip(whole, walk_groups(plans, plans.at(0), now), strict=True):
        assert [[i for i in ids_of(t) if i not in skip] for t in all_tasks] == [ids_of(t) for t in left]
        for task, same in zip(left, all_tasks, strict=True):
            assert task.planned.filler == (not ids_of(task))
            assert task.planned.bucket == same.planned.bucket or task.planned.filler
    # The position counts by the plan, so it fits a run with other samples left out.
    state, _ = state_after_step(plans, plans.at(0), now, 3)
    expected, _ = state_after_step(plans_of(corpus), plans.at(0), now, 3)
    assert state == expected


def test_too_long_samples_may_be_skipped():
    corpus = make_corpus(100)
    allowed = 40
    long = np.flatnonzero(corpus.lengths > allowed)
    assert len(long) > 3
    plans = plans_of(corpus, long.tolist())
    groups = walk_groups(plans, plans.at(0), options(token_budget=allowed, world_size=2))
    ids = sorted(i for g in groups for t in g for i in ids_of(t))
    assert ids == np.flatnonzero(corpus.lengths <= allowed).tolist()
    # After half of it the budget is raised and nothing is skipped any more: the long ones come too.
    state, done = state_after_step(plans, plans.at(0), options(token_budget=allowed, world_size=2), 8)
    again = plans_of(corpus)
    rest = [i for g in walk_groups(again, state, options(token_budget=300)) for t in g for i in ids_of(t)]
    assert sorted(done + rest) == list(range(100))


def test_longest_allowed_with_static_shapes():
    assert longest_allowed(options(token_budget=59)) == 59
    assert longest_allowed(options(token_budget=59, padding="boundary")) == 25
    assert longest_allowed(options(token_budget=60, padding="boundary")) == 60
    assert longest_allowed(options(token_budget=5, padding="boundary")) == 0


class TestDelivered:
    def setup_method(self):
        self.plans = plans_of(make_corpus(60), weights=(2.0, 1.0, 1.0))
        self.run = self.plans.run(self.plans.at(0), options(world_size=2))
        self.batches = [ids_of(t) for t in tasks(self.plans, self.plans.at(0), options(world_size=2), 1)]

    def note(self, batches):
        delivered = Delivered(run=self.run, group=1)
        for ids in batches:
            delivered.mark(np.array(ids, np.int64))
        return delivered

    def test_all_is_well_in_any_order(self):
        self.note(self.batches[::-1]).check()

    def test_lost_repeated_and_foreign_ids_are_named(self):
        lost = self.batches[3]
        with pytest.raises(RuntimeError, match=f"{lost[0]}"):
            self.note(self.batches[:3] + self.batches[4:]).check()
        with pytest.raises(RuntimeError, match="not delivered as planned"):
            self.note([*self.batches, self.batches[0]]).check()
        with pytest.raises(RuntimeError, match=r"1 samples.*9999"):
            self.note([*self.batches, [9999]]).check()

    def test_at_most_ten_are_named(self):
        with pytest.raises(RuntimeError) as error:
            self.note([]).check()
        named = str(error.value).partition("among them [")[2].partition("]")[0]
        assert len(named.split(",")) == 10
