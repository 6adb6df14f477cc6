"""The command line of ``build``: exit status, what goes to which stream, and one line per refusal."""

import json
import os
import pty
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from build_support import ROOT, error_line, run_cli, table, token_rows, write_parquet

from shardgen.cli import describe_error
from shardgen.cli_build import ByteSize
from shardgen.manifest import Manifest


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    lengths = np.random.default_rng(9).integers(1, 200, 300)
    path = tmp_path_factory.mktemp("source") / "in.parquet"
    return write_parquet(path, table(token_rows(lengths), seq_len=pa.array(lengths, pa.int32())), 50)


def test_a_build_prints_a_table_and_one_json_object(tmp_path, source):
    result = run_cli(
        "build", source, "--out", tmp_path / "out", "--token-budget", 1024, "--buckets", 4, "--json"
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    manifest = Manifest.load(tmp_path / "out")
    assert report["num_samples"] == 300 and report["boundaries"] == list(manifest.boundaries)
    assert report["fingerprint"] == manifest.fingerprint
    assert 0 < report["full_shuffle_efficiency"] < report["padding_efficiency"] <= 1
    assert report["hand_picked_efficiency"] <= report["padding_efficiency"]
    assert [b["num_samples"] for b in report["buckets"]] == [b.num_samples for b in manifest.buckets]
    for word in ("samples", "tokens", "batch", "efficiency", "hand-picked", "full shuffle"):
        assert word in result.stderr
    assert "\x1b" not in result.stderr and "\r" not in result.stderr


def test_without_json_stdout_is_empty(tmp_path, source):
    result = run_cli("build", source, "--out", tmp_path / "out", "--boundaries", "0,50,100")
    assert (result.returncode, result.stdout) == (0, "")
    assert Manifest.load(tmp_path / "out").boundaries[:3] == (0, 50, 100)


def test_a_terminal_gets_progress(tmp_path, source):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-m", "shardgen", "build", source, "--out", tmp_path / "out"],
        cwd=ROOT, stderr=theirs, stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 4096)
        except OSError:
            break
        if not more:
            break
        shown += more
    os.close(ours)
    assert process.wait(60) == 0
    assert b"writing" in shown and b"\x1b[" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.parquet"], "missing.parquet does not exist"),
        (["{root}/README.md"], "README.md is not Parquet"),
        (["{source}", "--tokens-column", "tokens"], "has no column 'tokens'"),
        (["{source}", "--length-column", "n"], "has no column 'n'"),
        (["{source}", "--loss-mask-column", "m"], "has no column 'm'"),
        (["{source}", "--columns", "a,b"], "has no column 'a'"),
        (["{source}", "--token-budget", "100"], "--token-budget 100"),
        (["{source}", "--max-length", "50"], "above the limit of --max-length 50"),
        (["{source}", "--compression", "lzma"], "--compression 'lzma' is unknown"),
        (["{source}", "--hashes", "crc"], "--hashes 'crc' is unknown"),
        (["{source}", "--token-dtype", "float32"], "--token-dtype 'float32' is not one of"),
        (["{source}", "--token-dtype", "uint8"], "does not fit uint8"),
        (["{source}", "--shard-size", "5gb"], "outside 1..4294967295 bytes"),
        (["{source}", "--overwrite", "--resume"], "use one of them"),
        (["{source}", "{source}"], "is named twice"),
        (["{source}", "--cost-model", "missing.json"], "missing.json cannot be read"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(tmp_path, source, arguments, message):
    arguments = [a.format(source=source, root=ROOT) for a in arguments]
    result = run_cli("build", *arguments, "--out", tmp_path / "deep" / "out")
    assert message in error_line(result)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["--no-such-option"], ["--buckets", "few"], ["--shard-size", "big"], ["--over-length", "maybe"], []],
)
def test_wrong_calls_exit_2(tmp_path, source, arguments):
    call = ["build", source, *(["--out", tmp_path / "out"] if arguments else []), *arguments]
    result = run_cli(*call)
    assert result.returncode == 2
    assert "Usage:" in result.stderr and "Traceback" not in result.stderr


def test_a_traceback_only_with_debug(tmp_path):
    call = ("build", "missing.parquet", "--out", tmp_path / "out")
    assert "Traceback" not in run_cli(*call).stderr
    for place in ((*call, "--debug"), ("--debug", *call)):
        result = run_cli(*place)
        assert result.returncode == 1 and "Traceback" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("error: missing.parquet")


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nsys.argv = ['shardgen', '--help']\nfrom shardgen.cli import run\nrun(['--help'])\n"
        "assert not {'torch', 'streaming', 'pyarrow', 'numpy', 'rich'} & set(sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    for name in ("build", "optimize", "verify"):
        assert f"  {name} " in found.stdout


def test_a_build_needs_neither_torch_nor_streaming(tmp_path, source):
    code = (
        f"import sys\nfrom shardgen.cli import run\n"
        f"assert run(['build', {source!r}, '--out', {str(tmp_path / 'out')!r}]) == 0\n"
        "assert not {'torch', 'streaming'} & set(sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("64mb", 64 << 20), ("1.5kb", 1536), ("2GB", 2 << 30), ("100", 100), ("7b", 7), (" 3 mb ", 3 << 20)],
)
def test_sizes(text, size):
    assert ByteSize().convert(text, None, None) == size


def test_errors_are_described_in_one_line():
    assert describe_error(OSError(28, "No space left on device", "/x/y")).startswith(
        "/x/y: No space left on device: "
    )
    assert "\n" not in describe_error(ValueError("two\nlines"))
    assert describe_error(KeyboardInterrupt()) == "interrupted"
