"""The model of these examples: a causal language model small enough for two CPU ranks.

Its vocabulary is that of the demo, whose shards are at hand: ``demo-out/shards`` after ``scripts/demo``.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class SmallLM(nn.Module):
    """Any causal model will do: padding lies to the right of every real token, so nothing depends on it."""

    def __init__(self, vocabulary: int = 2048, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """(B, L) ids and labels -> the *sum* of the losses of all labels that are not -100."""
        hidden, _ = self.mix(self.tokens(input_ids))  # (B, L, width)
        logits = self.head(hidden[:, :-1])  # (B, L - 1, vocabulary): position i predicts token i + 1
        return F.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
