"""Readers to compare with: the same samples behind other libraries' files, the same padded batches out.

Every reader is used as its documentation shows it, at its best: rows stay numpy or Arrow arrays until one
shared, vectorised function pads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

Rows = Sequence[NDArray[Any]]
Tensors = dict[str, torch.Tensor]


def pad(rows: Rows) -> Tensors:
    """Rows of tokens to input_ids, attention_mask and labels of shape (B, longest)."""
    lengths = np.array([len(row) for row in rows])
    longest = int(lengths.max())
    ids = np.zeros((len(rows), longest), np.int64)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    real = np.arange(longest, dtype=np.int32) < lengths.astype(np.int32)[:, None]
    labels = ids.copy()
    np.copyto(labels, -100, where=~real)
    labels[:, 0] = -100
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(real),
        "labels": torch.from_numpy(labels),
    }


class Reader(Dataset[Tensors]):
    """Padded batches by lists of sample ids; opened on first use, in the process that uses it."""

    name: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: Any = None
        self._process = 0

    def open(self) -> Any:
        raise NotImplementedError

    def rows(self, opened: Any, ids: list[int]) -> Rows:
        raise NotImplementedError

    def __getitem__(self, ids: list[int]) -> Tensors:
        if self._process != os.getpid():
            self._opened, self._process = self.open(), os.getpid()
        return pad(self.rows(self._opened, ids))

    def batches(self, ids: Sequence[list[int]], num_workers: int) -> Iterator[Tensors]:
        """All batches, in order, from this process or from torch's worker processes."""
        if num_workers == 0:
            return (self[batch] for batch in ids)
        return iter(DataLoader(self, batch_size=None, sampler=ids, num_workers=num_workers))


class FlatMap(Reader):
    """One file of all tokens, mapped, and the offsets: the least that reading can cost."""

    name = "flat memory map"

    def open(self) -> tuple[NDArray[np.uint16], list[int]]:
        # np.memmap's own class makes every slice slower.
        tokens = np.asarray(np.memmap(self.path / "tokens.bin", np.uint16, "r"))
        return tokens, np.load(self.path / "offsets.npy").tolist()

    def rows(self, opened: Any, ids: list[int]) -> Rows:
        tokens, offsets = opened
        return [tokens[offsets[i] : offsets[i + 1]] for i in ids]

    @staticmethod
    def write(path: Path, samples: Rows) -> None:
        path.mkdir()
        lengths = [len(sample) for sample in samples]
        np.save(path / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
        with (path / "tokens.bin").open("wb") as file:
            for sample in samples:
                file.write(sample.tobytes())


class HuggingFaceArrow(Reader):
    """HF datasets, ``with_format("arrow")``, a batch of rows at a time."""

    name = "HF datasets (arrow)"

    def open(self) -> Any:
        import datasets

        return datasets.load_from_disk(str(self.path)).with_format("arrow")

    def rows(self, opened: Any, ids: list[int]) -> Rows:
        column = opened[ids].column("input_ids")
        found = []
        for chunk in column.chunks:
            values, offsets = chunk.values.to_numpy(), chunk.offsets.to_pylist()
            found += [values[a:b] for a, b in pairwise(offsets)]
        return found

    @staticmethod
    def write(path: Path, samples: Rows) -> None:
        import datasets
        import pyarrow as pa

        datasets.disable_progress_bars()
        offsets = np.concatenate([[0], np.cumsum([len(sample) for sample in samples])]).astype(np.int32)
        tokens = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(samples)))
        datasets.Dataset(pa.table({"input_ids": tokens})).save_to_disk(str(path))


class HuggingFaceNumpy(HuggingFaceArrow):
    """HF datasets, ``with_format("numpy")``."""

    name = "HF datasets (numpy)"

    def open(self) -> Any:
        import datasets

        return datasets.load_from_disk(str(self.path)).with_format("numpy")

    def rows(self, opened: Any, ids: list[int]) -> Rows:
        rows: Rows = opened[ids]["input_ids"]
        return rows


class LitData(Reader):
    """LitData by iteration, over samples stored in the very order of the batches.

    Its random access opens a chunk anew for every sample (about 1,000 samples/s), so it gets what favours it.
    """

    name = "LitData"

    def batches(self, ids: Sequence[list[int]], num_workers: int) -> Iterator[Tensors]:
        import litdata

        dataset = litdata.StreamingDataset(str(self.path))
        if num_workers == 0:
            rows = iter(dataset)
            return (pad([next(rows) for _ in batch]) for batch in ids)
        size = round(sum(map(len, ids)) / len(ids))
        return iter(
            litdata.StreamingDataLoader(dataset, batch_size=size, num_workers=num_workers, collate_fn=pad)
        )

    @staticmethod
    def write(path: Path, samples: Rows) -> None:
        import litdata

        litdata.optimize(
            fn=np.array,
            inputs=list(samples),
            output_dir=str(path),
            chunk_bytes="64MB",
            num_workers=1,
            verbose=False,
        )


class StockById(Reader):
    """Stock StreamingDataset on the same shards, ``dataset[i]``."""

    name = "StreamingDataset[i]"

    def open(self) -> Any:
        from streaming import StreamingDataset

        return StreamingDataset(local=str(self.path), batch_size=1)

    def rows(self, opened: Any, ids: list[int]) -> Rows:
        return [opened[i]["input_ids"] for i in ids]


class Stock(Reader):
    """Stock StreamingDataset and StreamingDataLoader on the same shards, as their documentation says.

    The order and the batches are its own, of as many rows as ours have on average.
    """

    name = "StreamingDataLoader"

    def batches(self, ids: Sequence[list[int]], num_workers: int) -> Iterator[Tensors]:
        from streaming import StreamingDataLoader, StreamingDataset

        size = round(sum(map(len, ids)) / len(ids))
        dataset = StreamingDataset(local=str(self.path), batch_size=size, shuffle=True)
        return iter(
            StreamingDataLoader(
                dataset,
                batch_size=size,
                num_workers=num_workers,
                collate_fn=pad_samples,
            )
        )


def pad_samples(samples: list[dict[str, Any]]) -> Tensors:
    return pad([sample["input_ids"] for sample in samples])
