"""Exact token-weighted losses: micro-batches, ranks and fillers give the gradient of one big batch."""

import json
import os

import pytest
import torch
from datasets import make_dataset, mixed_lengths
from torch import nn

from loader import BucketedDataLoader, BucketedDataset
from loader.batch import BatchMeta


def meta(world_size: int, num_loss_tokens: int, step_num_loss_tokens: int, **fields) -> BatchMeta:
    return BatchMeta.of(
        epoch=0,
        step=0,
        bucket=0,
        filler=False,
        sample_ids=torch.zeros(1, dtype=torch.int64).numpy(),
        lengths=torch.full((1,), num_loss_tokens).numpy(),
        num_loss_tokens=num_loss_tokens,
        step_num_tokens=step_num_loss_tokens,
        step_num_loss_tokens=step_num_loss_tokens,
        world_size=world_size,
        **{"micro_step": 0, "num_micro_steps": 1, **fields},
    )


def test_micro_batches_of_unequal_size_weigh_by_tokens():
    """3 tokens of loss 1 and 1 token of loss 5, accumulated: 2, not the 3 of a mean of means."""
    first = meta(1, 3, 4, num_micro_steps=2)
    second = meta(1, 1, 4, micro_step=1, num_micro_steps=2)
    assert 3 * 1.0 / first.loss_denominator + 1 * 5.0 / second.loss_denominator == 2.0
    assert 1.0 * first.loss_weight + 5.0 * second.loss_weight == 2.0


def test_ranks_of_unequal_size_weigh_by_tokens():
    """3000 tokens of mean loss 1 and 1000 of 5 on two ranks, averaged by DDP: 2."""
    one, two = meta(2, 3000, 4000), meta(2, 1000, 4000)
    assert (one.loss_weight, two.loss_weight) == (1.5, 0.5)
    assert (1.0 * one.loss_weight + 5.0 * two.loss_weight) / 2 == 2.0
    assert (3000.0 / one.loss_denominator + 5000.0 / two.loss_denominator) / 2 == 2.0


@pytest.mark.distributed
def test_ddp_steps_have_the_gradient_of_one_big_batch(tmp_path, python, root):
    """Three ranks; step counts equal a real all-reduce; four single rows leave two ranks with a filler."""
    outs = [
        make_dataset(tmp_path / "many", mixed_lengths(61, 40, seed=1), token_budget=80, num_buckets=2),
        make_dataset(tmp_path / "few", [7, 9, 8, 1], token_budget=9, num_buckets=1, max_batch_size=1),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3")
    done = python(*launch, root / "tests/loss_ranks.py", tmp_path, *outs, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for number, fillers in enumerate((0, 2)):
        records = [rank[number] for rank in ranks]
        assert len({record["steps"] for record in records}) == 1 and records[0]["steps"] >= 1
        assert sum(record["fillers"] for record in records) == fillers
        assert max(record["worst"] for record in records) < 1e-10


def test_static_shapes_give_finite_gradients(tmp_path):
    """Missing rows attend to one pad token: an all-masked row would make attention NaN."""
    out = make_dataset(tmp_path, mixed_lengths(57, 30, seed=2), token_budget=90, num_buckets=3)
    dataset = BucketedDataset(local=str(out), padding="boundary")
    embed = nn.Embedding(30_000, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    shapes, missing = set(), 0
    for batch in BucketedDataLoader(dataset):
        shapes.add(tuple(batch["input_ids"].shape))
        missing += batch["input_ids"].shape[0] - len(batch.meta.sample_ids)
        hidden = embed(batch["input_ids"])
        mixed, _ = attention(hidden, hidden, hidden, key_padding_mask=~batch["attention_mask"])
        (mixed.sum(dim=2) * (batch["labels"] != -100)).sum().backward()
    upper = dataset.plan_options.boundaries[1:]
    assert shapes <= {(90 // bound, bound) for bound in upper} and len(shapes) == len(upper)
    assert missing > 0
    for parameter in (*embed.parameters(), *attention.parameters()):
        assert torch.isfinite(parameter.grad).all()
