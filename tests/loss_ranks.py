"""What each rank of the loss tests runs: token-weighted training steps under DistributedDataParallel.

torchrun --nproc-per-node=3 tests/loss_ranks.py RESULTS DATASET...
"""

import copy
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from loader import BucketedDataLoader, BucketedDataset

VOCABULARY = 64


class Model(nn.Module):
    """A causal model small enough for float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(input_ids % VOCABULARY))[0])


def summed_loss(model: nn.Module, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids)[:, :-1].transpose(1, 2)
    targets = labels[:, 1:]
    targets = torch.where(targets < 0, targets, targets % VOCABULARY)
    return cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def one_big_batch(model: nn.Module, dataset: BucketedDataset, ids: list[int]) -> dict[str, torch.Tensor]:
    """Gradient of the mean loss over all loss tokens of some samples, each computed alone."""
    model.zero_grad()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in ids:
        tokens = torch.from_numpy(dataset[i]["input_ids"].astype("int64"))[None]
        if tokens.shape[1] > 1:
            total = total + summed_loss(model, tokens, tokens)
            count += tokens.shape[1] - 1
    (total / count).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def train(out: str) -> dict[str, float]:
    """One epoch, each step checked against one big batch."""
    torch.manual_seed(0)
    plain = Model().double()
    reference = copy.deepcopy(plain)
    model = DistributedDataParallel(plain)
    dataset = BucketedDataset(local=out, accumulate=2, seed=3)
    ids: list[int] = []
    counted = [0, 0]
    worst, steps, fillers = 0.0, 0, 0
    for batch in BucketedDataLoader(dataset):
        meta = batch.meta
        ids += meta.sample_ids.tolist()
        fillers += meta.filler
        counted[0] += meta.num_tokens
        counted[1] += int((batch["labels"] != -100).sum())
        loss = summed_loss(model, batch["input_ids"], batch["labels"]) / meta.loss_denominator
        if meta.last_micro_step:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
            continue
        total = torch.tensor(counted)
        dist.all_reduce(total)
        assert total.tolist() == [meta.step_num_tokens, meta.step_num_loss_tokens]
        everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, ids)
        expected = one_big_batch(reference, dataset, [i for part in everyone for i in part])
        for name, parameter in plain.named_parameters():
            assert torch.isfinite(parameter.grad).all()
            scale = max(float(expected[name].abs().max()), 1e-12)
            worst = max(worst, float((parameter.grad - expected[name]).abs().max()) / scale)
        model.zero_grad()
        ids, counted, steps = [], [0, 0], steps + 1
    return {"worst": worst, "steps": steps, "fillers": fillers}


def main(results: Path, *outs: str) -> None:
    dist.init_process_group("gloo")
    records = [train(out) for out in outs]
    (results / f"{dist.get_rank()}.json").write_text(json.dumps(records))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
