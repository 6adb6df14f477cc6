"""Small built datasets whose every token tells which row it came from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardgen.build import build
from shardgen.options import BuildOptions


def row_tokens(row: int, length: int) -> np.ndarray:
    """Tokens of a source row, int32, shape (length,)."""
    return (row * 31 + np.arange(length)) % 30_000


def write_source(path: Path, lengths: Sequence[int], **columns: pa.Array) -> None:
    tokens = [row_tokens(row, int(length)) for row, length in enumerate(lengths)]
    offsets = np.concatenate(([0], np.cumsum([len(t) for t in tokens]))).astype(np.int32)
    flat = np.concatenate(tokens).astype(np.int32)
    table = {
        "input_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat)),
        "row": pa.array(np.arange(len(tokens))),
        **columns,
    }
    pq.write_table(pa.table(table), path)


def make_dataset(folder: Path, lengths: Sequence[int], **options: Any) -> Path:
    """Build a dataset of rows with these lengths; ``row`` is stored beside the tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    write_source(folder / "source.parquet", lengths)
    options.setdefault("columns", ("row",))
    out = folder / "out"
    build([str(folder / "source.parquet")], str(out), BuildOptions(**options))
    return out


def mixed_lengths(num_samples: int, longest: int, seed: int = 0) -> np.ndarray:
    """Long-tailed lengths, int64, shape (num_samples,)."""
    draw = np.random.default_rng(seed).beta(0.8, 3.0, num_samples)
    return 1 + (draw * (longest - 1)).astype(np.int64)
