"""Compare a build with its source: encode every row again and look for it where it belongs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from shardgen.buckets import Buckets
from shardgen.cost import CostModel
from shardgen.errors import UserError
from shardgen.manifest import Manifest
from shardgen.options import BuildOptions
from shardgen.prepare import Prepared, lay_out_build
from shardgen.reading import RaggedColumnError
from shardgen.sources import open_sources
from shardgen.tasks import Task
from shardgen.upstream import get_hash
from shardgen.verify import Verification
from shardgen.write import ShardFiles, WriteJob, run_task

MAX_NAMED = 10


def options_of(manifest: Manifest) -> BuildOptions:
    """The options that made a build; lengths are counted, so that no column of lengths is trusted."""
    recorded = dict(manifest.options)
    model = CostModel(
        quadratic_length=recorded.pop("quadratic_length"), overhead_tokens=recorded.pop("overhead_tokens")
    )
    recorded["num_buckets"] = recorded.pop("buckets")
    known = {field.name for field in fields(BuildOptions)}
    values = {name: value for name, value in recorded.items() if name in known}
    values["hashes"] = tuple(values["hashes"])
    others = {manifest.tokens_column, manifest.loss_mask_column}
    return BuildOptions(
        cost_model=model,
        tokens_column=manifest.tokens_column,
        length_column="",
        loss_mask_column=manifest.loss_mask_column,
        columns=tuple(name for name in manifest.columns if name not in others),
        **values,
    )


@dataclass
class Differences:
    """Samples whose bytes differ, by id, with the hash of what is there and of what should be."""

    ids: list[int]
    stored: list[str]
    expected: dict[str, int]


class StoredShards(ShardFiles):
    """Compares instead of writing."""

    def __init__(self, verification: Verification, prepared: Prepared, found: Differences) -> None:
        super().__init__(verification.directory, {})
        self._verification, self._prepared, self._found = verification, prepared, found
        self._data: dict[int, NDArray[np.uint8]] = {}

    def write(self, shard: int, offset: int, data: NDArray[np.uint8]) -> None:
        if shard not in self._data:
            raw = self._verification.raw(self._verification.shards[shard])
            self._data[shard] = np.frombuffer(raw, np.uint8)
        stored = self._data[shard][offset : offset + len(data)]
        if np.array_equal(stored, data):
            return
        layout = self._prepared.arrangement.layout
        first, last = int(layout.shard_start[shard]), int(layout.shard_start[shard + 1])
        offsets = layout.offsets[first:last]
        low, high = np.searchsorted(offsets, [offset, offset + len(data)]).tolist()
        for sample in range(first + low, first + high):
            a = int(layout.offsets[sample]) - offset
            b = a + int(layout.sizes[sample])
            if not np.array_equal(stored[a:b], data[a:b]):
                self._found.ids.append(sample)
                self._found.stored.append(get_hash("xxh64", stored[a:b].tobytes()))
                self._found.expected[get_hash("xxh64", data[a:b].tobytes())] = sample

    def close(self) -> None:
        self._data.clear()


def _compare_all(
    verification: Verification,
    inputs: Sequence[str],
    split: str | None,
    progress: Callable[[int], None] | None,
) -> None:
    manifest = verification.manifest
    options = options_of(manifest)
    sources = open_sources(inputs, split)
    expected = [(source["num_rows"]) for source in manifest.sources]
    if [source.num_rows for source in sources] != expected:
        raise UserError(
            f"--source has files of {[source.num_rows for source in sources]} rows, the build's had "
            f"{expected} rows: name the same inputs in the same order"
        )
    ragged: set[str] = set()
    buckets = Buckets(boundaries=manifest.boundaries)
    while True:
        prepared = lay_out_build(sources, options, lambda lengths: buckets, ragged=ragged)
        encodings = {column.name: column.encoding for column in prepared.format.columns}
        if encodings != manifest.columns:
            raise UserError(f"--source has columns {encodings}, the build stores {manifest.columns}")
        try:
            found = Differences(ids=[], stored=[], expected={})
            _compare_tasks(verification, prepared, found, progress)
            _report(verification, prepared, found)
            return
        except RaggedColumnError as error:
            ragged.add(error.column)


def compare(
    verification: Verification,
    inputs: Sequence[str],
    split: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Add to the problems whatever differs between the build and its source.

    Args:
        verification: The checks so far.
        inputs: The inputs of the build, in the same order.
        split: Split of a saved DatasetDict.
        progress: Called with the number of samples compared since the last call.

    Raises:
        UserError: The source is not the one the build was made from, or cannot be read.
    """
    if verification.problems and not verification.samples:
        return
    _compare_all(verification, inputs, split, progress)


def _compare_rows(verification: Verification, prepared: Prepared) -> bool:
    """Every source row exactly once, where the policies put it."""
    samples, order = prepared.samples, prepared.arrangement.order
    rows = samples.rows[order]
    file = np.searchsorted(prepared.rows.file_start, rows, side="right") - 1
    expected = {
        "length": samples.lengths[order],
        "source_file": file,
        "source_row": rows - prepared.rows.file_start[file],
        "source_start": samples.starts[order],
    }
    stored = verification.samples
    if len(stored["length"]) != len(rows):
        verification.add(
            "samples.parquet",
            f"has {len(stored['length'])} samples, the source gives {len(rows)}: rows are missing",
        )
        return False
    for name, values in expected.items():
        wrong = stored[name] != values
        if wrong.any():
            at = int(wrong.argmax())
            verification.add(
                "samples.parquet",
                f"sample {at} has {name} {stored[name][at]}, the source gives {values[at]} "
                f"({int(wrong.sum())} samples differ)",
            )
            return False
    return True


def _compare_tasks(
    verification: Verification,
    prepared: Prepared,
    found: Differences,
    progress: Callable[[int], None] | None,
) -> None:
    if not _compare_rows(verification, prepared):
        return
    layout = prepared.arrangement.layout
    shards = verification.shards
    counts = np.diff(layout.shard_start).tolist()
    sizes = layout.shard_bytes.tolist()
    if [(s.entry["samples"], s.entry["raw_data"]["bytes"]) for s in shards] != list(
        zip(counts, sizes, strict=True)
    ):
        verification.add("index.json", "its shards are not cut as the source's rows are")
        return
    options = options_of(verification.manifest)
    job = WriteJob(
        directory=verification.directory,
        format=prepared.format,
        reader=prepared.reader,
        memory=options.memory,
    )
    ids = prepared.arrangement.ids
    first = 0  # tasks hold all samples, in source order
    for task in prepared.tasks:
        mine = ids[first : first + len(task.rows)]
        first += len(task.rows)
        _compare_task(verification, prepared, job, task, mine, found)
        if progress is not None:
            progress(len(task.rows))


def _compare_task(
    verification: Verification,
    prepared: Prepared,
    job: WriteJob,
    task: Task,
    ids: NDArray[np.int64],
    found: Differences,
) -> None:
    """Compare the samples of one task, whose ids are ``ids``, in source order."""
    try:
        result = run_task(job, task, StoredShards(verification, prepared, found))
    except UserError as error:
        verification.add(os.path.basename(task.source.path), str(error))
        return
    if len(result.loss_tokens):
        wrong = verification.samples["loss_tokens"][ids] != result.loss_tokens
        if wrong.any():
            at = int(ids[int(wrong.argmax())])
            verification.add(
                "samples.parquet", f"sample {at} has another number of loss tokens than its mask"
            )
        wrong = verification.samples["first_token_loss"][ids] != result.first_token_loss
        if wrong.any():
            at = int(ids[int(wrong.argmax())])
            verification.add("samples.parquet", f"sample {at} has another first_token_loss than its mask")


def _name(prepared: Prepared, sample: int) -> str:
    row = int(prepared.samples.rows[prepared.arrangement.order[sample]])
    return prepared.rows.where(row, prepared.sources)


def _report(verification: Verification, prepared: Prepared, found: Differences) -> None:
    """Name the samples that differ, and whose bytes are in their place where that can be told."""
    if not found.ids:
        return
    layout = prepared.arrangement.layout
    hashes = dict(found.expected)
    wanted = set(found.stored) - set(hashes)
    if wanted:
        hashes |= _find_copies(verification, prepared, wanted, set(found.ids))
    for sample, there in list(zip(found.ids, found.stored, strict=True))[:MAX_NAMED]:
        shard = int(layout.shards[sample])
        at = sample - int(layout.shard_start[shard])
        text = f"sample {at} (id {sample}) is not {_name(prepared, sample)}"
        if there in hashes:
            text += f": it holds {_name(prepared, hashes[there])}"
        verification.add(verification.shards[shard].path, text)
    if len(found.ids) > MAX_NAMED:
        verification.add("index.json", f"{len(found.ids) - MAX_NAMED} more samples differ from the source")


def _find_copies(
    verification: Verification, prepared: Prepared, wanted: set[str], bad: set[int]
) -> dict[str, int]:
    """Samples in their right place whose bytes hash to one of ``wanted``: the originals of repeated rows."""
    layout = prepared.arrangement.layout
    copies: dict[str, int] = {}
    for number, shard in enumerate(verification.shards):
        data = memoryview(verification.raw(shard))
        for sample in range(int(layout.shard_start[number]), int(layout.shard_start[number + 1])):
            if sample in bad:
                continue
            start = int(layout.offsets[sample])
            value = get_hash("xxh64", data[start : start + int(layout.sizes[sample])])
            if value in wanted:
                copies[value] = sample
    return copies
