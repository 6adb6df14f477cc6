"""Whole builds: what comes out, which rows, and what is left behind when something goes wrong."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from build_support import (
    ROOT,
    data_files,
    make,
    read_back,
    run_cli,
    sample_table,
    table,
    token_rows,
    write_parquet,
)

from shardgen.buckets import assign
from shardgen.errors import UserError
from shardgen.manifest import Manifest
from shardgen.staging import Staging

READ_WITH_STOCK = """
import json, sys
from streaming import StreamingDataset
found = []
for directory in sys.argv[1:]:
    dataset = StreamingDataset(local=directory, batch_size=1)
    plain = lambda value: value.tolist() if hasattr(value, "tolist") else value
    by_id = [{k: plain(v) for k, v in dataset[i].items()} for i in range(len(dataset))]
    found.append([by_id, sorted(sample["row"] for sample in dataset)])
print(json.dumps(found))
"""


def stock_samples(*directories):
    """All samples by id, and the row numbers that an epoch yields, by stock StreamingDataset."""
    found = subprocess.run(
        [sys.executable, "-c", READ_WITH_STOCK, *map(str, directories)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_stock_streaming_dataset_reads_every_sample_back(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 300, 400)
    rows = token_rows(lengths)
    masks = [[int(t % 3 == 0) for t in row] for row in rows]
    source = table(
        rows,
        mask=pa.array(masks, pa.list_(pa.int64())),
        row=range(400),
        text=[f"übung {i}" if i % 5 else "" for i in range(400)],
    )
    path = write_parquet(tmp_path / "in.parquet", source, 64)
    options = {"loss_mask_column": "mask", "columns": ("row", "text"), "shard_size": 50_000}
    manifest = make(path, tmp_path / "out", boundaries=(30, 100, 300), **options)
    make(path, tmp_path / "packed", boundaries=(30, 100, 300), compression="zstd:3", **options)
    buckets = assign(lengths, manifest.boundaries)
    order = [int(i) for k in range(3) for i in np.flatnonzero(buckets == k)]
    expected = [
        {"input_ids": rows[i], "mask": masks[i], "row": i, "text": f"übung {i}" if i % 5 else ""}
        for i in order
    ]
    for by_id, iterated in stock_samples(tmp_path / "out", tmp_path / "packed"):
        assert by_id == expected
        assert iterated == list(range(400))
    stored = sample_table(tmp_path / "out").to_pydict()
    assert stored == {
        "length": [len(rows[i]) for i in order],
        "loss_tokens": [sum(masks[i]) for i in order],
        "first_token_loss": [bool(masks[i][0]) for i in order],
        "source_file": [0] * 400,
        "source_row": order,
        "source_start": [0] * 400,
    }
    assert manifest.num_loss_tokens == sum(map(sum, masks))


def test_bucket_sizes_that_divide_by_nothing(tmp_path):
    counts = (1003, 517, 13, 1, 0)
    lengths = np.repeat([1, 2, 3, 4, 5], counts)
    np.random.default_rng(1).shuffle(lengths)
    path = write_parquet(tmp_path / "in.parquet", table(token_rows(lengths)))
    manifest = make(path, tmp_path / "out", boundaries=(1, 2, 3, 4, 5), shard_size=4000)
    assert tuple(bucket.num_samples for bucket in manifest.buckets) == counts
    assert manifest.buckets[4].directory is None
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.is_dir()) == [
        f"bucket-{k:02}" for k in range(4)
    ]
    rows = sample_table(tmp_path / "out")["source_row"].to_pylist()
    assert sorted(rows) == list(range(sum(counts)))
    assert len(read_back(tmp_path / "out")) == sum(counts)


def test_upper_boundaries_are_inclusive(tmp_path):
    lengths = [4, 5, 8, 9, 16, 1]
    path = write_parquet(tmp_path / "in.parquet", table(token_rows(lengths)))
    manifest = make(path, tmp_path / "out", boundaries=(4, 8), token_budget=16)
    assert manifest.boundaries == (0, 4, 8, 16)
    assert [bucket.num_samples for bucket in manifest.buckets] == [2, 2, 2]
    assert sample_table(tmp_path / "out")["length"].to_pylist() == [4, 1, 5, 8, 9, 16]
    with pytest.raises(
        UserError, match=r"in.parquet row 4 has 16 tokens, above the limit of --token-budget 15"
    ):
        make(path, tmp_path / "again", boundaries=(4, 8), token_budget=15)


@pytest.fixture
def long_row(tmp_path):
    """Rows of 512 tokens, and row 3 with 513, the mask of its last token being 1."""
    lengths = [512, 512, 512, 513, 512]
    rows = token_rows(lengths)
    masks = [[0] * (n - 1) + [1] for n in lengths]
    source = table(rows, mask=pa.array(masks, pa.list_(pa.uint8())), seq_len=pa.array(lengths, pa.int32()))
    return rows, write_parquet(tmp_path / "in.parquet", source)


def test_a_row_over_the_budget_is_refused_before_anything_is_written(tmp_path, long_row):
    _, path = long_row
    with pytest.raises(UserError) as caught:
        make(path, tmp_path / "out", token_budget=512, over_length="error")
    assert all(
        part in str(caught.value) for part in ("in.parquet row 3", "513", "512", "drop, truncate or split")
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.parquet"]


@pytest.mark.parametrize(
    ("policy", "count", "lengths", "loss"),
    [
        ("drop", "over_length_dropped", [512] * 4, [1] * 4),
        ("truncate", "truncated", [512] * 5, [1, 1, 1, 0, 1]),
        ("split", "split", [1, 512, 512, 512, 512, 512], [1, 1, 1, 1, 0, 1]),
    ],
)
def test_policies_for_a_row_over_the_budget(tmp_path, long_row, policy, count, lengths, loss):
    rows, path = long_row
    options = {
        "token_budget": 512,
        "over_length": policy,
        "loss_mask_column": "mask",
        "boundaries": (100, 512),
    }
    manifest = make(path, tmp_path / "out", **options)
    assert {name: n for name, n in manifest.counts.items() if n} == {count: 1}
    stored = sample_table(tmp_path / "out")
    assert (stored["length"].to_pylist(), stored["loss_tokens"].to_pylist()) == (lengths, loss)
    assert manifest.num_tokens == sum(lengths)
    found = read_back(tmp_path / "out")
    for sample, row, start, n in zip(
        found, stored["source_row"].to_pylist(), stored["source_start"].to_pylist(), lengths, strict=True
    ):
        assert sample["input_ids"].tolist() == rows[row][start : start + n]
        assert len(sample["mask"]) == n


def test_the_limit_is_the_smaller_of_max_length_and_the_padded_budget(tmp_path):
    path = write_parquet(tmp_path / "in.parquet", table(token_rows([30, 20])))
    with pytest.raises(
        UserError, match=r"30 tokens, above the limit of --token-budget 30 with --pad-to-multiple-of 8"
    ):
        make(path, tmp_path / "out", token_budget=30, pad_to_multiple_of=8)
    manifest = make(path, tmp_path / "out", token_budget=64, max_length=25, over_length="truncate")
    assert (manifest.boundaries[-1], manifest.counts["truncated"]) == (25, 1)
    manifest = make(path, tmp_path / "longer", token_budget=64, max_length=50)
    assert manifest.boundaries[-1] == 50


def test_splitting_keeps_every_token_in_order(tmp_path):
    rows = token_rows([25, 7, 10, 31])
    path = write_parquet(tmp_path / "in.parquet", table(rows))
    make(path, tmp_path / "out", max_length=10, over_length="split", boundaries=(3, 10))
    stored = sample_table(tmp_path / "out")
    parts: dict[int, dict[int, list[int]]] = {}
    for sample, row, start in zip(
        read_back(tmp_path / "out"),
        stored["source_row"].to_pylist(),
        stored["source_start"].to_pylist(),
        strict=True,
    ):
        parts.setdefault(row, {})[start] = sample["input_ids"].tolist()
    assert [[t for s in sorted(parts[i]) for t in parts[i][s]] for i in range(4)] == rows


def test_rows_without_tokens(tmp_path):
    path = write_parquet(tmp_path / "in.parquet", table([[1, 2], [], [3], []]))
    with pytest.raises(UserError, match=r"in.parquet row 1 has no tokens \(2 such rows\).*--on-empty skip"):
        make(path, tmp_path / "out")
    manifest = make(path, tmp_path / "out", on_empty="skip")
    assert (manifest.counts["skipped_empty"], manifest.num_samples) == (2, 2)
    only = write_parquet(tmp_path / "only.parquet", table([[], []]))
    with pytest.raises(UserError, match=r"no sample is left of 2 rows"):
        make(only, tmp_path / "none", on_empty="skip")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([3, 4, 6, 6], "in.parquet row 2: column 'seq_len' says 6 tokens but the row has 5"),
        ([0, 0, 0, 0], "in.parquet row 0: column 'seq_len' says 0 tokens but the row has 3"),
        ([3, 4, 5, -6], "in.parquet row 3: length -6 in column 'seq_len'"),
    ],
)
def test_a_stale_length_column_is_found(tmp_path, stored, message, workers, monkeypatch):
    monkeypatch.setattr("shardgen.pools.BYTES_PER_WORKER", 1)
    source = table(token_rows([3, 4, 5, 6]), seq_len=pa.array(stored, pa.int32()))
    path = write_parquet(tmp_path / "in.parquet", source, 2)
    for policy in ({}, {"on_empty": "skip"}):
        with pytest.raises(UserError) as caught:
            make(path, tmp_path / "out", workers=workers, **policy)
        assert message in str(caught.value)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in.parquet"]
    assert make(path, tmp_path / "out", length_column="").num_tokens == 18


def test_a_stale_length_of_a_dropped_row_is_found_too(tmp_path):
    source = table(token_rows([3, 4, 5]), seq_len=pa.array([3, 99, 5], pa.int32()))
    path = write_parquet(tmp_path / "in.parquet", source)
    with pytest.raises(UserError, match=r"row 1: column 'seq_len' says 99 tokens but the row has 4"):
        make(path, tmp_path / "out", max_length=10, over_length="drop")


def test_a_mask_of_another_length_is_refused(tmp_path):
    source = table([[1, 2], [3]], mask=pa.array([[1], [1, 1]], pa.list_(pa.uint8())))
    path = write_parquet(tmp_path / "in.parquet", source)
    with pytest.raises(UserError, match=r"in.parquet row 0: column 'mask' has 1 values for 2 tokens"):
        make(path, tmp_path / "out", loss_mask_column="mask")


# Destinations


@pytest.fixture
def source(tmp_path):
    lengths = np.random.default_rng(5).integers(1, 100, 200)
    (tmp_path / "data").mkdir()
    return write_parquet(tmp_path / "data" / "in.parquet", table(token_rows(lengths)), 20)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("out", ["data/in.parquet", "data", ".", "foreign", "file"])
def test_foreign_files_are_never_touched(tmp_path, source, out, overwrite):
    (tmp_path / "foreign" / "deep").mkdir(parents=True)
    (tmp_path / "foreign" / "deep" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=r"--out"):
        make([tmp_path / "data"], tmp_path / out, overwrite=overwrite)
    assert snapshot(tmp_path) == before


def test_a_build_is_replaced_only_by_overwrite_and_only_when_it_holds_nothing_else(tmp_path, source):
    out = tmp_path / "out"
    make(source, out, boundaries=(50, 100))
    before = snapshot(out)
    with pytest.raises(UserError, match=r"holds a finished build: use --overwrite"):
        make(source, out, boundaries=(20, 100))
    (out / "bucket-00" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"not of the build \(such as bucket-00/notes.txt\)"):
        make(source, out, boundaries=(20, 100), overwrite=True)
    (out / "bucket-00" / "notes.txt").unlink()
    assert snapshot(out) == before
    assert make(source, out, boundaries=(20, 100), overwrite=True).boundaries == (0, 20, 100)
    make(source, tmp_path / "clean", boundaries=(20, 100))
    assert data_files(out) == data_files(tmp_path / "clean")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["clean", "data", "out"]


def test_a_failed_overwrite_leaves_the_earlier_build(tmp_path, source):
    out = tmp_path / "out"
    make(source, out)
    before = snapshot(out)
    bad = write_parquet(tmp_path / "bad.parquet", table([[1, 2]], seq_len=pa.array([1], pa.int32())))
    with pytest.raises(UserError, match=r"stale"):
        make(bad, out, overwrite=True)
    assert snapshot(out) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.parquet", "data", "out"]


def test_an_empty_directory_and_missing_parents_will_do(tmp_path, source):
    (tmp_path / "empty").mkdir()
    assert make(source, tmp_path / "empty").num_samples == 200
    assert make(source, tmp_path / "a" / "b" / "out").num_samples == 200
    with pytest.raises(UserError):
        make(source, tmp_path / "c" / "d" / "out", token_budget=1)
    assert not (tmp_path / "c").exists()


# Crashes

SLOW_BUILD = """
import multiprocessing, os, sys, time
import shardgen.arrange, shardgen.journal, shardgen.cli, shardgen.pools
shardgen.arrange.make_tasks.__defaults__ = (1,)  # one partition per task
shardgen.pools.BYTES_PER_WORKER = 1
save = shardgen.journal.Journal.save_task
def slow(self, result):
    save(self, result)
    if result.number == 3 and "PAUSE" in os.environ:
        while len(multiprocessing.active_children()) < int(os.environ["CHILDREN"]):
            time.sleep(0.05)
        print("ready", flush=True)
        time.sleep(60)
shardgen.journal.Journal.save_task = slow
if __name__ == "__main__":
    sys.argv[0] = "shardgen"
    shardgen.cli.main()
"""


def many_partitions(tmp_path):
    """The command line with one partition per task, which stops after the fourth if asked to by ``PAUSE``."""
    script = tmp_path / "slow.py"
    script.write_text(SLOW_BUILD)
    return script


def go_on(tmp_path, *arguments):
    """Run the command line of :func:`many_partitions` to its end."""
    return subprocess.run(
        [sys.executable, many_partitions(tmp_path), "build", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def start_slow_build(tmp_path, *arguments):
    """A build that stops after its fourth of ten partitions, as a process group of its own."""
    script = many_partitions(tmp_path)
    workers = int(arguments[arguments.index("--workers") + 1]) if "--workers" in arguments else 1
    process = subprocess.Popen(
        [sys.executable, script, "build", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PAUSE": "1", "CHILDREN": str(workers - 1)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n", process.communicate()
    return process


def wait_gone(pids, seconds=20):
    """Wait until none of the processes runs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        alive = [pid for pid in alive if "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()]
        if not alive:
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {alive}")


def session_members(leader):
    """Processes of the session that ``leader`` leads."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader:
            found.append(int(stat.parent.name))
    return found


OPTIONS = ("--boundaries", "30,60,100", "--shard-size", "3000", "--token-dtype", "uint16")


@pytest.fixture
def clean(tmp_path, source):
    make(source, tmp_path / "clean", boundaries=(30, 60, 100), shard_size=3000, token_dtype="uint16")
    return data_files(tmp_path / "clean")


@pytest.mark.parametrize(
    ("number", "workers", "compression"),
    [
        (signal.SIGINT, 1, ()),
        (signal.SIGINT, 2, ("--compression", "zstd:1")),
        (signal.SIGKILL, 1, ("--compression", "zstd:1")),
        (signal.SIGKILL, 2, ()),
        (signal.SIGTERM, 2, ()),
    ],
)
def test_a_killed_build_is_no_dataset_and_can_go_on(tmp_path, source, number, workers, compression):
    out = tmp_path / "out"
    call = (source, "--out", out, "--workers", workers, *OPTIONS, *compression)
    process = start_slow_build(tmp_path, *call)
    members = session_members(process.pid)
    assert len(members) >= workers
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=30)
    wait_gone(members)
    if number != signal.SIGKILL:
        assert process.returncode == 1
        assert len(stderr.strip().splitlines()) == 1
        assert "error: interrupted" in stderr and "--resume" in stderr
    assert not out.exists()
    with pytest.raises(UserError, match=r"is not a dataset: no manifest.json"):
        Manifest.load(out)
    again = run_cli("build", *call)
    assert again.returncode == 1 and "holds a killed build: use --resume" in again.stderr
    resumed = go_on(tmp_path, *call, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "of 10 partitions are done" in resumed.stderr
    clean = tmp_path / "clean"
    settings = {"boundaries": (30, 60, 100), "shard_size": 3000, "token_dtype": "uint16"}
    make(source, clean, compression=compression[1] if compression else None, **settings)
    assert data_files(out) == data_files(clean)
    assert Manifest.load(out).fingerprint == Manifest.load(clean).fingerprint
    assert not list(tmp_path.glob(".out*"))


def test_a_killed_build_can_be_started_anew(tmp_path, source, clean):
    out = tmp_path / "out"
    process = start_slow_build(tmp_path, source, "--out", out, *OPTIONS)
    process.kill()
    process.communicate()
    result = run_cli("build", source, "--out", out, *OPTIONS, "--overwrite")
    assert result.returncode == 0, result.stderr
    assert data_files(out) == clean


def test_resume_does_again_what_the_disk_lost(tmp_path, source, clean):
    out = tmp_path / "out"
    process = start_slow_build(tmp_path, source, "--out", out, *OPTIONS)
    process.kill()
    process.communicate()
    shard = tmp_path / ".out.building" / "bucket-02" / "shard.00000.mds"
    shard.write_bytes(bytes(shard.stat().st_size))  # a power cut may leave zeros behind
    result = go_on(tmp_path, source, "--out", out, *OPTIONS, "--resume")
    assert result.returncode == 0, result.stderr
    assert data_files(out) == clean


def test_resume_refuses_other_options_and_other_input_naming_them(tmp_path, source, clean):
    out = tmp_path / "out"
    process = start_slow_build(tmp_path, source, "--out", out, *OPTIONS)
    process.kill()
    process.communicate()
    result = go_on(tmp_path, source, "--out", out, *OPTIONS, "--hashes", "sha1", "--resume")
    assert result.returncode == 1 and "cannot be resumed, for its options changed" in result.stderr
    os.utime(source, (1, 1))
    result = go_on(tmp_path, source, "--out", out, *OPTIONS, "--resume")
    assert result.returncode == 1 and "for its input files changed" in result.stderr
    result = run_cli("build", source, "--out", out, *OPTIONS, "--overwrite")
    assert result.returncode == 0 and data_files(out) == clean


def test_resume_without_a_killed_build_starts_anew(tmp_path, source, clean):
    result = run_cli("build", source, "--out", tmp_path / "out", *OPTIONS, "--resume")
    assert result.returncode == 0 and "nothing to resume" in result.stderr
    assert data_files(tmp_path / "out") == clean


def test_a_killed_worker_is_one_error_line(tmp_path, source, clean):
    out = tmp_path / "out"
    process = start_slow_build(tmp_path, source, "--out", out, "--workers", 3, *OPTIONS)
    workers = [pid for pid in session_members(process.pid) if pid != process.pid and is_worker(pid)]
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    os.kill(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert len(stderr.strip().splitlines()) == 1 and stderr.startswith("error: ")
    wait_gone(workers)
    assert not out.exists()
    result = go_on(tmp_path, source, "--out", out, *OPTIONS, "--resume")
    assert result.returncode == 0, result.stderr
    assert data_files(out) == clean


def is_worker(pid):
    """Whether a process is a forked worker: its parent is the fork server, not the build."""
    status = Path(f"/proc/{pid}/status").read_text()
    parent = int(status.split("PPid:")[1].split()[0])
    return b"forkserver" in Path(f"/proc/{parent}/cmdline").read_bytes()


def test_a_worker_killed_while_it_works_is_named(tmp_path, source):
    script = tmp_path / "deadly.py"
    script.write_text(
        "import shardgen.arrange, shardgen.cli, shardgen.pools\n"
        "shardgen.arrange.make_tasks.__defaults__ = (1,)\nshardgen.pools.BYTES_PER_WORKER = 1\n"
        "calls = []\n"
        "def deadly(self):\n"  # leaves all work to the other process
        "    calls.append(1)\n"
        "    if len(calls) == 3:\n"
        "        self._processes[0].kill()\n"
        "    return self._done.get()\n"
        "shardgen.pools.ProcessPool._take = deadly\n"
        "if __name__ == '__main__':\n    shardgen.cli.main()\n"
    )
    found = subprocess.run(
        [sys.executable, script, "build", source, "--out", tmp_path / "out", "--workers", "2", *OPTIONS],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 1
    assert found.stderr.startswith("error: a worker process was killed") and found.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_reader_that_fails_half_way_leaves_nothing(tmp_path, source):
    whole = Path(source).read_bytes()
    groups = pq.ParquetFile(source).metadata
    at = groups.row_group(7).column(0).data_page_offset + 40
    Path(source).write_bytes(whole[:at] + bytes(64) + whole[at + 64 :])
    before = snapshot(tmp_path)
    result = run_cli("build", source, "--out", tmp_path / "out", *OPTIONS, "--length-column", "")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    assert str(source) in result.stderr
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk(tmp_path, source, workers, monkeypatch):
    monkeypatch.setattr("shardgen.pools.BYTES_PER_WORKER", 1)

    def full(descriptor, offset, num_bytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device") as caught:
        make(source, tmp_path / "out", workers=workers)
    assert str(tmp_path) in str(caught.value.filename)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data"]


def test_a_real_full_disk(tmp_path, source):
    mount = tmp_path / "small"
    mount.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20k", "tmpfs", mount], check=False).returncode
    ):
        pytest.skip("needs the right to mount a small file system")
    try:
        result = run_cli("build", source, "--out", mount / "out", *OPTIONS)
        left = list(mount.iterdir())
        read_only = subprocess.run(["mount", "-o", "remount,ro", mount], check=False).returncode == 0
        refused = run_cli("build", source, "--out", mount / "out", *OPTIONS) if read_only else None
    finally:
        subprocess.run(["umount", mount], check=True)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "No space left on device: free some space" in result.stderr
    assert left == []
    if refused is not None:
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 1 and "Read-only file system" in refused.stderr


def test_two_builds_of_one_destination_exclude_each_other(tmp_path, source):
    first = Staging(str(tmp_path / "out"))
    first.open(resume=False, overwrite=False)
    try:
        with pytest.raises(UserError, match=r"another build of .*/out is running"):
            make(source, tmp_path / "out")
    finally:
        first.discard()
        first.close()
    assert make(source, tmp_path / "out").num_samples == 200


def test_output_does_not_depend_on_where_the_source_lies(tmp_path, source):
    make(source, tmp_path / "one")
    other = tmp_path / "elsewhere" / "renamed.parquet"
    other.parent.mkdir()
    other.write_bytes(Path(source).read_bytes())
    make(other, tmp_path / "two")
    assert data_files(tmp_path / "one") == data_files(tmp_path / "two")
    assert Manifest.load(tmp_path / "one").fingerprint == Manifest.load(tmp_path / "two").fingerprint
