"""The command line of ``simulate``."""

import json

import numpy as np
import pytest
from corpora import function_lengths

from loader.plan import EpochOptions, PlanOptions
from loader.simulate import STRATEGIES, corpus_of_lengths, simulate
from shardgen.cli import run


def simulate_json(capsys, *arguments):
    code = run(["simulate", *map(str, arguments), "--json"])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out.splitlines()[-1]), out.err


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.minimum(function_lengths()[:3000], 4096))
    return path


def test_json_is_what_the_functions_say(lengths_file, capsys):
    options = [
        "--boundaries",
        "100,400,1000",
        "--token-budget",
        "8192",
        "--world-size",
        "2",
        "--accumulate",
        "3",
    ]
    report, err = simulate_json(capsys, lengths_file, *options, "--seed", "5", "--shard-size", "100kb")
    assert (report["world_size"], report["accumulate"]) == (2, 3)
    assert list(report["strategies"]) == ["sorted-static", "full-shuffle", "bucket-shuffle", "loader"]
    lengths = np.load(lengths_file)
    boundaries = (0, 100, 400, 1000, int(lengths.max()))
    assert report["boundaries"] == list(boundaries)
    corpus = corpus_of_lengths(lengths, boundaries, 100 << 10)
    plan_options = PlanOptions(boundaries=boundaries, token_budget=8192, world_size=2, accumulate=3)
    for name in STRATEGIES:
        expected = simulate(corpus, plan_options, EpochOptions(seed=5), name).to_json()
        got = report["strategies"][name]
        assert got.pop("plan_seconds") > 0
        expected.pop("plan_seconds")
        assert got == expected
        assert name in err  # the table for people


def test_some_strategies_and_the_frontier(lengths_file, capsys):
    report, err = simulate_json(
        capsys,
        lengths_file,
        "--token-budget",
        "8192",
        "--strategies",
        "loader",
        "--frontier",
        "--buckets",
        "2",
    )
    assert list(report["strategies"]) == ["loader"]
    points = {(p["num_buckets"], p["lookahead"]): p for p in report["frontier"]}
    assert {k for k, _ in points} == {1, 2, 4, 6, 8, 12, 16} and {w for _, w in points} == {1, 4, 16, 32, 64}
    # A longer lookahead pads less; more buckets pad less at lookahead 1.
    assert points[1, 1]["padding_efficiency"] < points[6, 1]["padding_efficiency"]
    assert points[6, 1]["padding_efficiency"] < points[6, 32]["padding_efficiency"]
    same = report["strategies"]["loader"]["padding_efficiency"]
    assert points[2, 32]["padding_efficiency"] == same
    assert "by buckets and lookahead" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--strategies", "magic"], 1, "error: strategy 'magic' is not one of sorted-static"),
        (["--token-budget", "1000"], 1, "tokens but token_budget 1000"),
        (["--token-budget", "0"], 2, "0 is not in the range"),
        (["--boundaries", "5,4"], 2, "does not ascend"),
        (["--boundaries", "five"], 2, "is no list of lengths"),
        (["--buckets", "many"], 2, "neither a number nor auto"),
        (["--cost-model", "none.json", "--token-budget", "8192"], 1, "none.json cannot be read"),
        (["--num-canonical-nodes", "3", "--token-budget", "8192"], 1, "3 does not divide the 8 batches"),
    ],
)
def test_wrong_calls(lengths_file, capsys, arguments, code, message):
    assert run(["simulate", str(lengths_file), *arguments]) == code
    err = capsys.readouterr().err
    assert message in err.replace("\n", " ")
    assert code == 2 or len([line for line in err.splitlines() if line.startswith("error:")]) == 1


def test_a_missing_file_is_named(capsys):
    assert run(["simulate", "nowhere.npy"]) == 1
    assert "error: nowhere.npy cannot be read" in capsys.readouterr().err
