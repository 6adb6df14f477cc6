"""Helpers of the build tests: sources of every kind, reference shards by upstream's writer, reading back."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardgen.build import build
from shardgen.manifest import Manifest
from shardgen.options import BuildOptions

ROOT = Path(__file__).resolve().parent.parent


def token_rows(lengths, seed=0, vocabulary=50_000) -> list[list[int]]:
    """One list of random token ids per length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, n).tolist() for n in lengths]


def table(rows, **columns) -> pa.Table:
    """A table of tokens (list of int32) and other columns."""
    return pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32())), **columns})


def write_parquet(path: Path, source: pa.Table, row_group_size: int | None = None) -> str:
    pq.write_table(source, path, row_group_size=row_group_size)
    return str(path)


def make(inputs, out: Path, **options) -> Manifest:
    """Build in this process."""
    inputs = [inputs] if isinstance(inputs, str | Path) else inputs
    return build([str(path) for path in inputs], str(out), BuildOptions(**options)).manifest


def data_files(directory: Path) -> dict[str, str]:
    """Digest of every file but ``manifest.json``, by path inside the directory."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def read_back(directory: Path) -> list[dict[str, Any]]:
    """All samples of a build in id order, decoded by upstream's shard reader."""
    from streaming.base.format import reader_from_json

    index = json.loads((directory / "index.json").read_text())
    samples = []
    for entry in index["shards"]:
        if entry["compression"]:
            from streaming.base.compression import decompress

            packed = directory / entry["zip_data"]["basename"]
            raw = directory / entry["raw_data"]["basename"]
            raw.write_bytes(decompress(entry["compression"], packed.read_bytes()))
        reader = reader_from_json(str(directory), "", entry)
        samples += [reader[i] for i in range(entry["samples"])]
        if entry["compression"]:
            raw.unlink()
    return samples


def sample_table(directory: Path) -> pa.Table:
    """The ``samples.parquet`` files of a build, joined in id order."""
    buckets = [bucket for bucket in Manifest.load(directory).buckets if bucket.directory]
    return pa.concat_tables(pq.read_table(directory / b.directory / "samples.parquet") for b in buckets)


def run_cli(*arguments, environment=None, **kwargs) -> subprocess.CompletedProcess[str]:
    """Run ``python -m shardgen`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "shardgen", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        **kwargs,
    )


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refusal: exit status 1, nothing on stdout, no traceback."""
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]


def ipc_file(path: Path, source: pa.Table, **options) -> str:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, source.schema, **options) as writer:
        writer.write_table(source)
    return str(path)


def ipc_stream(path: Path, source: pa.Table, **options) -> str:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, source.schema, **options) as writer:
        writer.write_table(source)
    return str(path)


def json_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    """JSON lines, compressed as the name says."""
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with pa.output_stream(str(path)) as sink:  # detects .gz and .zst
        sink.write(text)
    return str(path)


def saved_dataset(directory: Path, parts: list[pa.Table], indices: list[int] | None = None) -> str:
    """What ``datasets.Dataset.save_to_disk`` leaves on disk."""
    directory.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(parts):05}.arrow" for i in range(len(parts))]
    for name, part in zip(names, parts, strict=True):
        ipc_stream(directory / name, part)
    state: dict[str, Any] = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0"}
    if indices is not None:
        ipc_stream(directory / "indices.arrow", pa.table({"indices": pa.array(indices, pa.uint64())}))
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (directory / "state.json").write_text(json.dumps(state))
    (directory / "dataset_info.json").write_text("{}")
    return str(directory)
