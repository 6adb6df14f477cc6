"""What each rank of the framework tests runs: the examples, with a record of what the model really saw.

torchrun --nproc-per-node=2 tests/framework_ranks.py plain|trainer|lightning DATASET RESULTS
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from loader import BucketedDataLoader, BucketedDataset

# Not this folder, whose datasets.py transformers would take for the library.
sys.path[0] = str(Path(__file__).resolve().parent.parent / "scripts/examples")
VOCABULARY = 30_000
INVERSE = pow(31, -1, VOCABULARY)  # row r starts with token 31 r
OPTIONS = {"accumulate": 2, "seed": 9}


class Seen(list):
    """Source rows of each forward pass of a model; rows whose labels are all -100 do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        ids, labels = args if args else (kwargs["input_ids"], kwargs["labels"])
        delivered = (labels != -100).any(dim=1)
        self.append((ids[delivered, 0] * INVERSE % VOCABULARY).tolist())


def small_model() -> nn.Module:
    from small_model import SmallLM

    torch.manual_seed(0)
    return SmallLM(VOCABULARY, 8)


def refusal(attempt: Callable[[], object]) -> str:
    """What a mistake raises, with what led to it: a traceback shows all. Every rank must get something."""
    try:
        attempt()
    except Exception as error:
        lines, cause = [], error
        while cause is not None:
            lines.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return "\n".join(reversed(lines))
    return "nothing was refused"


def new_loader(out: str, **options) -> BucketedDataLoader:
    return BucketedDataLoader(BucketedDataset(local=out, **{**OPTIONS, **options}))


def plain(out: str, results: Path) -> dict:
    """DDP, TensorBoard, accelerate."""
    import with_accelerate
    import with_ddp
    import with_tensorboard
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    record = {}

    def runs(name, train):
        run = results / name
        run.mkdir(exist_ok=True)
        dist.barrier()
        for part in ("whole", "resumed"):
            model = small_model()
            seen = Seen(model)
            train(model, new_loader(out), run)
            record[f"{name} {part}"] = seen
            dist.barrier()

    runs("ddp", lambda model, loader, run: with_ddp.train(model, loader, run, save_every=10))
    runs(
        "accelerate",
        lambda model, loader, run: with_accelerate.train(
            Accelerator(cpu=True), model, loader, run, save_every=10
        ),
    )
    model = small_model()
    record["tensorboard whole"] = Seen(model)
    with_tensorboard.train(model, new_loader(out), str(results / "events"), log_every=6)

    dataset = BucketedDataset(local=out, **OPTIONS)
    record["refused"] = [
        refusal(lambda: next(iter(accelerator.prepare(DataLoader(dataset, batch_size=None)))))
    ]
    return record


def training_arguments(results: Path, **changes):
    from transformers import TrainingArguments

    return TrainingArguments(
        **{
            "output_dir": str(results / "trainer"),
            "num_train_epochs": 2,
            "gradient_accumulation_steps": 2,
            "ignore_data_skip": True,
            "save_steps": 9,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            **changes,
        }
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    return LlamaForCausalLM(config)


def trainer(out: str, results: Path) -> dict:
    """Trainer: two epochs; resumes at an epoch's end, in its middle, and with another token budget."""
    import with_trainer

    with_trainer.let_cpu_ranks_resume()
    record, folder = {}, results / "trainer"
    for name, checkpoint, changes in (
        ("whole", None, {}),
        ("mid", folder / "checkpoint-27", {}),
        ("end", folder / "checkpoint-18", {}),
        ("smaller", folder / "checkpoint-27", {"token_budget": 41}),
        ("larger", folder / "checkpoint-27", {"token_budget": 400}),
    ):
        args = training_arguments(results, **({} if name == "whole" else {"save_strategy": "no"}))
        model = llama()
        record[f"trainer {name}"] = Seen(model)
        it = with_trainer.BucketedTrainer(loader=new_loader(out, **changes), args=args, model=model)
        it.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        record[f"steps {name}"] = it.state.global_step
        record[f"losses {name}"] = [entry["loss"] for entry in it.state.log_history if "loss" in entry]

    sums = torch.zeros(2)  # of the first step: losses, tokens
    model = llama()
    for batch in new_loader(out):
        with torch.no_grad():
            loss = model(**batch, num_items_in_batch=1).loss
        sums += torch.stack((loss, (batch["labels"][:, 1:] != -100).sum()))
        if batch.meta.last_micro_step:
            break
    dist.all_reduce(sums)
    record["first loss"] = float(sums[0] / sums[1])

    from transformers import Trainer

    class Bare(Trainer):
        """The loader handed to a Trainer that wants to skip batches itself."""

        def get_train_dataloader(self) -> BucketedDataLoader:
            return new_loader(out)

    def mistake(changes, resume=None, kind=with_trainer.BucketedTrainer, **data):
        args = training_arguments(results, save_strategy="no", **changes)
        kind(model=llama(), args=args, **data).train(resume_from_checkpoint=resume)

    mid = str(folder / "checkpoint-27")
    short_steps = new_loader(out, block_samples=30, accumulate=16)  # one at the end of each block
    dataset = BucketedDataset(local=out, **OPTIONS)
    record["refused"] = [
        refusal(lambda: mistake({}, kind=Trainer, train_dataset=dataset)),
        refusal(lambda: mistake({"ignore_data_skip": False}, mid, kind=Bare)),
        refusal(lambda: mistake({"ignore_data_skip": False}, mid, loader=new_loader(out))),
        refusal(lambda: mistake({"gradient_accumulation_steps": 1}, loader=new_loader(out))),
        refusal(lambda: mistake({"gradient_accumulation_steps": 16}, loader=short_steps)),
    ]
    return record


def lightning(out: str, results: Path) -> dict:
    """Lightning: two epochs; resumes at an epoch's end, in its middle, and with another token budget."""
    import with_lightning
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader

    folder = results / "lightning"
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "max_epochs": 2}

    def fit(data, *, checkpoint=None, save=False, reload=1) -> Seen:
        callbacks = [
            ModelCheckpoint(folder, "{step}", every_n_train_steps=9, save_top_k=-1),
            ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1),
        ]
        it = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            reload_dataloaders_every_n_epochs=reload,
            callbacks=callbacks if save else None,
            enable_checkpointing=save,
            **quiet,
        )
        model = small_model()
        seen = Seen(model)
        it.fit(
            with_lightning.LanguageModel(model),
            data,
            ckpt_path=None if checkpoint is None else str(checkpoint),
        )
        return seen

    def module(**changes):
        return with_lightning.BucketedDataModule(local=out, **{**OPTIONS, **changes})

    record = {"lightning whole": fit(module(), save=True)}
    for name, file, changes in (
        ("mid", "step=27", {}),
        ("end", "step=18", {}),
        ("epoch", "epoch=0", {}),
        ("smaller", "step=27", {"token_budget": 41}),
        ("larger", "step=27", {"token_budget": 400}),
    ):
        record[f"lightning {name}"] = fit(module(**changes), checkpoint=folder / f"{file}.ckpt")

    stock = DataLoader(BucketedDataset(local=out, **OPTIONS), batch_size=None)
    record["refused"] = [refusal(lambda: fit(stock)), refusal(lambda: fit(module(), reload=0))]
    return record


def main(framework: str, out: str, results: Path) -> None:
    record = {"plain": plain, "trainer": trainer, "lightning": lightning}[framework](out, results)
    rank = dist.get_rank()
    probe = new_loader(out)
    record["lengths"], record["rank"] = [], rank
    for epoch in range(2):
        probe.set_epoch(epoch)
        record["lengths"].append(len(probe))
    (results / f"{framework}-{rank}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
