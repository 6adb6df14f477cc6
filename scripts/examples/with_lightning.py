"""Lightning: a data module that resumes in the middle of an epoch.

    torchrun --nproc-per-node 2 scripts/examples/with_lightning.py SHARDS RUN

Started again, it goes on from ``RUN/last.ckpt``, on any number of ranks.

Lightning leaves the loader alone (there is nothing for ``use_distributed_sampler`` to replace), but it counts
batches, so the data module settles three things:

- Epochs differ by a few batches: ``Trainer(reload_dataloaders_every_n_epochs=1)`` makes Lightning look again.
- After a restart Lightning counts on from the batches that the epoch had had, so these are part of ``len``.
- The position is loaded by the data module, before Lightning asks for a length.
"""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from small_model import SmallLM
from torch import Tensor, nn

from loader import Batch, BucketedDataLoader, BucketedDataset
from shardgen.errors import UserError


class Passes:
    """What Lightning iterates.

    Args:
        loader: The loader.
        before: Batches that Lightning has counted in this epoch before the pass.
    """

    def __init__(self, loader: BucketedDataLoader, before: int) -> None:
        self.loader = loader
        self.before = before

    # A generator, because Lightning calls `iter` twice where it reloads, and uses the second.
    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        left = len(self.loader)
        for batch in batches:
            left -= 1
            if not left:
                batches.close()  # Lightning stops asking here; `len` then is the next epoch's
            yield batch

    def __len__(self) -> int:
        return self.before + len(self.loader)

    # Lightning warns of loaders that have no state. The data module has loaded this one already.
    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class BucketedDataModule(LightningDataModule):
    """Batches of a built dataset; keyword arguments are those of ``BucketedDataset``."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.loader: BucketedDataLoader | None = None

    def setup(self, stage: str) -> None:  # the process group has been started
        if self.loader is None:
            self.loader = BucketedDataLoader(BucketedDataset(**self.options))

    def train_dataloader(self) -> Passes:
        if self.trainer.reload_dataloaders_every_n_epochs != 1:
            raise UserError(
                "epochs differ by a few batches, and Lightning would cut the longer ones: "
                "use Trainer(reload_dataloaders_every_n_epochs=1)"
            )
        loop = self.trainer.fit_loop
        return Passes(self.loader, loop.epoch_loop.batch_progress.current.ready if loop.restarting else 0)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


class LanguageModel(LightningModule):
    """Manual optimization: the optimizer steps where the plan says so, and the loss is exact."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        meta = batch.meta
        optimizer = self.optimizers()
        blocked = getattr(self.trainer.strategy, "block_backward_sync", nullcontext)
        with nullcontext() if meta.last_micro_step else blocked():
            loss = self.model(batch["input_ids"], batch["labels"]) / meta.loss_denominator
            self.manual_backward(loss)
        if meta.last_micro_step:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    shards, run = sys.argv[1], Path(sys.argv[2])
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else 2,
        strategy="ddp",
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[ModelCheckpoint(run, every_n_train_steps=50, save_last=True)],
        logger=False,
    )
    data = BucketedDataModule(local=shards, accumulate=2, seed=17)
    last = run / "last.ckpt"
    trainer.fit(LanguageModel(SmallLM()), data, ckpt_path=str(last) if last.exists() else None)
    data.loader.close()


if __name__ == "__main__":
    main()
