"""Check a finished build: files against their hashes, samples against their rows of ``samples.parquet``."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from shardgen.errors import UserError
from shardgen.layout import token_counts
from shardgen.manifest import Manifest, fingerprint
from shardgen.upstream import decompress, get_hash


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that is not as it was built.

    Attributes:
        path: File, relative to the build.
        text: What is wrong.
    """

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """A shard as the index describes it.

    Attributes:
        path: Stored file, relative to the build.
        bucket: Its bucket.
        first_sample: Id of its first sample.
        entry: Its entry in the bucket's index.
    """

    path: str
    bucket: int
    first_sample: int
    entry: dict[str, Any]


class Verification:
    """The checks of one build; :attr:`problems` collects what they find."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.manifest = Manifest.load(directory)
        self.problems: list[Problem] = []
        self.shards: list[ShardFile] = []
        self.samples: dict[str, NDArray[Any]] = {}

    def add(self, path: str, text: str) -> None:
        self.problems.append(Problem(path=path, text=text))

    def check(self, progress: Callable[[int], None] | None = None) -> list[Problem]:
        """Everything that can be told without the source."""
        self._read_samples()
        self._read_indexes()
        contents: list[tuple[str, int, int, str]] = []
        for shard in self.shards:
            found = self._check_shard(shard)
            if found is not None:
                contents.append(found)
            if progress is not None:
                progress(shard.entry["samples"])
        lengths = self.samples.get("length")
        if lengths is not None and len(contents) == len(self.shards):
            now = fingerprint(contents, lengths, self.samples.get("loss_tokens"))
            if now != self.manifest.fingerprint and not self.problems:
                self.add(
                    "manifest.json",
                    f"fingerprint {self.manifest.fingerprint} is not that of the files, {now}",
                )
        return self.problems

    def _read_samples(self) -> None:
        tables = []
        for number, bucket in enumerate(self.manifest.buckets):
            if bucket.directory is None:
                continue
            path = f"{bucket.directory}/samples.parquet"
            try:
                table = pq.read_table(os.path.join(self.directory, path))
            except (OSError, ValueError) as error:
                self.add(path, f"cannot be read: {' '.join(str(error).split())}")
                return
            if table.num_rows != bucket.num_samples:
                self.add(path, f"has {table.num_rows} rows, the manifest counts {bucket.num_samples}")
            columns = {name: table[name].to_numpy() for name in table.column_names}
            self._check_rows(path, number, columns)
            tables.append(columns)
        names = tables[0].keys() if tables else ()
        self.samples = {name: np.concatenate([columns[name] for columns in tables]) for name in names}
        self._check_unique()

    def _check_rows(self, path: str, bucket: int, columns: dict[str, NDArray[Any]]) -> None:
        """Lengths inside the bucket, rows in source order."""
        summary = self.manifest.buckets[bucket]
        outside = (columns["length"] <= summary.lower) | (columns["length"] > summary.upper)
        if outside.any():
            at = int(outside.argmax())
            found = columns["length"][at]
            self.add(path, f"sample {at} has length {found}, outside {summary.lower + 1}..{summary.upper}")
        keys = np.stack([columns[name] for name in ("source_file", "source_row", "source_start")]).astype(
            np.int64
        )
        before, after = keys[:, :-1], keys[:, 1:]
        # lexicographic: after > before
        file, row, start = after - before
        ascending = (file > 0) | ((file == 0) & ((row > 0) | ((row == 0) & (start > 0))))
        if not ascending.all():
            at = int((~ascending).argmax()) + 1
            self.add(
                path,
                f"sample {at} (file {keys[0, at]} row {keys[1, at]}) repeats or precedes the one before it",
            )

    def _check_unique(self) -> None:
        """No source row twice; inside a bucket the order shows it, so this is for rows in two buckets."""
        if not self.samples:
            return
        names = ("source_file", "source_row", "source_start")
        keys = np.stack([self.samples[name] for name in names], axis=1).astype(np.int64)  # (N, 3)
        order = np.lexsort(keys.T[::-1])
        same = (keys[order][1:] == keys[order][:-1]).all(axis=1)
        if same.any():
            file, row, start = keys[order[int(same.argmax()) + 1]].tolist()
            self.add("samples.parquet", f"source file {file} row {row} from token {start} is there twice")

    def _read_indexes(self) -> None:
        merged: list[dict[str, Any]] = []
        first = 0
        for number, bucket in enumerate(self.manifest.buckets):
            if bucket.directory is None:
                continue
            path = f"{bucket.directory}/index.json"
            entries = self._load_index(path)
            if entries is None:
                continue
            count = sum(entry["samples"] for entry in entries)
            if (count, len(entries)) != (bucket.num_samples, bucket.num_shards):
                self.add(
                    path,
                    f"lists {len(entries)} shards with {count} samples, "
                    f"the manifest counts {bucket.num_shards} with {bucket.num_samples}",
                )
            for entry in entries:
                stored = entry["zip_data"] or entry["raw_data"]
                name = f"{bucket.directory}/{stored['basename']}"
                self.shards.append(ShardFile(path=name, bucket=number, first_sample=first, entry=entry))
                first += entry["samples"]
                renamed = json.loads(json.dumps(entry))
                for key in ("raw_data", "zip_data"):
                    if renamed[key]:
                        renamed[key]["basename"] = f"{bucket.directory}/{renamed[key]['basename']}"
                merged.append(renamed)
        whole = self._load_index("index.json")
        if whole is not None and whole != merged:
            self.add("index.json", "is not the buckets' index files joined")

    def _load_index(self, path: str) -> list[dict[str, Any]] | None:
        try:
            with open(os.path.join(self.directory, path), encoding="utf-8") as file:
                shards = json.load(file)["shards"]
            return list(shards)
        except (OSError, ValueError, KeyError) as error:
            self.add(path, f"cannot be read: {error}")
            return None

    def raw(self, shard: ShardFile) -> bytes | mmap.mmap:
        """Uncompressed bytes of a shard."""
        with open(os.path.join(self.directory, shard.path), "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if shard.entry["zip_data"]:
            return bytes(decompress(shard.entry["compression"], bytes(data)))
        return data

    def _check_shard(self, shard: ShardFile) -> tuple[str, int, int, str] | None:
        """Size, hashes and structure of one shard; what the fingerprint needs of it."""
        full = os.path.join(self.directory, shard.path)
        stored = shard.entry["zip_data"] or shard.entry["raw_data"]
        try:
            size = os.path.getsize(full)
            if size != stored["bytes"]:
                self.add(shard.path, f"has {size} bytes, its index entry says {stored['bytes']}")
                return None
            with open(full, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                bad = [name for name, value in stored["hashes"].items() if get_hash(name, data) != value]
            if bad:
                self.add(shard.path, f"its {' and '.join(bad)} differs: its bytes changed since the build")
            raw = self.raw(shard)
        except Exception as error:  # a damaged compressed shard raises whatever its decoder does
            self.add(shard.path, f"cannot be read: {' '.join(str(error).split())}")
            return None
        info = shard.entry["raw_data"]
        bad = [name for name, value in info["hashes"].items() if get_hash(name, raw) != value]
        if shard.entry["zip_data"] and bad:
            self.add(shard.path, f"its {' and '.join(bad)} differs once decompressed")
        view = np.frombuffer(raw, np.uint8)
        self._check_structure(shard, view)
        algorithm = next(iter(info["hashes"]), "xxh64")
        return os.path.basename(info["basename"]), shard.entry["samples"], len(view), get_hash(algorithm, raw)

    def _check_structure(self, shard: ShardFile, data: NDArray[np.uint8]) -> None:
        """Header, offsets and configuration; each sample's tokens against its length."""
        num_samples = shard.entry["samples"]
        header = 4 * (num_samples + 2)
        if len(data) < header or int(data[:4].view("<u4")[0]) != num_samples:
            self.add(shard.path, f"does not hold the {num_samples} samples its index entry says")
            return
        offsets = data[4:header].view("<u4").astype(np.int64)  # (samples + 1,)
        config = data[header : offsets[0]].tobytes()
        expected = {k: v for k, v in shard.entry.items() if k not in ("samples", "raw_data", "zip_data")}
        if config != json.dumps(expected, sort_keys=True).encode():
            self.add(shard.path, "its configuration is not that of its index entry")
            return
        if offsets[-1] != len(data) or (np.diff(offsets) <= 0).any():
            self.add(shard.path, "its offsets do not lead from its header to its end")
            return
        lengths = self.samples.get("length")
        if lengths is None:
            return
        said = lengths[shard.first_sample : shard.first_sample + num_samples].astype(np.int64)
        found = token_counts(shard.entry, data, offsets[:-1], self.manifest.tokens_column)
        if len(said) != num_samples:
            return
        wrong = found != said
        for at in np.flatnonzero(wrong)[:3].tolist():
            self.add(shard.path, f"sample {at} has {found[at]} tokens, samples.parquet says {said[at]}")


def verify(
    directory: str,
    sources: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
    split: str | None = None,
) -> Verification:
    """Check a build, against its source when one is named.

    Args:
        directory: A finished build.
        sources: The inputs it was made from, in the same order.
        progress: Called with the number of samples checked since the last call; each is checked once, and
            once more beside the source.
        split: Split of a saved DatasetDict.

    Raises:
        UserError: It is no build, or the sources cannot be read.
    """
    if not os.path.isdir(directory):
        raise UserError(f"{directory} does not exist")
    verification = Verification(directory)
    verification.check(progress)
    if sources:
        from shardgen.verify_source import compare

        compare(verification, sources, split, progress)
    return verification
