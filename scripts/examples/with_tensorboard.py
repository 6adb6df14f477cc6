"""TensorBoard: the loader's figures, the step's loss, and the loss of each length bucket.

    torchrun --nproc-per-node 2 scripts/examples/with_tensorboard.py SHARDS RUN && tensorboard --logdir RUN

A step's loss jumps where steps differ in what they hold: long samples have another loss than short ones.
The loss per bucket compares like with like, and tells whether a jump is the model's or the data's.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from small_model import SmallLM
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from loader import BatchMeta, BucketedDataLoader, BucketedDataset


class BucketLosses:
    """Sums of token losses and their numbers per bucket, over all ranks when read."""

    def __init__(self, num_buckets: int) -> None:
        self.sums = torch.zeros(2, num_buckets, dtype=torch.float64)  # losses, tokens

    def add(self, meta: BatchMeta, summed_loss: Tensor) -> None:
        """Count a batch; ``summed_loss`` is the sum over its labels. A filler adds nothing."""
        self.sums[0, meta.bucket] += float(summed_loss)
        self.sums[1, meta.bucket] += meta.num_loss_tokens

    def read(self) -> dict[str, float]:
        """Mean loss of all tokens and of each bucket since the last call. Every rank must call it."""
        dist.all_reduce(self.sums)
        losses, tokens = self.sums
        means = {f"bucket_{k}": float(losses[k] / tokens[k]) for k in range(len(tokens)) if tokens[k]}
        means["all"] = float(losses.sum() / tokens.sum())
        self.sums.zero_()
        return means


def train(
    model: nn.Module, loader: BucketedDataLoader, run: str, epochs: int = 2, log_every: int = 10
) -> None:
    """Train and write events every so many steps; all ranks take part in the sums, rank 0 writes."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = BucketLosses(len(loader.dataset.plan_options.boundaries) - 1)
    writer = SummaryWriter(run) if dist.get_rank() == 0 else None
    tokens = steps = 0
    for _ in range(loader.epoch, epochs):
        for batch in loader:
            meta = batch.meta
            with nullcontext() if meta.last_micro_step else ddp.no_sync():
                summed = ddp(batch["input_ids"], batch["labels"])
                (summed / meta.loss_denominator).backward()
            losses.add(meta, summed.detach())
            if not meta.last_micro_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            steps, tokens = steps + 1, tokens + meta.step_num_tokens
            if steps % log_every:
                continue
            means = losses.read()
            if writer is not None:
                for name, value in means.items():
                    writer.add_scalar(f"loss/{name}", value, tokens)
                for name, value in loader.metrics().items():
                    writer.add_scalar(f"loader/{name}", value, tokens)
    if writer is not None:
        writer.close()


def main() -> None:
    shards, run = sys.argv[1:3]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = BucketedDataLoader(BucketedDataset(local=shards, accumulate=2, seed=17))
    train(SmallLM(), loader, run)
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
