"""Accelerate: prepare the model and the optimizer; the loader needs no preparing.

    torchrun --nproc-per-node 2 scripts/examples/with_accelerate.py SHARDS RUN      (or accelerate launch)

``prepare(DataLoader(dataset, batch_size=None))`` would let rank 0 read for everybody and deal its batches
once more; the dataset refuses that. Started again, this script goes on where ``RUN/checkpoint`` was saved.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from small_model import SmallLM
from torch import nn

from loader import BucketedDataLoader, BucketedDataset


def train(
    accelerator: Accelerator,
    model: nn.Module,
    loader: BucketedDataLoader,
    run: Path,
    epochs: int = 2,
    save_every: int = 50,
) -> None:
    """Train to the end of the last epoch, from the checkpoint in ``run`` if there is one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(loader)  # saved and loaded with everything else
    if (run / "checkpoint").exists():
        accelerator.load_state(str(run / "checkpoint"))
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            meta, batch = batch.meta, batch.to(accelerator.device)
            # Not `accelerator.accumulate`, which counts batches: the last step of an epoch may have fewer.
            with nullcontext() if meta.last_micro_step else accelerator.no_sync(model):
                loss = model(batch["input_ids"], batch["labels"]) / meta.loss_denominator
                accelerator.backward(loss)
            if not meta.last_micro_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if (meta.step + 1) % save_every == 0:
                accelerator.save_state(str(run / "checkpoint"))
        accelerator.print(f"epoch {epoch} done")


def main() -> None:
    shards, run = sys.argv[1], Path(sys.argv[2])
    # First, because it starts the process group; on a CPU only when it is told that it runs on one.
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    loader = BucketedDataLoader(BucketedDataset(local=shards, accumulate=2, seed=17))
    train(accelerator, SmallLM(), loader, run)
    loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
