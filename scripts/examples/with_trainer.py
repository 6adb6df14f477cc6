"""Hugging Face Trainer: a subclass that trains on a BucketedDataLoader, exact losses and restart included.

    torchrun --nproc-per-node 2 scripts/examples/with_trainer.py SHARDS RUN

Started again, it goes on from the last checkpoint in ``RUN``, on any number of ranks.

What the subclass settles, because Trainer counts batches where epochs differ by a few:

- Trainer takes the loader as it is. Given ``train_dataset``, it would make a DataLoader of its own and let
  rank 0 read for everybody; the dataset refuses that.
- The number of steps is that of the very epochs (``max_steps`` from epoch 0 would cut the last one short).
- The loader's state lies in ``trainer_state.json``, and is loaded after Trainer has done its arithmetic.
  ``ignore_data_skip=True`` is required: skipping batches of a loader that resumes would lose them.
- ``num_items_in_batch`` comes from the plan, so no collective counts tokens.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from loader import BucketedDataLoader, BucketedDataset
from loader.state import ResumeState
from shardgen.errors import UserError


class Passes:
    """The loader without ``set_epoch``: it knows better than Trainer's arithmetic which epoch is next."""

    def __init__(self, loader: BucketedDataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        left = len(self.loader)
        for batch in batches:
            left -= 1
            if not left:
                batches.close()  # Trainer stops asking here; `len` then is the next epoch's
            yield batch

    def __len__(self) -> int:
        return len(self.loader)


class LoaderState(TrainerCallback, ExportableState):
    """Keeps the loader's position in ``trainer_state.json``."""

    def __init__(self, loader: BucketedDataLoader) -> None:
        self.loader = loader

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"loader": self.loader.state_dict()}}

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if state.global_step:
            self.loader.load_state_dict(saved_position(state.stateful_callbacks))


def saved_position(callbacks: dict[str, Any]) -> dict[str, Any]:
    """The loader's state among the saved callbacks of a ``trainer_state.json``."""
    if "LoaderState" not in callbacks:
        raise UserError("the checkpoint has no LoaderState: it was saved by another Trainer than this one")
    return callbacks["LoaderState"]["attributes"]["loader"]


class BucketedTrainer(Trainer):
    """Trainer on a BucketedDataLoader; everything else is as usual."""

    def __init__(self, *, loader: BucketedDataLoader, args: TrainingArguments, **kwargs: Any) -> None:
        accumulate = loader.dataset.plan_options.accumulate
        if args.gradient_accumulation_steps != accumulate:
            raise UserError(
                f"gradient_accumulation_steps {args.gradient_accumulation_steps} is not the dataset's "
                f"accumulate {accumulate}: use the same number in both"
            )
        if not args.ignore_data_skip:
            raise UserError(
                "the loader resumes by itself, and Trainer would skip batches of it again: "
                "use TrainingArguments(ignore_data_skip=True)"
            )
        self.loader = loader
        super().__init__(args=args, **kwargs)
        self.add_callback(LoaderState(loader))

    def get_train_dataloader(self) -> Passes:
        return Passes(self.loader)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], float]:
        """The batches of one step, and what the sum of their losses is divided by."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        meta = self.loader.last_meta
        if not meta.last_micro_step or len(batches) != meta.num_micro_steps:
            raise UserError(
                f"step {meta.step} has {meta.num_micro_steps} micro-steps, but Trainer takes {num_batches} "
                "batches: make the dataset with block_samples at least the number of samples"
            )
        # Trainer multiplies the loss by the number of processes when it averages tokens across devices.
        processes = self.args.world_size if self.args.average_tokens_across_devices else 1
        return batches, meta.loss_denominator * processes

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
        given = self.args.max_steps
        if given <= 0:
            self.args.max_steps = self._num_steps(resume_from_checkpoint or None)
        try:
            result = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
            if self.state.global_step < self.args.max_steps and not self.control.should_training_stop:
                raise RuntimeError(
                    f"Trainer ended after {self.state.global_step} of {self.args.max_steps} steps: "
                    "resume from its last checkpoint to train the rest"
                )
        finally:
            self.args.max_steps = given
        return result

    def _num_steps(self, checkpoint: str | None) -> int:
        """Steps to the end of the last epoch, those done before the checkpoint included."""
        epochs = int(self.args.num_train_epochs)
        if epochs != self.args.num_train_epochs:
            raise UserError(
                f"num_train_epochs {self.args.num_train_epochs} is no whole number: use max_steps"
            )
        ahead = BucketedDataLoader(self.loader.dataset)
        done, done_here = 0, 0
        if checkpoint is not None:
            saved = json.loads((Path(checkpoint) / "trainer_state.json").read_text())
            position = saved_position(saved["stateful_callbacks"])
            ahead.load_state_dict(position)
            done, done_here = saved["global_step"], ResumeState.from_json(position).step
        return done - done_here + sum(ahead.num_steps(epoch) for epoch in range(ahead.epoch, epochs))


def let_cpu_ranks_resume() -> None:
    """Trainer loads the optimizer onto ``cpu:0``, which torch cannot find; GPUs need nothing of this."""
    torch.serialization.register_package(
        0, lambda storage: None, lambda storage, name: storage if name.startswith("cpu:") else None
    )


def main() -> None:
    shards, run = sys.argv[1], sys.argv[2]
    let_cpu_ranks_resume()
    args = TrainingArguments(
        output_dir=run,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        ignore_data_skip=True,
        save_steps=50,
        logging_steps=10,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )  # first: it starts the process group
    loader = BucketedDataLoader(BucketedDataset(local=shards, accumulate=2, seed=17))
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    trainer = BucketedTrainer(loader=loader, args=args, model=LlamaForCausalLM(config))
    trainer.train(resume_from_checkpoint=Path(run).is_dir() and get_last_checkpoint(run))
    loader.close()


if __name__ == "__main__":
    main()
