"""Shards are byte for byte those of one ``MDSWriter`` per bucket fed in source order."""

import filecmp
import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from build_support import data_files, make, read_back, table, token_rows, write_parquet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming import MDSWriter

from shardgen import upstream as functions
from shardgen.buckets import assign
from shardgen.encode import copy_ranges
from shardgen.errors import UserError
from shardgen.layout import Column, cut_shards, sample_bytes

SMALL = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    """No power is cut here, and hundreds of small files take long to reach the disk."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


_numbers = itertools.count()


def fresh(tmp_path: Path) -> Path:
    """A new directory for each example of a property."""
    path = tmp_path / f"example-{next(_numbers)}"
    path.mkdir()
    return path


def upstream(directory, columns, samples, **options):
    """What ``MDSWriter`` makes of samples."""
    with MDSWriter(columns=columns, out=str(directory), **options) as writer:
        for sample in samples:
            writer.write(sample)


def assert_same_shards(ours: Path, theirs: Path):
    names = sorted(path.name for path in theirs.iterdir())
    assert sorted(path.name for path in ours.iterdir() if path.name != "samples.parquet") == names
    match, mismatch, errors = filecmp.cmpfiles(ours, theirs, names, shallow=False)
    assert (mismatch, errors) == ([], [])
    assert sorted(match) == names


def expected_samples(columns, rows):
    """Rows of Python values as upstream wants them for these encodings."""

    def value(encoding, item):
        if encoding.startswith("ndarray:"):
            return np.array(item, encoding.split(":")[1])
        return item

    return [{name: value(columns[name], row[name]) for name in columns} for row in rows]


@st.composite
def corpora(draw):
    num_rows = draw(st.integers(1, 30))
    lengths = draw(
        st.lists(st.sampled_from([1, 2, 3, 7, 255, 256, 300]), min_size=num_rows, max_size=num_rows)
    )
    low, high = draw(st.sampled_from([(0, 100), (0, 70_000), (0, 1 << 40), (-5, 5), (0, (1 << 64) - 1)]))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    dtype = np.uint64 if high > 1 << 62 else np.int64
    arrow = pa.uint64() if high > 1 << 62 else pa.int64()
    rows = []
    for n in lengths:
        rows.append(
            {
                "input_ids": rng.integers(low, high, n, dtype=dtype, endpoint=True).tolist(),
                "weights": rng.random(n).tolist(),
                "labels": rng.integers(-100, 3, n).tolist(),
                "text": draw(st.text(max_size=5)),
                "blob": draw(st.binary(max_size=5)),
                "ragged": rng.integers(0, 9, draw(st.integers(1, 4))).tolist(),
                "score": float(rng.random()),
                "row": len(rows) - 3,
                "flag": bool(rng.integers(0, 2)),
            }
        )
    types = {
        "input_ids": pa.list_(arrow),
        "weights": pa.list_(pa.float64()),
        "labels": pa.list_(pa.int64()),
        "text": pa.string(),
        "blob": pa.binary(),
        "ragged": pa.list_(pa.int32()),
        "score": pa.float32(),
        "row": pa.int64(),
        "flag": pa.bool_(),
    }
    extra = draw(st.lists(st.sampled_from(sorted(set(types) - {"input_ids"})), unique=True))
    source = pa.table(
        {name: pa.array([r[name] for r in rows], types[name]) for name in ["input_ids", *extra]}
    )
    if "score" in extra:
        for row, score in zip(rows, source["score"].to_pylist(), strict=True):
            row["score"] = score
    return rows, source, extra


@SMALL
@given(
    corpus=corpora(),
    size_limit=st.sampled_from([700, 2000, 5000, 1 << 20]),
    compression=st.sampled_from([None, "zstd:3", "br:1", "snappy"]),
    hashes=st.sampled_from([(), ("xxh64",), ("sha1", "xxh64")]),
    num_buckets=st.integers(1, 3),
    row_group_size=st.sampled_from([1, 7, 1000]),
)
def test_same_bytes_as_upstream(
    tmp_path, corpus, size_limit, compression, hashes, num_buckets, row_group_size
):
    rows, source, extra = corpus
    work = fresh(tmp_path)
    path = write_parquet(work / "in.parquet", source, row_group_size)
    manifest = make(
        path,
        work / "out",
        boundaries=(2, 255, 300)[-num_buckets:],
        columns=tuple(extra),
        shard_size=size_limit,
        compression=compression,
        hashes=hashes,
    )
    assert set(manifest.columns) == {"input_ids", *extra}
    buckets = assign([len(row["input_ids"]) for row in rows], manifest.boundaries)
    for number, bucket in enumerate(manifest.buckets):
        mine = [row for row, b in zip(rows, buckets, strict=True) if b == number]
        assert bucket.num_samples == len(mine)
        if not mine:
            assert bucket.directory is None and not (work / "out" / f"bucket-{number:02}").exists()
            continue
        reference = work / f"reference-{number}"
        upstream(
            reference,
            manifest.columns,
            expected_samples(manifest.columns, mine),
            size_limit=size_limit,
            compression=compression,
            hashes=list(hashes),
        )
        assert_same_shards(work / "out" / bucket.directory, reference)


@SMALL
@given(
    num_bytes=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    size_limit=st.integers(60, 600),
)
def test_cuts_are_upstreams(tmp_path, num_bytes, size_limit):
    work = fresh(tmp_path)
    upstream(work / "mds", {"x": "bytes"}, [{"x": b"a" * n} for n in num_bytes], size_limit=size_limit)
    config = {"compression": None, "format": "mds", "hashes": [], "size_limit": size_limit, "version": 2}
    config |= {"column_encodings": ["bytes"], "column_names": ["x"], "column_sizes": [None]}
    import json

    extra = 8 + len(json.dumps(config, sort_keys=True))
    column = Column(name="x", encoding="bytes", kind="text")
    items = np.array(num_bytes, np.int64)
    starts = cut_shards(sample_bytes([column], items, {"x": items}), size_limit, extra)
    shards = json.loads((work / "mds" / "index.json").read_text())["shards"]
    assert np.diff(starts).tolist() == [shard["samples"] for shard in shards]


def test_a_first_sample_over_the_limit_leaves_an_empty_first_shard_as_upstream(tmp_path):
    rows = token_rows([300, 2, 3])
    path = write_parquet(tmp_path / "in.parquet", table(rows))
    manifest = make(path, tmp_path / "out", boundaries=(300,), shard_size=500)
    samples = [{"input_ids": np.array(row, "uint16")} for row in rows]
    upstream(tmp_path / "mds", manifest.columns, samples, size_limit=500, hashes=["xxh64"])
    assert_same_shards(tmp_path / "out" / "bucket-00", tmp_path / "mds")
    assert [len(sample["input_ids"]) for sample in read_back(tmp_path / "out")] == [300, 2, 3]


@given(
    pieces=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 120)), max_size=20),
    seed=st.integers(0, 9),
)
def test_copy_ranges_against_slices(pieces, seed):
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 200).astype(np.uint8)
    starts = np.array([start for start, _ in pieces], np.int64)
    sizes = np.array([size for _, size in pieces], np.int64)
    at = np.cumsum(sizes + 3) - sizes
    out = np.zeros(int((sizes + 3).sum()) + 1, np.uint8)
    wanted = out.copy()
    for a, s, n in zip(at, starts, sizes, strict=True):
        wanted[a : a + n] = source[s : s + n]
    copy_ranges(out, at, source, starts, sizes)
    assert np.array_equal(out, wanted)


def test_an_empty_array_value_is_refused_naming_the_row(tmp_path):
    source = table(token_rows([3, 4, 5]), notes=pa.array([[1, 2], [], [3]], pa.list_(pa.int32())))
    path = write_parquet(tmp_path / "in.parquet", source)
    with pytest.raises(UserError, match=r"in.parquet row 1: column 'notes' is an empty list"):
        make(path, tmp_path / "out", columns=("notes",))
    assert not (tmp_path / "out").exists()


def test_lists_with_equal_totals_but_other_lengths_are_stored_whole(tmp_path):
    # The row group's counts agree, so only the rows tell that this is not one value per token.
    tokens = [[1, 2, 3], [4, 5], [6]]
    notes = [[9], [8, 7], [6, 5, 4]]
    path = write_parquet(tmp_path / "in.parquet", table(tokens, notes=pa.array(notes, pa.list_(pa.int16()))))
    make(path, tmp_path / "out", boundaries=(3,), columns=("notes",))
    assert [(s["input_ids"].tolist(), s["notes"].tolist()) for s in read_back(tmp_path / "out")] == list(
        zip(tokens, notes, strict=True)
    )


def test_upstreams_functions_are_the_very_ones():
    from streaming.base import compression, hashing

    data = b"some data" * 100
    assert functions.get_hash("xxh64", data) == hashing.get_hash("xxh64", data)
    assert functions.compress("zstd:3", data) == compression.compress("zstd:3", data)
    assert functions._load("hashing") is hashing  # once streaming is imported, its own module


def test_gzip_does_not_store_the_time(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "in.parquet", table(token_rows([3, 4])))
    make(path, tmp_path / "first", compression="gz:6")
    monkeypatch.setattr("time.time", lambda: 1e9)
    make(path, tmp_path / "second", compression="gz:6")
    assert data_files(tmp_path / "first") == data_files(tmp_path / "second")
    assert [len(sample["input_ids"]) for sample in read_back(tmp_path / "first")] == [3, 4]


@pytest.mark.parametrize("memory", [1, 3000, 1 << 29])
def test_memory_and_workers_do_not_show_in_the_bytes(tmp_path, memory):
    lengths = np.random.default_rng(3).integers(1, 200, 300)
    source = table(token_rows(lengths), mask=pa.array([[1] * n for n in lengths], pa.list_(pa.uint8())))
    one_group = write_parquet(tmp_path / "one.parquet", source)
    many_groups = write_parquet(tmp_path / "many.parquet", source, 37)
    options = {"loss_mask_column": "mask", "shard_size": 9000, "boundaries": (20, 100)}
    make(one_group, tmp_path / "reference", **options)
    make(many_groups, tmp_path / "out", memory=memory, **options)
    assert data_files(tmp_path / "out") == data_files(tmp_path / "reference")


def test_two_workers_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr("shardgen.pools.BYTES_PER_WORKER", 1)
    # All work goes to the other process: this one would have done it before the other is up.
    monkeypatch.setattr("shardgen.pools.ProcessPool._take", lambda pool: pool._done.get())
    monkeypatch.setattr("shardgen.arrange.make_tasks.__defaults__", (20_000,))
    lengths = np.random.default_rng(4).integers(1, 300, 500)
    path = write_parquet(tmp_path / "in.parquet", table(token_rows(lengths)), 25)
    options = {"boundaries": (50, 300), "shard_size": 20_000, "compression": "zstd:1"}
    first = make(path, tmp_path / "one", workers=1, **options)
    second = make(path, tmp_path / "two", workers=2, **options)
    assert data_files(tmp_path / "one") == data_files(tmp_path / "two")
    assert first.fingerprint == second.fingerprint
