"""The demo's parts: its corpus is whole and masked as said, its count after a restart notices a fault."""

import ast
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent


def script(name):
    """Import a file under scripts/, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo_corpus = script("demo_corpus")

SOURCE = '''\
@first
@second(1)
def decorated(a, b):
    """Docstring

    of two paragraphs.
    """
    # why
    return a + b

class Outer:
    "Words."
    @property
    def only_words(self):
        """Nothing else."""
    def one_line(self): return 1
    async def waits(self):
        await self
'''


def test_a_definition_is_cut_before_the_body_and_nothing_is_lost():
    lines = SOURCE.splitlines(keepends=True)
    found = {
        node.name: demo_corpus.split_definition(lines, node)
        for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, demo_corpus.Definition)
    }
    assert found["decorated"] == ("".join(lines[:8]), lines[8])
    assert found["Outer"] == ("".join(lines[10:12]), "".join(lines[12:]))
    assert found["only_words"] == ("@property\ndef only_words(self):\n", '    """Nothing else."""\n')
    assert found["one_line"] == ("", "def one_line(self): return 1\n")
    assert found["waits"] == ("async def waits(self):\n", "    await self\n")


def test_the_corpus_has_real_rows_and_its_columns_agree(corpus):
    table = pa.concat_tables([pq.read_table(path) for path in sorted(corpus.glob("*.parquet"))])
    assert table.schema.equals(demo_corpus.SCHEMA)
    assert table["row"].to_pylist() == list(range(400))
    tokens, masks = table["input_ids"].to_pylist(), table["loss_mask"].to_pylist()
    assert table["seq_len"].to_pylist() == [len(row) for row in tokens] == [len(row) for row in masks]

    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer.json"))
    end = tokenizer.token_to_id("<end>")
    for row, mask in zip(tokens, masks, strict=True):
        assert row[-1] == end and mask[-1] == 1  # so every row bears loss
        assert mask == sorted(mask)  # the prompt first, then the answer
        ast.parse(tokenizer.decode(row))  # what a model would learn is Python
    assert np.mean([len(row) for row in tokens]) > np.median([len(row) for row in tokens])


def test_the_choice_does_not_depend_on_how_many_others_there_are():
    found = [(f"file.py:{i}", "", "") for i in range(100)]
    few, more = demo_corpus.choose(found, 10), demo_corpus.choose(found, 30)
    assert len(few) == 10 and len(more) == 30
    assert set(few) < set(more)
    assert more == sorted(more, key=found.index)


@pytest.mark.parametrize(
    ("after_restart", "right"),
    [
        ([[2, 3], [4]], {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}),
        ([[3], [4]], {0: 1, 1: 1, 3: 1, 4: 1}),
        ([[1, 2, 3], [4]], {0: 1, 1: 2, 2: 1, 3: 1, 4: 1}),
    ],
)
def test_the_count_takes_finished_steps_of_the_killed_run_and_all_of_the_next(tmp_path, after_restart, right):
    demo_restart = script("demo_restart")
    killed = [{"step": 0, "sample_ids": [0, 1]}, {"step": 1, "sample_ids": [2]}]
    torn = '{"step": 2, "sample_i'
    (tmp_path / "delivered-0-0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in killed) + torn)
    (tmp_path / "delivered-1-0.jsonl").write_text(
        "".join(json.dumps({"step": i + 1, "sample_ids": ids}) + "\n" for i, ids in enumerate(after_restart))
    )
    counts = demo_restart.delivered(tmp_path, 0, 1)
    counts += demo_restart.delivered(tmp_path, 1, float("inf"))
    assert counts == right


@pytest.mark.slow
@pytest.mark.distributed
def test_a_killed_training_goes_on_with_another_number_of_ranks(corpus, tmp_path, python, shardgen_cli):
    build = ["--token-budget", 512, "--max-length", 512, "--over-length", "truncate"]
    built = shardgen_cli("build", corpus, "--out", tmp_path / "shards", *build)
    assert built.returncode == 0, built.stderr
    small = ["--token-budget", 512, "--vocabulary", 600, "--context", 512, "--width", 64]
    finished = python(
        *(ROOT / "scripts/demo_restart.py", tmp_path / "shards", tmp_path / "run", "--ranks", "2,1"),
        *(*small, "--checkpoint-every", 3),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=280,
    )
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert sum("kill -9" in line for line in lines) == 1
    assert lines[-1] == "restart: 400 samples, each exactly once"
