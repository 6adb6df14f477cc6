"""What the user names as input, as a list of source files; and the lengths of their rows."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardgen.errors import UserError

if TYPE_CHECKING:  # pyarrow takes 0.3 s to import, so only readers do
    import numpy as np
    from numpy.typing import NDArray

    from shardgen.formats import SourceFile

SUFFIXES = (".parquet", ".arrow", ".feather", ".ipc", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")
DEFAULT_LENGTH_COLUMN = "seq_len"


def _is_build(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, "manifest.json"))


def _walk(directory: str) -> Iterator[str]:
    """Data files below a directory, sorted by path; hidden files and our own builds are left out."""
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if name.startswith((".", "_")):
            continue
        if os.path.isdir(path):
            if not _is_build(path):
                yield from _walk(path)
        elif name.lower().endswith(SUFFIXES):
            yield path


def expand(inputs: Sequence[str], split: str | None = None) -> list[str]:
    """Files named by paths, directories and globs: arguments in their order, the files of each sorted.

    Raises:
        UserError: A path does not exist, a directory or pattern holds no data file, or a file comes twice.
    """
    files: list[str] = []
    for name in inputs:
        if os.path.isdir(name):
            if _is_build(name):
                raise UserError(f"{name} is a finished build, not a source: name the files it was made from")
            found = list(_walk(name))
            if not found:
                raise UserError(f"{name} holds no data file (looked for {', '.join(SUFFIXES)})")
        elif os.path.exists(name):
            found = [name]
        elif glob.has_magic(name):
            found = sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))
            if not found:
                raise UserError(f"{name} matches no file")
        else:
            raise UserError(f"{name} does not exist")
        files += found
    seen: dict[tuple[int, int], str] = {}
    for path in files:
        info = os.stat(path)
        first = seen.setdefault((info.st_dev, info.st_ino), path)
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
        info = os.stat(path)
        if not stat.S_ISREG(info.st_mode):
            raise UserError(f"{path} is not a regular file")
        with open(path, "rb") as file:
            magic = file.read(8)
    version = f"{info.st_size}:{info.st_mtime_ns}"
    if magic[:4] == b"PAR1":
        return formats.describe_parquet(path, info.st_size, version)
    raise UserError(f"{path} is not Parquet")


def open_sources(inputs: Sequence[str], split: str | None = None) -> list[SourceFile]:
    """All source files that ``inputs`` name, in order; errors as in :func:`expand` and :func:`describe`."""
    return [describe(path) for path in expand(inputs, split)]


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
) -> SourceLengths:
    """Lengths of all rows, for planning; the tokens are not read when there is a column of lengths.

    Args:
        paths: Data files, directories or globs; a finished build; ``.npy`` or ``.npz`` files of lengths.
        tokens_column: Column of tokens.
        length_column: Column of lengths; ``None`` takes ``seq_len`` when there is one; empty: none.
        split: Which split of a saved DatasetDict.

    Raises:
        UserError: Something cannot be read, or no row has a token.
    """
    import numpy as np

    from shardgen.lengths import read_lengths_file

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
            rows = scan_lengths(sources, tokens_column=tokens_column, length_column=length_column)
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
