"""From planned batches to what the training loop gets, in this process or with the bytes read in another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from loader.batch import Batch, BatchMeta
from loader.collate import BatchShape, Collator
from loader.pool import Corpus
from loader.raw import RawBatch
from loader.shards import SampleReader
from loader.source import LOCAL, ShardSource
from loader.walk import Task

# Another process may evict a shard between our look at it and its opening.
_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker process needs to know of a batch.

    Attributes:
        sample_ids: Rows, int64, shape (n,).
        lengths: Tokens they have, int64, shape (n,).
    """

    sample_ids: NDArray[np.int64]
    lengths: NDArray[np.int64]


class BatchReader:
    """Reads rows from shards that it makes present first.

    Args:
        source: The storage.
        reader: The mapped shards.
        collator: Gathers columns.
        collate_fn: The user's own, given a list of decoded samples; ``None`` for tensors by the collator.
    """

    def __init__(
        self,
        source: ShardSource,
        reader: SampleReader,
        collator: Collator,
        collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
    ) -> None:
        self.source = source
        self.reader = reader
        self.collator = collator
        self.collate_fn = collate_fn

    def read(self, order: Order) -> Any:
        """A :class:`RawBatch`, or what the user's ``collate_fn`` makes of the samples."""
        for attempt in range(_ATTEMPTS):
            self._make_present(order.sample_ids)
            try:
                return self._read(order)
            except FileNotFoundError:
                if not self.source.is_shared or attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError("not reached")

    def _read(self, order: Order) -> Any:
        if self.collate_fn is None:
            return self.collator.read(self.reader, order.sample_ids, order.lengths)
        return self.collate_fn([self._sample(i) for i in order.sample_ids.tolist()])

    def _sample(self, sample_id: int) -> dict[str, Any]:
        # Copies: a view would keep the whole map, and with it an evicted file, alive.
        sample = self.reader.sample(sample_id)
        return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in sample.items()}

    def _make_present(self, sample_ids: NDArray[np.int64]) -> None:
        if not self.source.is_shared:
            return
        states = self.source._shard_states.numpy()
        for shard in self.reader.open_shards():
            if states[shard] != LOCAL:
                self.reader.drop(shard)  # evicted: the map alone keeps its bytes on the disk
        for shard in np.unique(self.reader.shard_of(sample_ids)).tolist():
            self.source.prepare_shard(shard)


def order_of(task: Task, corpus: Corpus) -> Order:
    """The rows to read for a batch; a filler shows one."""
    ids = task.planned.sample_ids
    return Order(sample_ids=ids, lengths=np.asarray(corpus.lengths[ids], np.int64))


def finish(
    raw: Any, task: Task, corpus: Corpus, collator: Collator, *, pin_memory: bool
) -> tuple[Any, BatchMeta]:
    """The batch and its record; what a user's ``collate_fn`` made is given on as it is.

    Args:
        raw: From :meth:`BatchReader.read`.
        task: What the plan says of the batch.
        corpus: Lengths and loss tokens.
        collator: Makes the tensors.
        pin_memory: Put tensors into page-locked memory.
    """
    planned = task.planned
    ids = planned.sample_ids
    lengths = np.asarray(corpus.lengths[ids], np.int64)
    loss_tokens = lengths if corpus.loss_tokens is None else corpus.loss_tokens[ids]
    meta = BatchMeta.of(
        epoch=task.epoch,
        step=planned.step,
        micro_step=planned.micro_step,
        num_micro_steps=planned.num_micro_steps,
        bucket=planned.bucket,
        filler=planned.filler,
        sample_ids=ids,
        lengths=lengths,
        num_loss_tokens=int(loss_tokens.sum()),
        step_num_tokens=planned.step_num_tokens,
        step_num_loss_tokens=planned.step_num_loss_tokens,
        world_size=task.run.plan.world_size,
    )
    batch: Any = raw
    if isinstance(raw, RawBatch):
        shape = BatchShape(num_rows=planned.num_rows, padded_length=planned.padded_length)
        batch = Batch(collator.finish(raw, shape, filler=planned.filler), meta=meta)
    elif type(raw) is dict:
        batch = Batch(raw, meta=meta)
    if pin_memory and torch.cuda.is_available():
        batch = torch.utils.data._utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]
    return batch, meta
