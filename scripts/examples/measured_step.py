"""A step function for ``scripts/calibrate.py``: the demo's model, forward, backward and optimizer."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from demo_train import CausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = CausalLM(vocabulary=2048, context=1024, width=128, layers=2).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(batch_size: int, length: int) -> None:
    """One training step on ``batch_size`` rows of ``length`` random tokens."""
    tokens = torch.randint(2048, (batch_size, length), device=device)
    (model(tokens, tokens) / tokens.numel()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
