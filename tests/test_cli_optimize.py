"""The command line of ``optimize``."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from build_support import make, table, token_rows
from corpora import function_lengths

from shardgen.buckets import TokenBudget
from shardgen.cli import run
from shardgen.cost import CostModel
from shardgen.lengths import Histogram
from shardgen.optimize import optimize

LENGTHS = np.minimum(function_lengths()[:4000], 4096)


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, LENGTHS)
    return path


def report_of(capsys, *arguments):
    code = run(["optimize", *map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out.splitlines()[-1]), out.err


def error_of(capsys, *arguments) -> str:
    assert run(["optimize", *map(str, arguments)]) == 1
    out = capsys.readouterr()
    assert out.out == ""
    (line,) = out.err.splitlines()
    assert line.startswith("error: ")
    return line


def without_time(report):
    return {name: value for name, value in report.items() if name != "seconds"}


def test_json_is_what_the_function_says(lengths_file, capsys):
    options = ["--buckets", 4, "--token-budget", 8192, "--pad-to-multiple-of", 16, "--lookahead", 8]
    options += ["--max-batch-size", 100, "--quadratic-length", 2000, "--overhead-tokens", 50]
    report, _ = report_of(capsys, lengths_file, *options)
    model = CostModel(quadratic_length=2000, overhead_tokens=50)
    budget = TokenBudget(tokens=8192, pad_to_multiple_of=16, max_batch_size=100, cost_model=model)
    expected = optimize(Histogram.from_lengths(LENGTHS), num_buckets=4, budget=budget, lookahead=8)
    assert without_time(report) == without_time(json.loads(json.dumps(expected.to_json())))
    assert report["seconds"] > 0


def test_people_get_a_table_on_stderr(lengths_file, capsys):
    assert run(["optimize", str(lengths_file), "--buckets", "3", "--token-budget", "8192"]) == 0
    out = capsys.readouterr()
    assert out.out == ""
    for word in (
        "4,000 samples",
        "token budget 8,192",
        "hand",
        "equal-token",
        "sorted packing",
        "lookahead 32",
    ):
        assert word in out.err
    best = optimize(Histogram.from_lengths(LENGTHS), num_buckets=3, budget=TokenBudget(tokens=8192))
    for bucket in best.buckets:
        assert f"{bucket.lower + 1}-{bucket.upper} " in out.err
        assert f" {bucket.num_tokens:,} " in out.err
        assert f" {100 * bucket.padding_efficiency:.1f} %" in out.err


def test_a_rate_predicts_the_epoch(lengths_file, capsys):
    report, err = report_of(capsys, lengths_file, "--token-budget", 8192, "--tokens-per-second", 1000)
    real = 1000 * report["lookahead_padding_efficiency"]
    assert report["tokens_per_second"] == pytest.approx(real)
    assert report["epoch_seconds"] == pytest.approx(LENGTHS.sum() / real)
    assert f"{real:,.0f} real tokens/s" in err and "per epoch" in err


def test_a_histogram_stands_for_any_number_of_samples(tmp_path, capsys):
    lengths, counts = np.unique(LENGTHS, return_counts=True)
    np.savez(tmp_path / "lengths.npz", lengths=lengths, counts=counts * 250_000)
    report, _ = report_of(capsys, tmp_path / "lengths.npz", "--token-budget", 8192)
    assert report["num_samples"] == 10**9
    assert report["num_tokens"] == int(LENGTHS.sum()) * 250_000


def test_parquet_arrow_and_bare_lengths_agree(tmp_path, capsys):
    lengths = LENGTHS[:300] % 200 + 1
    rows = table(token_rows(lengths), seq_len=pa.array(lengths, pa.int32()))
    pq.write_table(rows, tmp_path / "rows.parquet")
    with pa.ipc.new_file(tmp_path / "rows.arrow", rows.schema) as writer:
        writer.write_table(rows)
    np.save(tmp_path / "rows.npy", lengths)
    reports = [
        without_time(report_of(capsys, tmp_path / name, "--token-budget", 1024, *options)[0])
        for name, options in (
            ("rows.npy", []),
            ("rows.parquet", []),
            ("rows.arrow", []),
            ("rows.arrow", ["--length-column", ""]),
        )
    ]
    assert all(report == reports[0] for report in reports)
    both, _ = report_of(capsys, tmp_path / "rows.npy", tmp_path / "rows.parquet", "--token-budget", 1024)
    assert both["num_samples"] == 600


def test_a_build_is_searched_with_its_own_limits(tmp_path, capsys):
    lengths = LENGTHS[:300] % 200 + 1
    pq.write_table(table(token_rows(lengths)), tmp_path / "rows.parquet")
    make(tmp_path / "rows.parquet", tmp_path / "out", token_budget=1024, boundaries=(50, 100))
    report, _ = report_of(capsys, tmp_path / "out", "--buckets", 4)
    best = optimize(Histogram.from_lengths(lengths), num_buckets=4, budget=TokenBudget(tokens=1024))
    assert report["token_budget"] == 1024
    assert report["boundaries"] == list(best.boundaries)
    report, _ = report_of(capsys, tmp_path / "out", "--boundaries", "50,100", "--token-budget", 2048)
    assert report["token_budget"] == 2048
    assert report["boundaries"] == [0, 50, 100, int(lengths.max())]


def test_notes_reach_the_reader(tmp_path, capsys):
    np.save(tmp_path / "two.npy", np.array([5, 5, 9]))
    _, err = report_of(capsys, tmp_path / "two.npy", "--buckets", 6)
    assert "note: 2 buckets instead of 6: there are only 2 distinct lengths" in err


def test_errors_are_one_line(tmp_path, lengths_file, capsys):
    assert "length 4096 is above what token_budget 4000" in error_of(
        capsys, lengths_file, "--token-budget", 4000
    )
    assert "missing.npy" in error_of(capsys, tmp_path / "missing.npy")
    np.save(tmp_path / "zero.npy", np.array([3, 0]))
    assert "row 1 has length 0" in error_of(capsys, tmp_path / "zero.npy")
    assert run(["optimize", str(lengths_file), "--buckets", "none"]) == 2
    assert run(["optimize"]) == 2


def test_it_loads_neither_torch_nor_streaming(lengths_file, python):
    code = f"""
import sys
from shardgen.cli import run
code = run(["optimize", {str(lengths_file)!r}, "--token-budget", "8192", "--json"])
print(code, sorted({{"torch", "streaming", "pyarrow", "loader"}} & set(sys.modules)))
"""
    finished = python("-c", code)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "0 []"
    assert json.loads(finished.stdout.splitlines()[0])["num_samples"] == 4000
