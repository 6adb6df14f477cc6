"""Plain PyTorch: DistributedDataParallel, exact losses, checkpoints.

    torchrun --nproc-per-node 2 scripts/examples/with_ddp.py SHARDS RUN

Started again, it goes on where ``RUN/checkpoint.pt`` was saved, on any number of ranks.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from small_model import SmallLM
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loader import BucketedDataLoader, BucketedDataset


def train(
    model: nn.Module, loader: BucketedDataLoader, run: Path, epochs: int = 2, save_every: int = 50
) -> None:
    """Train to the end of the last epoch, from the checkpoint in ``run`` if there is one."""
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = run / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            meta = batch.meta
            # Gradients travel once per step. DDP averages them over the ranks, hence the denominator:
            # the step's loss tokens on all ranks and micro-steps, over the number of ranks.
            with nullcontext() if meta.last_micro_step else ddp.no_sync():
                loss = ddp(batch["input_ids"], batch["labels"]) / meta.loss_denominator
                loss.backward()
            if not meta.last_micro_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if (meta.step + 1) % save_every == 0 and dist.get_rank() == 0:
                saved = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "loader": loader.state_dict(),  # the same on every rank
                }
                torch.save(saved, run / "checkpoint.tmp")
                os.replace(run / "checkpoint.tmp", checkpoint)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} done", flush=True)


def main() -> None:
    shards, run = sys.argv[1], Path(sys.argv[2])
    run.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = BucketedDataLoader(BucketedDataset(local=shards, accumulate=2, seed=17))
    train(SmallLM(), loader, run)
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
