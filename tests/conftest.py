"""What all tests share: the root, the command line in a process of its own, calm hypothesis settings."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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

    def run(*arguments: object, timeout: float = 120, **kwargs: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        kwargs.setdefault("cwd", ROOT)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **kwargs)

    return run


@pytest.fixture(scope="session")
def shardgen_cli(
    python: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``python -m shardgen`` with some arguments in a process of its own."""

    def run(*arguments: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
        return python("-m", "shardgen", *arguments, **kwargs)

    return run
