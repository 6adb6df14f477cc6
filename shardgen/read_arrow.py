"""Arrow IPC files and streams, and Hugging Face datasets saved to disk with an index mapping."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from shardgen import storage
from shardgen.errors import UserError
from shardgen.formats import SourceFile, reading

INDEXED_ROWS = 4096


def _has_dictionaries(kind: Any) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionaries(kind.field(i).type) for i in range(kind.num_fields))


def describe_file(path: str, num_bytes: int, version: str) -> SourceFile:
    """Read the footer of an Arrow IPC file."""
    with reading(path), storage.open_input(path) as file:
        schema = pa.ipc.open_file(file).schema
        # Only one column is decoded to count the rows: the narrowest, should bodies be compressed.
        plain = [i for i, field in enumerate(schema) if pa.types.is_primitive(field.type)]
        options = pa.ipc.IpcReadOptions(included_fields=(plain or [0])[:1])
        reader = pa.ipc.open_file(file, options=options)
        rows = tuple(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
    return SourceFile(
        path=path, kind="arrow", num_bytes=num_bytes, version=version, schema=schema, partition_rows=rows
    )


def file_batches(
    source: SourceFile, columns: list[str], first: int, last: int, max_rows: int, threads: bool
) -> Iterator[Any]:
    with storage.open_input(source.path) as file:
        included = sorted(source.schema.get_field_index(name) for name in columns)
        options = pa.ipc.IpcReadOptions(included_fields=included, use_threads=threads)
        reader = pa.ipc.open_file(file, options=options)
        for number in range(first, last):
            yield reader.get_batch(number).select(columns)


def describe_stream(path: str, num_bytes: int, version: str) -> SourceFile:
    """Find the record batches of an Arrow IPC stream.

    ``marks`` holds the byte offset of each batch, so that it can be read alone. A stream with
    dictionaries is one partition: its batches need the dictionaries before them.
    """
    with reading(path), storage.open_input(path) as file:
        schema = pa.ipc.open_stream(file).schema
        marks: list[int] = []
        rows: list[int] = []
        if any(_has_dictionaries(field.type) for field in schema):
            file.seek(0)
            rows = [sum(batch.num_rows for batch in pa.ipc.open_stream(file))]
        else:
            file.seek(0)
            pa.ipc.read_message(file)  # the schema
            while True:
                at = file.tell()
                try:
                    message = pa.ipc.read_message(file)
                except EOFError:
                    break
                marks.append(at)
                rows.append(pa.ipc.read_record_batch(message, schema).num_rows)
    return SourceFile(
        path=path,
        kind="arrow-stream",
        num_bytes=num_bytes,
        version=version,
        schema=schema,
        partition_rows=tuple(rows),
        marks=tuple(marks),
    )


def stream_batches(
    source: SourceFile, columns: list[str], first: int, last: int, max_rows: int, threads: bool
) -> Iterator[Any]:
    with storage.open_input(source.path) as file:
        if not source.marks:
            if first < last:
                for batch in pa.ipc.open_stream(file):
                    yield batch.select(columns)
            return
        for number in range(first, last):
            file.seek(source.marks[number])
            message = pa.ipc.read_message(file)
            yield pa.ipc.read_record_batch(message, source.schema).select(columns)


def describe_indexed(path: str, data: list[SourceFile], indices: list[SourceFile]) -> SourceFile:
    """A saved dataset whose rows are picked and ordered by an index mapping.

    ``marks`` holds the data files and the index files; partitions are runs of index rows.
    """
    if not data:
        raise UserError(f"{path} names no data file in its state.json")
    num_rows = sum(source.num_rows for source in indices)
    edges = [*range(0, num_rows, INDEXED_ROWS), num_rows]
    return SourceFile(
        path=path,
        kind="indexed",
        num_bytes=sum(source.num_bytes for source in (*data, *indices)),
        version=",".join(source.version for source in (*data, *indices)),
        schema=data[0].schema,
        partition_rows=tuple(b - a for a, b in itertools.pairwise(edges)),
        marks=(tuple(data), tuple(indices)),
    )


def _index(files: tuple[SourceFile, ...], first: int, last: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows ``first..last - 1`` of an index mapping, int64."""
    parts = []
    for source in files:
        name = source.schema.names[0]
        num_partitions = len(source.partition_rows)
        for batch in source.batches([name], 0, num_partitions, 1 << 20):
            parts.append(batch.column(0).to_numpy(zero_copy_only=False).astype(np.int64))
    whole: np.ndarray[Any, np.dtype[np.int64]] = np.concatenate([np.zeros(0, np.int64), *parts])
    return whole[first:last]


def indexed_batches(
    source: SourceFile, columns: list[str], first: int, last: int, max_rows: int, threads: bool
) -> Iterator[Any]:
    data, indices = source.marks
    # Mapped, not read: an uncompressed stream costs no memory until its rows are picked.
    chunks = [b for file in data for b in file.batches(columns, 0, len(file.partition_rows), 1 << 30)]
    starts = np.cumsum([0] + [len(chunk) for chunk in chunks])
    begin = first * INDEXED_ROWS
    wanted = _index(indices, begin, last * INDEXED_ROWS)
    outside = (wanted < 0) | (wanted >= starts[-1])
    if outside.any():
        at = int(outside.argmax())
        raise UserError(
            f"{source.path} row {begin + at}: its index {int(wanted[at])} is outside "
            f"0..{int(starts[-1]) - 1}: the saved dataset is damaged"
        )
    step = min(max_rows, INDEXED_ROWS)
    for low in range(0, len(wanted), step):
        rows = wanted[low : low + step]
        order = np.argsort(rows, kind="stable")
        owner = np.searchsorted(starts, rows[order], side="right") - 1
        taken = [
            chunks[k].take(pa.array(rows[order][owner == k] - starts[k])) for k in np.unique(owner).tolist()
        ]
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        table = pa.Table.from_batches(taken).combine_chunks()
        yield from table.take(pa.array(back)).combine_chunks().to_batches()
