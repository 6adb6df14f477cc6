"""What a training loop gets: a dict of tensors that also knows which samples and how many tokens it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from shardgen.errors import UserError


def loss_denominator(step_num_loss_tokens: int, world_size: int) -> float:
    """What the *sum* of a batch's token losses is divided by: ``step_num_loss_tokens / world_size``.

    Gradients are then averaged over the ``world_size`` data-parallel ranks (as DDP does) and summed over
    the micro-steps, so the step's loss is the mean over all its loss tokens. A step without a single loss
    token has only zero sums; it gets ``1 / world_size``, so that they stay zero instead of becoming NaN.
    """
    return max(step_num_loss_tokens, 1) / world_size


@dataclass(frozen=True, kw_only=True)
class BatchMeta:
    """Where a batch stands in the epoch, and the counts an exact loss needs.

    Attributes:
        epoch: Epoch, from 0.
        step: Optimizer step inside the epoch, from 0.
        micro_step: Batch of this rank inside the step, from 0.
        num_micro_steps: Batches of each rank in this step.
        last_micro_step: Whether the optimizer steps after this batch.
        bucket: Length bucket of all rows; -1 where buckets are mixed.
        filler: Whether this batch only keeps the rank in step: every label is -100.
        sample_ids: Ids of the real rows, int64, shape (rows,); empty for a filler.
        lengths: Tokens of the real rows, int64, shape (rows,); empty for a filler.
        num_tokens: Real tokens of this batch.
        num_loss_tokens: Labels of this batch that are not -100 (real tokens where no labels are made).
        step_num_tokens: Real tokens of the whole step, over all ranks and micro-steps.
        step_num_loss_tokens: Loss tokens of the whole step.
        loss_denominator: See :func:`loss_denominator`. HF models take it as ``num_items_in_batch``.
        loss_weight: ``num_loss_tokens / loss_denominator``, for those who have only a mean over the
            batch; 0.0 where the batch or the whole step has no loss token.
    """

    epoch: int
    step: int
    micro_step: int
    num_micro_steps: int
    last_micro_step: bool
    bucket: int
    filler: bool
    sample_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]
    num_tokens: int
    num_loss_tokens: int
    step_num_tokens: int
    step_num_loss_tokens: int
    loss_denominator: float
    loss_weight: float

    def __post_init__(self) -> None:
        if not 0 <= self.micro_step < self.num_micro_steps:
            raise UserError(f"micro-step {self.micro_step} is outside a step of {self.num_micro_steps}")
        if len(self.sample_ids) != len(self.lengths):
            raise UserError(f"{len(self.sample_ids)} sample ids came with {len(self.lengths)} lengths")
        if not 0 <= self.num_loss_tokens <= self.num_tokens:
            raise UserError(f"{self.num_loss_tokens} loss tokens are outside 0..{self.num_tokens} tokens")

    @classmethod
    def of(
        cls,
        *,
        epoch: int,
        step: int,
        micro_step: int,
        num_micro_steps: int,
        bucket: int,
        filler: bool,
        sample_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        num_loss_tokens: int,
        step_num_tokens: int,
        step_num_loss_tokens: int,
        world_size: int,
    ) -> Self:
        """A record with the derived fields filled in; a filler's ids, lengths and counts become empty and 0.

        Args:
            epoch: Epoch, from 0.
            step: Optimizer step inside the epoch.
            micro_step: Batch inside the step.
            num_micro_steps: Batches of each rank in this step.
            bucket: Length bucket, or -1.
            filler: Whether the rows are only there to keep the rank in step.
            sample_ids: Ids of the rows, int64, shape (rows,).
            lengths: Tokens of the rows, int64, shape (rows,).
            num_loss_tokens: Labels that are not -100.
            step_num_tokens: Real tokens of the step.
            step_num_loss_tokens: Loss tokens of the step.
            world_size: Data-parallel ranks whose gradients are averaged.
        """
        if filler:
            sample_ids, lengths, num_loss_tokens = sample_ids[:0], lengths[:0], 0
        denominator = loss_denominator(step_num_loss_tokens, world_size)
        return cls(
            epoch=epoch,
            step=step,
            micro_step=micro_step,
            num_micro_steps=num_micro_steps,
            last_micro_step=micro_step == num_micro_steps - 1,
            bucket=bucket,
            filler=filler,
            sample_ids=sample_ids,
            lengths=lengths,
            num_tokens=int(lengths.sum()),
            num_loss_tokens=num_loss_tokens,
            step_num_tokens=step_num_tokens,
            step_num_loss_tokens=step_num_loss_tokens,
            loss_denominator=denominator,
            loss_weight=num_loss_tokens / denominator,
        )


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``change`` applied to its tensors, also inside lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


class Batch(dict[str, Any]):
    """A dict of tensors for ``model(**batch)``, with a :class:`BatchMeta` beside it.

    Copying, pickling, :meth:`to` and :meth:`pin_memory` keep ``meta``; what rebuilds the dict from its
    items loses it, and ``meta`` is then ``None`` (the loader's ``last_meta`` still has it).
    """

    meta: BatchMeta | None

    def __init__(
        self, data: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), *, meta: BatchMeta | None = None
    ) -> None:
        super().__init__(data)
        self.meta = meta

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        changed = type(self)({key: _mapped(value, change) for key, value in self.items()})
        changed.__dict__.update(self.__dict__)
        return changed

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """A batch whose tensors are on ``device``, also those inside lists; everything else is shared."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """A batch whose tensors lie in page-locked memory, so that copies to a GPU can overlap with work."""
        return self._with(lambda tensor: tensor.pin_memory())

    def copy(self) -> Self:
        """A shallow copy, as ``dict.copy``, that keeps ``meta``."""
        return self._with(lambda tensor: tensor)

    __copy__ = copy

    def __repr__(self) -> str:
        shapes = {k: tuple(v.shape) if isinstance(v, torch.Tensor) else v for k, v in self.items()}
        return f"{type(self).__name__}({shapes}, meta={self.meta})"
