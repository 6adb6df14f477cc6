"""Train a small causal language model on a built dataset: one epoch, with checkpoints, on any world.

    torchrun --nproc-per-node 2 scripts/demo_train.py SHARDS RUN [--token-budget 2048] [--accumulate 4]

Starts from ``RUN/checkpoint.pt`` when there is one. Every rank writes the sample ids of each batch that it
trains on to ``RUN/delivered-START-RANK.jsonl``, so that anybody can count what a kill and a restart did.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loader import BucketedDataLoader, BucketedDataset


class CausalLM(nn.Module):
    """A plain transformer: padding lies to the right of every real token, so the causal mask hides it."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=width // 32,
            dim_feedforward=4 * width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """(B, L) ids and labels -> the sum of the losses of all labels that are not -100."""
        length = input_ids.shape[1]
        hidden = self.tokens(input_ids) + self.positions.weight[:length]  # (B, L, width)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=hidden.device)
        hidden = self.layers(hidden, mask=mask, is_causal=True)
        logits = self.head(hidden[:, :-1])  # (B, L - 1, vocabulary): position i predicts token i + 1
        return F.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small causal language model for one epoch.")
    parser.add_argument("shards", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("--token-budget", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lookahead", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        CausalLM(arguments.vocabulary, arguments.context, arguments.width, arguments.layers)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    dataset = BucketedDataset(
        local=str(arguments.shards),
        token_budget=arguments.token_budget,
        accumulate=arguments.accumulate,
        lookahead=arguments.lookahead,
        seed=17,
    )
    loader = BucketedDataLoader(dataset)

    checkpoint_path = arguments.run / "checkpoint.pt"
    step = 0
    if checkpoint_path.exists():
        checkpoint = torch.load(checkpoint_path)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        step = checkpoint["step"]
    saved_step = step
    num_steps = loader.num_steps(loader.epoch)
    if rank == 0:
        print(
            f"{dist.get_world_size()} ranks, step {step} of {num_steps}, {len(loader)} batches a rank to go",
            flush=True,
        )

    (arguments.run / f"pid-{rank}").write_text(str(os.getpid()))
    delivered = (arguments.run / f"delivered-{step}-{rank}.jsonl").open(
        "w", buffering=1
    )  # a line is one write
    step_loss, step_tokens, began = torch.zeros(()), 0, time.perf_counter()
    for batch in loader:
        meta = batch.meta
        delivered.write(json.dumps({"step": step, "sample_ids": [int(i) for i in meta.sample_ids]}) + "\n")
        with nullcontext() if meta.last_micro_step else model.no_sync():
            loss = model(batch["input_ids"], batch["labels"]) / meta.loss_denominator
            loss.backward()
        step_loss += loss.detach()
        if not meta.last_micro_step:
            continue
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1

        dist.all_reduce(step_loss)
        mean_loss = float(step_loss) / dist.get_world_size()
        step_tokens += meta.step_num_tokens
        if rank == 0:
            with (arguments.run / "losses.jsonl").open("a") as file:
                record = {"step": step, "num_steps": num_steps, "loss": mean_loss, "saved_step": saved_step}
                file.write(json.dumps(record) + "\n")
            if step % 20 == 0:
                speed = step_tokens / (time.perf_counter() - began)
                print(
                    f"step {step:4d}/{num_steps}  loss {mean_loss:.3f}  {speed:,.0f} real tokens/s",
                    flush=True,
                )
        step_loss.zero_()

        state = loader.state_dict()
        if step % arguments.checkpoint_every == 0 and rank == 0:
            saved = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "loader": state,
                "step": step,
            }
            torch.save(saved, checkpoint_path.with_suffix(".tmp"))
            os.replace(checkpoint_path.with_suffix(".tmp"), checkpoint_path)
            saved_step = step
    if rank == 0:
        metrics = loader.metrics()
        print(
            f"epoch done after {step} steps, padding efficiency {metrics['padding_efficiency']:.3f}, "
            f"waited for data {metrics['data_wait_fraction']:.1%} of the time",
            flush=True,
        )
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
