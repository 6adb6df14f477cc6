"""What the user names as input, as a list of source files; and the lengths of their rows."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardgen import storage
from shardgen.errors import UserError
from shardgen.progress import Progress

if TYPE_CHECKING:  # pyarrow takes 0.3 s to import, so only readers do
    import numpy as np
    from numpy.typing import NDArray

    from shardgen.formats import SourceFile

SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
DEFAULT_LENGTH_COLUMN = "seq_len"


def _is_build(directory: str) -> bool:
    return storage.kind_of(storage.join(directory, "manifest.json")) == "file"


def _read_json(path: str) -> Any:
    try:
        return json.loads(storage.read_bytes(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _saved_split(directory: str, split: str | None) -> str | None:
    """Directory of the split of what Hugging Face's ``save_to_disk`` wrote; ``None`` for any other directory.

    Raises:
        UserError: A DatasetDict without ``--split``, or a split that is not there.
    """
    listed = storage.join(directory, "dataset_dict.json")
    if storage.kind_of(listed) == "file":
        splits = list(_read_json(listed)["splits"])
        if split is None or split not in splits:
            asked = "several splits" if split is None else f"no split {split!r}"
            raise UserError(f"{directory} has {asked} ({', '.join(splits)}): name one with --split")
        return storage.join(directory, split)
    return directory if storage.kind_of(storage.join(directory, "state.json")) == "file" else None


def _walk(directory: str) -> Iterator[str]:
    """Data files below a directory, sorted by path; hidden files and our own builds are left out."""
    for name in storage.listing(directory):
        path = storage.join(directory, name)
        if name.startswith((".", "_")):
            continue
        if name.lower().endswith(SUFFIXES):
            yield path
        elif storage.kind_of(path) == "directory" and not _is_build(path):
            yield from _walk(path)


def _glob(pattern: str) -> list[str]:
    """Files that match a pattern, sorted."""
    if not storage.is_remote(pattern):
        return sorted(p for p in glob.glob(storage.local_path(pattern), recursive=True) if os.path.isfile(p))
    fixed = pattern.split("*")[0].split("?")[0].split("[")[0].rpartition("/")[0]
    return sorted(path for path in _walk(fixed) if fnmatch.fnmatchcase(path, pattern))


def expand(inputs: Sequence[str], split: str | None = None) -> list[str]:
    """Files and saved datasets that paths, directories and globs name: in order, each one's sorted.

    Raises:
        UserError: A path does not exist, a directory or pattern holds no data file, or a file comes twice.
    """
    files: list[str] = []
    for name in inputs:
        kind = storage.kind_of(name)
        if kind == "directory":
            if _is_build(name):
                raise UserError(f"{name} is a finished build, not a source: name the files it was made from")
            saved = _saved_split(name, split)
            found = [saved] if saved is not None else list(_walk(name))
            if not found:
                raise UserError(f"{name} holds no data file (looked for {', '.join(SUFFIXES)})")
        elif kind == "file":
            found = [name]
        elif glob.has_magic(name):
            found = _glob(name)
            if not found:
                raise UserError(f"{name} matches no file")
        else:
            raise UserError(f"{name} does not exist")
        files += found
    seen: dict[str, str] = {}
    for path in files:
        first = seen.setdefault(path if storage.is_remote(path) else os.path.realpath(path), path)
        if first is not path:
            raise UserError(f"{path} is named twice (also as {first}): its rows would be built twice")
    return files


def describe(path: str) -> SourceFile:
    """Find out what a file is and how many rows it has.

    Raises:
        UserError: It cannot be read, or is of no known kind.
    """
    from shardgen import formats

    with formats.reading(path):
        if not storage.is_remote(path) and not os.path.isfile(storage.local_path(path)):
            raise UserError(f"{path} is not a regular file")
        size, version = storage.size_and_version(path)
        magic = storage.read_bytes(path, 8)
    if magic[:4] == b"PAR1":
        from shardgen.read_parquet import describe_parquet

        return describe_parquet(path, size, version)
    from shardgen import read_arrow, read_jsonl

    if magic[:6] == b"ARROW1":
        return read_arrow.describe_file(path, size, version)
    if magic[:4] == b"\xff\xff\xff\xff":
        return read_arrow.describe_stream(path, size, version)
    if magic.lstrip()[:1] == b"{" or read_jsonl.compression_of(magic):
        return read_jsonl.describe_jsonl(path, size, version, magic)
    raise UserError(f"{path} is not Parquet, nor Arrow IPC, nor JSON lines")


def _saved_dataset(directory: str) -> list[SourceFile]:
    """The files of a saved dataset, as its ``state.json`` lists them; others lying about are not read."""
    state = _read_json(storage.join(directory, "state.json"))
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
        indices = [entry["filename"] for entry in state.get("_indices_data_files") or ()]
    except (KeyError, TypeError) as error:
        raise UserError(f"{directory}/state.json is not of a saved dataset: no {error}") from error
    data = [describe(storage.join(directory, name)) for name in names]
    if not indices:
        return data
    from shardgen.read_arrow import describe_indexed

    return [describe_indexed(directory, data, [describe(storage.join(directory, name)) for name in indices])]


def open_sources(inputs: Sequence[str], split: str | None = None) -> list[SourceFile]:
    """All source files that ``inputs`` name, in order; errors as in :func:`expand` and :func:`describe`."""
    sources: list[SourceFile] = []
    for path in expand(inputs, split):
        sources += _saved_dataset(path) if storage.kind_of(path) == "directory" else [describe(path)]
    return sources


def find_length_column(source: SourceFile, tokens_column: str, length_column: str | None) -> str | None:
    """Name of the column of lengths to use in a file.

    Args:
        source: The file.
        tokens_column: Name of the column of tokens.
        length_column: Name asked for; ``None`` takes ``seq_len`` when there is one; empty asks for none.

    Raises:
        UserError: A column that was asked for is missing.
    """
    names = source.schema.names
    if tokens_column not in names:
        raise UserError(
            f"{source.path} has no column {tokens_column!r} (it has {', '.join(map(repr, names))}): "
            "name the tokens with --tokens-column"
        )
    if length_column is None:
        return DEFAULT_LENGTH_COLUMN if DEFAULT_LENGTH_COLUMN in names else None
    if length_column and length_column not in names:
        raise UserError(
            f"{source.path} has no column {length_column!r} (it has {', '.join(map(repr, names))}): "
            "name the lengths with --length-column"
        )
    return length_column or None


@dataclass(frozen=True, kw_only=True)
class SourceLengths:
    """Lengths of a corpus as its source tells them.

    Attributes:
        lengths: Tokens of each row, int64, shape (N,), rows without tokens left out.
        num_skipped: Rows that have no tokens or are null.
        files: Files read.
    """

    lengths: NDArray[np.int64]
    num_skipped: int
    files: tuple[str, ...]


def read_lengths(
    paths: Sequence[str],
    *,
    tokens_column: str = "input_ids",
    length_column: str | None = None,
    split: str | None = None,
    progress: Progress | None = None,
) -> SourceLengths:
    """Lengths of all rows, for planning; the tokens are not read when there is a column of lengths.

    Args:
        paths: Data files, directories or globs; a finished build; ``.npy`` or ``.npz`` files of lengths.
        tokens_column: Column of tokens.
        length_column: Column of lengths; ``None`` takes ``seq_len`` when there is one; empty: none.
        split: Which split of a saved DatasetDict.
        progress: Told of the rows read.

    Raises:
        UserError: Something cannot be read, or no row has a token.
    """
    import numpy as np

    from shardgen.lengths import read_lengths_file

    progress = progress or Progress()
    parts: list[NDArray[np.int64]] = []
    files: list[str] = []
    num_rows = 0
    for path in paths:
        if str(path).endswith((".npy", ".npz")):
            found, names = read_lengths_file(Path(path)), [str(path)]
        elif _is_build(path):
            found, names = _built_lengths(path), [str(path)]
        else:
            from shardgen.scan import scan_lengths

            sources = open_sources([path], split)
            progress.start("reading lengths", sum(source.num_rows for source in sources))
            rows = scan_lengths(
                sources,
                tokens_column=tokens_column,
                length_column=length_column,
                progress=progress.advance,
            )
            found, names = rows.lengths.astype(np.int64), [source.path for source in sources]
        num_rows += len(found)
        parts.append(found[found > 0])
        files += names
    lengths = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    if not len(lengths):
        raise UserError(f"{', '.join(map(str, paths))}: no row has a token")
    return SourceLengths(lengths=lengths, num_skipped=num_rows - len(lengths), files=tuple(files))


def _built_lengths(directory: str) -> NDArray[np.int64]:
    """Lengths of a finished build, in sample id order, from its ``samples.parquet`` files."""
    import numpy as np
    import pyarrow.parquet as pq

    from shardgen.formats import reading
    from shardgen.manifest import Manifest

    parts = [np.zeros(0, np.int64)]
    for bucket in Manifest.load(directory).buckets:
        if bucket.directory is not None:
            path = os.path.join(directory, bucket.directory, "samples.parquet")
            with reading(path):
                parts.append(pq.read_table(path, columns=["length"])["length"].to_numpy().astype(np.int64))
    return np.concatenate(parts)
