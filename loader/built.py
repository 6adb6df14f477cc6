"""What a build says of its samples, without touching a shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from loader.pool import Corpus
from shardgen.errors import UserError
from shardgen.manifest import Manifest

SAMPLES = "samples.parquet"


def read_samples(path: str, columns: Sequence[str]) -> pa.Table:
    """Columns of a ``samples.parquet``.

    Raises:
        UserError: It cannot be read.
    """
    try:
        # Not read_table, which imports all of pyarrow.dataset first.
        with pq.ParquetFile(path) as file:
            return file.read(columns=list(columns))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}; build the dataset again") from error


def _values(table: pa.Table, column: str) -> NDArray[Any]:
    """A column of whole numbers or booleans without nulls, shape (rows,)."""
    # From the buffers: to_numpy imports all of pandas and pyarrow.compute, which takes most of a second.
    parts = []
    for chunk in table[column].chunks:
        if not len(chunk):
            continue
        _, values = chunk.buffers()
        if pa.types.is_boolean(chunk.type):
            bits = np.unpackbits(np.frombuffer(values, np.uint8), bitorder="little")
            parts.append(bits[chunk.offset : chunk.offset + len(chunk)])
        else:
            kind = "i" if pa.types.is_signed_integer(chunk.type) else "u"
            dtype = np.dtype(f"{kind}{chunk.type.bit_width // 8}")
            parts.append(np.frombuffer(values, dtype, len(chunk), chunk.offset * dtype.itemsize))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def read_corpus(
    manifest: Manifest,
    samples_per_shard: NDArray[np.int64],
    path_of: Callable[[str], str],
    labels: Literal["causal", "tokens"] | None,
) -> Corpus:
    """Lengths, loss tokens and shard sizes of a build.

    Args:
        manifest: Of the build.
        samples_per_shard: Samples of all shards in order, int64, shape (num_shards,).
        path_of: Path of the ``samples.parquet`` of a bucket's directory.
        labels: Which tokens count in the loss; with ``None`` all do.

    Raises:
        UserError: A file cannot be read, or does not agree with the manifest.
    """
    masked = manifest.loss_mask_column is not None and labels is not None
    names = ["length", "loss_tokens", "first_token_loss"] if masked else ["length"]
    lengths, loss_tokens, shard_sizes = [], [], []
    first_shard = 0
    for bucket in manifest.buckets:
        sizes = samples_per_shard[first_shard : first_shard + bucket.num_shards]
        first_shard += bucket.num_shards
        shard_sizes.append(sizes.copy())
        if bucket.directory is None:
            continue
        path = path_of(bucket.directory)
        table = read_samples(path, names)
        if table.num_rows != bucket.num_samples or int(sizes.sum()) != bucket.num_samples:
            raise UserError(
                f"{path} has {table.num_rows} rows and its shards {int(sizes.sum())} samples, but the "
                f"manifest counts {bucket.num_samples}: build the dataset again"
            )
        lengths.append(_values(table, "length"))
        if masked:
            first = _values(table, "first_token_loss").astype(np.int32)
            loss_tokens.append(_values(table, "loss_tokens") - (first if labels == "causal" else 0))
        elif labels == "causal":
            loss_tokens.append(lengths[-1] - 1)  # position 0 never counts
    return Corpus(
        lengths=np.concatenate(lengths),
        loss_tokens=np.concatenate(loss_tokens) if loss_tokens else None,
        shard_sizes=tuple(shard_sizes),
    )
