"""Sources and builds in an object store (a local S3 server), and builds on Ray."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from build_support import (
    data_files,
    error_line,
    ipc_stream,
    json_lines,
    make,
    run_cli,
    saved_dataset,
    table,
    token_rows,
    write_parquet,
)

LENGTHS = np.random.default_rng(7).integers(1, 60, 150)
OPTIONS = ("--boundaries", "20,60", "--shard-size", "2000")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Environment of an S3 server with the bucket ``data``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = open(tmp_path_factory.mktemp("s3") / "log", "w")  # noqa: SIM115
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log
    )
    url = f"http://127.0.0.1:{port}"
    environment = {
        "S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            system().create_dir("data")
            yield environment
    finally:
        server.terminate()
        server.wait(20)
        log.close()


def system():
    """The server's file system, as the build sees it."""
    from pyarrow import fs

    address = os.environ["S3_ENDPOINT_URL"].removeprefix("http://")
    return fs.S3FileSystem(endpoint_override=address, scheme="http", allow_bucket_creation=True)


def put(local: Path, key: str):
    for path in [local] if local.is_file() else sorted(p for p in local.rglob("*") if p.is_file()):
        name = key if local.is_file() else f"{key}/{path.relative_to(local)}"
        with system().open_output_stream(name, compression=None) as sink:
            sink.write(path.read_bytes())


def get(key: str, local: Path):
    from pyarrow import fs

    for info in system().get_file_info(fs.FileSelector(key, recursive=True)):
        if info.is_file:
            path = local / info.path.removeprefix(f"{key}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(system().open_input_file(info.path).read())
    return local


@pytest.fixture
def source(tmp_path):
    whole = table(token_rows(LENGTHS))
    (tmp_path / "in").mkdir()
    write_parquet(tmp_path / "in" / "a.parquet", whole.slice(0, 60), 20)
    ipc_stream(tmp_path / "in" / "b.arrow", whole.slice(60, 40))
    json_lines(tmp_path / "in" / "c.jsonl.gz", whole.slice(100).to_pylist())
    make(tmp_path / "in", tmp_path / "clean", boundaries=(20, 60), shard_size=2000)
    return tmp_path / "in"


def test_sources_and_output_in_the_store(store, tmp_path, source):
    put(source, "data/in")
    result = run_cli("build", "s3://data/in", "--out", "s3://data/out", *OPTIONS, "--workers", 2, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["num_samples"] == 150
    found = get("data/out", tmp_path / "found")
    assert data_files(found) == data_files(tmp_path / "clean")
    manifest = json.loads((found / "manifest.json").read_text())
    assert [entry["path"] for entry in manifest["sources"]] == ["a.parquet", "b.arrow", "c.jsonl.gz"]
    again = run_cli("build", "s3://data/in", "--out", "s3://data/out", *OPTIONS, "--overwrite")
    assert "holds a finished build: choose another --out" in error_line(again)
    refused = run_cli("build", "s3://data/in", "--out", "s3://data/in", *OPTIONS)
    assert "is the input" in error_line(refused)


def test_globs_and_saved_datasets_in_the_store(store, tmp_path, source):
    put(source, "data/globbed")
    whole = table(token_rows(LENGTHS))
    put(Path(saved_dataset(tmp_path / "saved", [whole.slice(0, 70), whole.slice(70)])), "data/saved")
    for number, name in enumerate(("s3://data/globbed/*", "s3://data/saved/")):
        result = run_cli("build", name, "--out", tmp_path / f"out-{number}", *OPTIONS)
        assert result.returncode == 0, result.stderr
        shards = {k: v for k, v in data_files(tmp_path / f"out-{number}").items() if "samples" not in k}
        assert shards == {k: v for k, v in data_files(tmp_path / "clean").items() if "samples" not in k}
    assert "s3://data/nothing does not exist" in error_line(
        run_cli("build", "s3://data/nothing", "--out", tmp_path / "none")
    )


def test_a_store_that_refuses_writes_is_found_before_the_work(store, tmp_path, source):
    result = run_cli("build", source, "--out", "s3://no-such-bucket/out", *OPTIONS)
    assert "--out s3://no-such-bucket/out cannot be written" in error_line(result)


def test_a_failed_build_leaves_nothing_in_the_store(store, tmp_path):
    import pyarrow as pa

    lengths = [3] * 200
    stale = table(token_rows(lengths), seq_len=pa.array([*lengths[:-1], 4], pa.int32()))
    path = write_parquet(tmp_path / "stale.parquet", stale, 10)
    result = run_cli("build", path, "--out", "s3://data/stale", "--shard-size", 1000)
    assert "column 'seq_len' says 4 tokens but the row has 3" in error_line(result)
    from pyarrow import fs

    assert [
        i.path
        for i in system().get_file_info(fs.FileSelector("data/stale", allow_not_found=True, recursive=True))
        if i.is_file
    ] == []


def test_ray_gives_the_same_bytes(tmp_path, source):
    pytest.importorskip("ray")
    result = run_cli("build", source, "--out", tmp_path / "out", *OPTIONS, "--engine", "ray", "--workers", 2)
    assert result.returncode == 0, result.stderr
    assert data_files(tmp_path / "out") == data_files(tmp_path / "clean")


def test_an_error_on_ray_is_one_line(tmp_path):
    pytest.importorskip("ray")
    import pyarrow as pa

    stale = table(token_rows([3, 4]), seq_len=pa.array([3, 5], pa.int32()))
    path = write_parquet(tmp_path / "stale.parquet", stale)
    result = run_cli("build", path, "--out", tmp_path / "out", "--engine", "ray")
    assert "column 'seq_len' says 5 tokens but the row has 4" in error_line(result)
    assert not (tmp_path / "out").exists()
