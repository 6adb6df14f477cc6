"""Where every encoded sample lies: sizes, shard cuts and offsets, known before a token is read.

MDS (streaming 0.13, ``format/mds/writer.py`` and ``encodings.py``). A shard is ``uint32 samples``,
``uint32 offsets[samples + 1]``, the JSON configuration, then the samples. A sample is one ``uint32``
size per column of variable size, then the columns' data, columns in the order of their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardgen.errors import UserError

Kind = Literal["aligned", "ragged", "scalar", "text"]
SCALAR_BYTES = {"int": 8, "uint8": 1, "uint64": 8, "float16": 2, "float32": 4, "float64": 8}
MAX_SHARD_BYTES = (1 << 32) - 1


@dataclass(frozen=True, kw_only=True)
class Column:
    """A stored column.

    Attributes:
        name: Name in the source and in the shards.
        encoding: MDS encoding, such as ``ndarray:int32``, ``int`` or ``str``.
        kind: ``aligned`` is an array with one value per token, ``ragged`` an array of its own
            length, ``scalar`` a number, ``text`` a string or bytes.
    """

    name: str
    encoding: str
    kind: Kind

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Stored type of an array's values or of a scalar."""
        name = self.encoding.removeprefix("ndarray:")
        return np.dtype("int64" if name == "int" else name)

    @property
    def fixed_bytes(self) -> int | None:
        """Encoded bytes of every value; ``None`` when they vary."""
        return SCALAR_BYTES[self.encoding] if self.kind == "scalar" else None


def array_header_bytes(num_values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bytes before the values of a one-dimensional ``ndarray``: one, and the shape in 1, 2 or 4 bytes."""
    return np.int64(2) + (num_values >= 1 << 8) + 2 * (num_values >= 1 << 16)


def value_bytes(column: Column, num_items: NDArray[np.int64]) -> NDArray[np.int64]:
    """Encoded bytes of a column's values.

    Args:
        column: The column.
        num_items: Values of each array, or bytes of each text; ignored for scalars; shape (N,).
    """
    if column.fixed_bytes is not None:
        return np.full(len(num_items), column.fixed_bytes, np.int64)
    if column.kind == "text":
        return num_items.astype(np.int64, copy=False)
    return array_header_bytes(num_items) + num_items * column.dtype.itemsize


def sample_bytes(
    columns: Sequence[Column], lengths: NDArray[np.int64], items: Mapping[str, NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Encoded bytes of every sample, int64, shape (N,).

    Args:
        columns: Stored columns.
        lengths: Tokens of each sample, shape (N,).
        items: For each ragged or text column its values or bytes per sample, shape (N,).
    """
    total = np.zeros(len(lengths), np.int64)
    for column in columns:
        total += value_bytes(column, items.get(column.name, lengths))
        if column.fixed_bytes is None:
            total += 4
    return total


def cut_shards(sizes: NDArray[np.int64], size_limit: int, extra_bytes: int) -> NDArray[np.int64]:
    """First sample of each shard, as one ``MDSWriter`` fed in order cuts them.

    Args:
        sizes: Encoded bytes of every sample, shape (N,).
        size_limit: Most bytes of a shard; a larger sample gets a shard of its own.
        extra_bytes: Bytes of a shard without samples.

    Returns:
        int64, shape (shards + 1,), from 0 to N. Like upstream's, the first shard is empty when the
        very first sample is over the limit.
    """
    ends = np.cumsum(sizes + 4)
    starts, first = [0], 0
    room = size_limit - extra_bytes
    if len(sizes) and int(ends[0]) > room:
        starts.append(0)
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        first = max(int(np.searchsorted(ends, before + room, side="right")), first + 1)
        starts.append(first)
    return np.array(starts, np.int64)


@dataclass(frozen=True, kw_only=True)
class ShardFormat:
    """What the configuration of every shard says.

    Attributes:
        columns: Stored columns, sorted by name.
        compression: Upstream's name of a compression, or ``None``.
        hashes: Upstream's names of hashes, sorted.
        size_limit: Most bytes of a shard before compression.
    """

    columns: tuple[Column, ...]
    compression: str | None
    hashes: tuple[str, ...]
    size_limit: int

    def __post_init__(self) -> None:
        names = [column.name for column in self.columns]
        if names != sorted(set(names)):
            raise UserError(f"columns {names} are not distinct and sorted")
        if not 1 <= self.size_limit <= MAX_SHARD_BYTES:
            raise UserError(
                f"--shard-size {self.size_limit} is outside 1..{MAX_SHARD_BYTES} bytes (offsets have 32 bits)"
            )

    def config(self) -> dict[str, object]:
        """The JSON object in each shard and in its index entry."""
        return {
            "version": 2,
            "format": "mds",
            "compression": self.compression,
            "hashes": list(self.hashes),
            "size_limit": self.size_limit,
            "column_names": [column.name for column in self.columns],
            "column_encodings": [column.encoding for column in self.columns],
            "column_sizes": [column.fixed_bytes for column in self.columns],
        }

    def config_bytes(self) -> bytes:
        return json.dumps(self.config(), sort_keys=True).encode()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every sample's place. Samples are in id order: by bucket, in source order inside it.

    Attributes:
        shard_bucket: Bucket of each shard, int64, shape (S,).
        shard_number: Number of each shard inside its bucket, int64, shape (S,).
        shard_start: First sample of each shard, int64, shape (S + 1,).
        shard_bytes: Bytes of each shard before compression, int64, shape (S,).
        sizes: Encoded bytes of each sample, int64, shape (N,).
        offsets: Byte of each sample inside its shard, int64, shape (N,).
        shards: Shard of each sample, int64, shape (N,).
    """

    shard_bucket: NDArray[np.int64]
    shard_number: NDArray[np.int64]
    shard_start: NDArray[np.int64]
    shard_bytes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    shards: NDArray[np.int64]

    @property
    def num_shards(self) -> int:
        return len(self.shard_bucket)

    def shard_header(self, shard: int, config: bytes) -> bytes:
        """Everything before the samples of a shard."""
        first, last = int(self.shard_start[shard]), int(self.shard_start[shard + 1])
        # (samples + 1,) byte offsets; the last is the end of the file
        offsets = np.append(self.offsets[first:last], self.shard_bytes[shard]).astype("<u4")
        return np.uint32(last - first).tobytes() + offsets.tobytes() + config


def lay_out(sizes: NDArray[np.int64], bucket_counts: NDArray[np.int64], fmt: ShardFormat) -> Layout:
    """Cut every bucket into shards.

    Args:
        sizes: Encoded bytes of each sample, in id order, shape (N,).
        bucket_counts: Samples of each bucket, shape (K,); an empty bucket has no shard.
        fmt: What the shards say of themselves.
    """
    extra = 8 + len(fmt.config_bytes())
    buckets: list[int] = []
    numbers: list[int] = []
    starts: list[NDArray[np.int64]] = []
    first = 0
    for bucket, count in enumerate(bucket_counts.tolist()):
        if not count:
            continue
        cuts = cut_shards(sizes[first : first + count], fmt.size_limit, extra)
        buckets += [bucket] * (len(cuts) - 1)
        numbers += range(len(cuts) - 1)
        starts.append(cuts[:-1] + first)
        first += count
    shard_start = np.append(np.concatenate(starts) if starts else np.zeros(0, np.int64), first).astype(
        np.int64
    )
    counts = np.diff(shard_start)
    cumulative = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    payload = cumulative[shard_start[1:]] - cumulative[shard_start[:-1]]
    header = extra + 4 * counts
    shard_bytes = header + payload
    if len(shard_bytes) and int(shard_bytes.max()) > MAX_SHARD_BYTES:
        raise UserError(
            f"a sample of {int(sizes.max())} bytes does not fit a shard: offsets have 32 bits; "
            "use --over-length split or truncate, or store fewer columns"
        )
    shards = np.repeat(np.arange(len(counts)), counts)
    offsets = cumulative[:-1] + (header - cumulative[shard_start[:-1]])[shards]
    return Layout(
        shard_bucket=np.array(buckets, np.int64),
        shard_number=np.array(numbers, np.int64),
        shard_start=shard_start,
        shard_bytes=shard_bytes,
        sizes=sizes,
        offsets=offsets,
        shards=shards,
    )


def token_counts(
    entry: dict[str, Any], data: NDArray[np.uint8], starts: NDArray[np.int64], tokens_column: str
) -> NDArray[np.int64]:
    """Tokens of each sample of a shard, -1 where its header makes no sense.

    Args:
        entry: Index entry of the shard.
        data: Bytes of the shard.
        starts: First byte of each sample, shape (N,).
        tokens_column: Column of tokens.
    """
    names, sizes = entry["column_names"], entry["column_sizes"]
    encoding = entry["column_encodings"][names.index(tokens_column)]
    itemsize = np.dtype(encoding.removeprefix("ndarray:")).itemsize
    variable = [i for i, size in enumerate(sizes) if size is None]
    at = starts + 4 * len(variable)  # first byte of the first column
    num_bytes = np.zeros(len(starts), np.int64)
    word = 0
    for name, size in zip(names, sizes, strict=True):
        if size is None:
            where = starts[:, None] + 4 * word + np.arange(4)
            num_bytes = data[np.minimum(where, len(data) - 1)].view("<u4")[:, 0].astype(np.int64)
            word += 1
        else:
            num_bytes = np.full(len(starts), size, np.int64)
        if name == tokens_column:
            break
        at = at + num_bytes
    counts = np.full(len(starts), -1, np.int64)
    for header in (2, 3, 5):  # one byte, then the shape in 1, 2 or 4
        tokens = (num_bytes - header) // itemsize
        fits = (
            (tokens > 0) & (tokens * itemsize + header == num_bytes) & (array_header_bytes(tokens) == header)
        )
        first = data[np.minimum(at, len(data) - 1)]
        fits &= first == (4 | (header - 1) >> 1)
        counts[fits] = tokens[fits]
    return counts
