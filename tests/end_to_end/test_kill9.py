"""A training killed at random moments ends with the bits of one that was not: a handful of what the benchmark does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill9.py"


@pytest.mark.slow
def test_a_handful_of_kills(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "10", "--seed", "7", "--nvme", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["kills"], found["bit_equal"]) == (10, True)
    assert found["kinds"] == {"outside": 4, "call": 3, "power": 3}
    assert len(found["recipes"]) == 5, "a way to make a step was never killed"
