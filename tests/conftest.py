"""What all tests share: the root, the command line in a process of its own, calm hypothesis settings."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# Shared machines stall now and then; a test's own timeout catches a hang. In CI a failure must repeat.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# Forked tokenizer threads warn on stderr, and tests compare stderr.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run this interpreter with some arguments, from the root, and return the finished process."""

    def run(*arguments: object, timeout: float = 120, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        kwargs.setdefault("cwd", ROOT)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **kwargs)

    return run


@pytest.fixture(scope="session")
def shardgen_cli(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python -m shardgen`` with some arguments in a process of its own."""

    def run(*arguments: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
        return python("-m", "shardgen", *arguments, **kwargs)

    return run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, python: Callable[..., Any]) -> Path:
    """A folder of two Parquet files with 400 real samples, made as the demo makes its own."""
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    finished = python(ROOT / "scripts/demo_corpus.py", folder, "--samples", 400, "--vocabulary", 600)
    assert finished.returncode == 0, finished.stderr
    return folder
