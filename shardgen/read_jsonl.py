"""JSON lines, plain or compressed: cut into blocks at line ends and parsed by Arrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from shardgen import storage
from shardgen.errors import UserError
from shardgen.formats import SourceFile, reading

BLOCK_BYTES = 8 << 20
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}


def compression_of(magic: bytes) -> str | None:
    """Compression that a file starts with."""
    return next((name for start, name in COMPRESSIONS.items() if magic.startswith(start)), None)


def _blocks(file: Any, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Runs of whole lines with the byte (after decompression) where each starts."""
    rest, at = b"", begin
    while end is None or at + len(rest) < end:
        room = BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - at - len(rest))
        more = file.read(room)
        if not more:
            break
        text = rest + more
        cut = text.rfind(b"\n") + 1
        if cut:
            yield at, text[:cut]
            at += cut
        rest = text[cut:]
    if rest:
        yield at, rest


def _open(path: str, compression: str | None) -> Any:
    file = storage.open_input(path)
    return pa.CompressedInputStream(file, compression) if compression else file


def _parse(text: bytes, schema: Any | None, where: str) -> Any:
    """One table of the lines of ``text``; all inferred columns, or just those of ``schema``."""
    if not text.strip():
        return pa.table({}) if schema is None else schema.empty_table()
    behavior = "infer" if schema is None else "ignore"
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=behavior)
    try:
        # one block: Arrow would cut a long line otherwise
        settings = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
        return pj.read_json(pa.BufferReader(text), read_options=settings, parse_options=options)
    except pa.ArrowInvalid as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from error


def _unify(a: Any, b: Any) -> Any | None:
    """Type of a field that holds values of both types, or ``None``."""
    t = pa.types
    if t.is_temporal(a):  # strings that look like dates are strings
        a = pa.string()
    if t.is_temporal(b):
        b = pa.string()
    if a == b or t.is_null(b):
        return a
    if t.is_null(a):
        return b
    if t.is_list(a) and t.is_list(b):
        inner = _unify(a.value_type, b.value_type)
        return None if inner is None else pa.list_(inner)
    if {a, b} == {pa.int64(), pa.float64()}:
        return pa.float64()
    return None


def describe_jsonl(path: str, num_bytes: int, version: str, magic: bytes) -> SourceFile:
    """Parse a file once: its columns, their types over all lines, and its blocks.

    ``marks`` is the compression followed by the byte range of each block. A compressed file is one
    partition: it can only be read from its start.
    """
    compression = compression_of(magic)
    types: dict[str, Any] = {}
    rows: list[int] = []
    ranges: list[tuple[int, int]] = []
    with reading(path), _open(path, compression) as file:
        for at, text in _blocks(file):
            table = _parse(text, None, f"{path}, lines after row {sum(rows)}")
            for field in table.schema:
                both = _unify(types.get(field.name, pa.null()), field.type)
                if both is None:
                    raise UserError(
                        f"{path}, lines after row {sum(rows)}: column {field.name!r} changes from "
                        f"{types[field.name]} to {field.type}: give every line the same type"
                    )
                types[field.name] = both
            rows.append(table.num_rows)
            ranges.append((at, at + len(text)))
    if not types:
        raise UserError(f"{path} holds no JSON objects")
    return SourceFile(
        path=path,
        kind="jsonl",
        num_bytes=num_bytes,
        version=version,
        schema=pa.schema(list(types.items())),
        partition_rows=(sum(rows),) if compression else tuple(rows),
        marks=(compression, *([] if compression else ranges)),
    )


def jsonl_batches(
    source: SourceFile, columns: list[str], first: int, last: int, max_rows: int, threads: bool
) -> Iterator[Any]:
    compression, *ranges = source.marks
    schema = pa.schema([source.schema.field(name) for name in columns])
    if first >= last:
        return
    with _open(source.path, compression) as file:
        begin, end = (0, None) if compression else (ranges[first][0], ranges[last - 1][1])
        if begin:
            file.seek(begin)
        # Whole runs of lines: how they are cut here need not match the partitions.
        for _, text in _blocks(file, begin, end):
            table = _parse(text, schema, source.path)
            yield from table.select(columns).combine_chunks().to_batches()
