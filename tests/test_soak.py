"""The soak in short: kills of groups, ranks and workers, and restarts at the very end of epochs."""

import re

import pytest


@pytest.mark.distributed
@pytest.mark.slow
def test_every_sample_once_per_epoch_over_kills(python, root):
    done = python(root / "scripts/soak.py", "--kills", 9, "--samples", 1200, "--seed", 2, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    runs, verdict = done.stdout.splitlines()[-2:]
    epochs, samples, kills = re.fullmatch(
        r"(\d+) epochs, (\d+) samples, each exactly once per epoch; (\d+) kills", verdict
    ).groups()
    assert int(epochs) >= 2 and int(samples) == 1200 and int(kills) >= 9
    counted = re.search(r"(\d+) kills of the whole group, (\d+) kills in the last 3 steps", runs)
    groups, late = counted.groups()
    assert int(groups) >= 3 and int(late) >= 3
