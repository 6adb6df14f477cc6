"""The front page tells the truth: its commands and its Python run as printed, in order, on real samples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)

# What the page leaves to its reader: a model and an optimizer, here as small as they come. The corpus is
# small too, so the loop over epochs ends soon.
PRELUDE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(600, 8)
        self.head = torch.nn.Linear(8, 600)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids[:, :-1]))
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def commands() -> list[str]:
    """The shardgen commands on the page, continued lines joined, prompts cut."""
    shell = "\n".join(text for language, text in BLOCKS if language in {"console", "bash"})
    lines = shell.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if "-m shardgen" in line]


def test_the_page_has_what_a_newcomer_needs():
    assert any("shardgen build" in command for command in commands())
    python = [text for language, text in BLOCKS if language == "python"]
    assert any("BucketedDataLoader(" in text for text in python)
    assert any("load_state_dict(" in text for text in python)
    assert "scripts/demo" in README and "scripts/test" in README


def test_files_named_on_the_page_exist():
    named = set(re.findall(r"\b(?:scripts|tests|shardgen|loader)/[\w./-]*\w", README))
    assert {name for name in named if not (ROOT / name).exists()} == set()
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert {link for link in links if not (ROOT / link).exists()} == set()


@pytest.mark.slow
def test_commands_and_code_run_as_printed(corpus, tmp_path):
    os.symlink(corpus, tmp_path / "corpus")
    os.symlink(ROOT / "tests", tmp_path / "tests")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for command in commands():
        words = command.split()
        assert words[:3] == ["python", "-m", "shardgen"], command
        finished = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert finished.returncode == 0, f"{command}\n{finished.stderr}"
    code = "\n".join(text for language, text in BLOCKS if language == "python")
    finished = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}\n{code}\nprint('reached the end in epoch', loader.epoch)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1].startswith("reached the end in epoch")
