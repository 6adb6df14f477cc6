"""A batch keeps its meta wherever frameworks carry it."""

import copy
import multiprocessing as mp
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

from loader import Batch, BatchMeta
from shardgen.errors import UserError

FIELDS = [
    *("epoch", "step", "micro_step", "num_micro_steps", "last_micro_step", "bucket", "filler", "sample_ids"),
    *("lengths", "num_tokens", "num_loss_tokens", "step_num_tokens", "step_num_loss_tokens"),
    *("loss_denominator", "loss_weight"),
]


def meta(**changes):
    arguments = {
        "epoch": 2,
        "step": 7,
        "micro_step": 1,
        "num_micro_steps": 4,
        "bucket": 3,
        "filler": False,
        "sample_ids": np.array([9, 4]),
        "lengths": np.array([5, 3]),
        "num_loss_tokens": 6,
        "step_num_tokens": 80,
        "step_num_loss_tokens": 60,
        "world_size": 8,
    }
    return BatchMeta.of(**{**arguments, **changes})


def batch():
    return Batch(
        {
            "input_ids": torch.arange(10).reshape(2, 5),
            "boxes": [torch.ones(2), None],
            "name": ["a", "b"],
            "max_seqlen": 5,
        },
        meta=meta(),
    )


def same(got, expected):
    assert type(got) is Batch
    assert list(got) == list(expected)
    assert torch.equal(got["input_ids"], expected["input_ids"])
    assert torch.equal(got["boxes"][0], expected["boxes"][0])
    assert got["boxes"][1] is None
    assert (got["name"], got["max_seqlen"]) == (expected["name"], expected["max_seqlen"])
    assert {name: np.asarray(getattr(got.meta, name)).tolist() for name in FIELDS} == {
        name: np.asarray(getattr(expected.meta, name)).tolist() for name in FIELDS
    }


def test_meta_has_these_fields():
    assert sorted(BatchMeta.__dataclass_fields__) == sorted(FIELDS)
    made = meta()
    assert (made.num_tokens, made.last_micro_step) == (8, False)
    assert made.loss_denominator == 60 / 8
    assert made.loss_weight == 6 / (60 / 8)
    assert meta(micro_step=3).last_micro_step


def test_a_filler_counts_nothing():
    made = meta(filler=True)
    assert (len(made.sample_ids), len(made.lengths), made.num_tokens, made.num_loss_tokens) == (0, 0, 0, 0)
    assert made.loss_weight == 0.0


def test_a_step_without_loss_tokens_stays_finite():
    made = meta(num_loss_tokens=0, step_num_loss_tokens=0)
    assert made.loss_weight == 0.0
    assert 0.0 / made.loss_denominator == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_step": 4}, "micro-step 4 is outside a step of 4"),
        ({"lengths": np.array([5])}, "2 sample ids came with 1 lengths"),
        ({"num_loss_tokens": 9}, "9 loss tokens are outside 0..8 tokens"),
    ],
)
def test_meta_is_checked_at_birth(changes, message):
    with pytest.raises(UserError, match=message):
        meta(**changes)


@given(
    st.lists(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=3)).filter(
        bool
    )
)
def test_the_documented_loss_is_the_mean_over_the_steps_tokens(micro_steps):
    """Sums over `loss_denominator`, averaged over ranks, added over micro-steps; the same by weights."""
    rng = np.random.default_rng(0)
    world_size = min(len(ranks) for ranks in micro_steps)
    batches = [[rng.random(sum(counts)) for counts in ranks[:world_size]] for ranks in micro_steps]
    losses = np.concatenate([loss for ranks in batches for loss in ranks])
    total = summed = weighted = 0.0
    for micro_step, ranks in enumerate(batches):
        for loss in ranks:
            made = meta(
                micro_step=micro_step,
                num_micro_steps=len(batches),
                lengths=np.array([len(loss), 3]),
                num_loss_tokens=len(loss),
                step_num_loss_tokens=len(losses),
                world_size=world_size,
            )
            total += made.num_loss_tokens
            summed += loss.sum() / made.loss_denominator / world_size
            weighted += (loss.mean() if len(loss) else 0.0) * made.loss_weight / world_size
    assert total == len(losses)
    expected = losses.mean() if len(losses) else 0.0
    assert summed == pytest.approx(expected)
    assert weighted == pytest.approx(expected)


@pytest.mark.parametrize(
    "carry",
    [copy.copy, copy.deepcopy, Batch.copy, lambda b: pickle.loads(pickle.dumps(b)), lambda b: b.to("cpu")],
    ids=["copy", "deepcopy", "method", "pickle", "to"],
)
def test_copies_keep_meta(carry):
    original = batch()
    got = carry(original)
    assert got is not original
    same(got, original)


def test_it_is_a_dict_for_the_model():
    def model(input_ids, **rest):
        return input_ids.sum().item(), sorted(rest)

    assert model(**batch()) == (45, ["boxes", "max_seqlen", "name"])
    assert isinstance(batch(), dict)


def test_to_converts_and_leaves_the_original():
    original = batch()
    got = original.to(torch.device("meta"), non_blocking=True)
    assert got["input_ids"].device.type == "meta"
    assert got["boxes"][0].device.type == "meta"
    assert got.meta is original.meta
    same(original, batch())


def test_what_rebuilds_the_dict_loses_meta():
    rebuilt = type(batch())({key: value for key, value in batch().items()})
    assert rebuilt.meta is None


def test_accelerate_keeps_meta():
    from accelerate.utils import send_to_device

    same(send_to_device(batch(), torch.device("cpu"), non_blocking=True), batch())
    assert send_to_device(batch(), torch.device("meta"))["boxes"][0].device.type == "meta"


def test_lightning_keeps_meta():
    from lightning.fabric.utilities.apply_func import move_data_to_device

    same(move_data_to_device(batch(), torch.device("cpu")), batch())
    assert move_data_to_device(batch(), "meta")["input_ids"].device.type == "meta"


def test_torch_pins_a_batch_through_its_own_method():
    if torch.cuda.is_available():
        pinned = pin_memory(batch())
        assert pinned["input_ids"].is_pinned()
        assert pinned["boxes"][0].is_pinned()
        same(pinned, batch())
    # Nothing to pin, so this needs no accelerator: torch gives back a batch with its meta.
    bare = Batch({"name": ["a"], "max_seqlen": 5}, meta=meta())
    got = pin_memory(bare)
    assert type(got) is Batch
    assert got == bare
    assert got.meta is bare.meta


def test_the_way_torch_pins_other_mappings_keeps_meta_too():
    clone = copy.copy(batch())
    clone.update({key: value for key, value in batch().items()})
    same(clone, batch())


def _send(queue):
    queue.put(pickle.dumps(batch()))


def test_it_crosses_processes():
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_send, args=(queue,))
    process.start()
    got = pickle.loads(queue.get())
    process.join(60)
    assert process.exitcode == 0
    same(got, batch())


def test_repr_shows_shapes():
    assert "'input_ids': (2, 5)" in repr(batch())
