"""What a refusal names as enough is enough: the least promise holds in processes that the kernel gives no more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.recipes import cpu_profile, name_of, usual_dtype

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "least_promise.py"
CLIPPED_AND_ACCUMULATED = 1


def test_the_least_promise_holds_where_gradients_are_summed_and_held(tmp_path: Path) -> None:
    hw = tmp_path / "hw.toml"
    cpu_profile().save(hw)
    options = ["--cases", CLIPPED_AND_ACCUMULATED, "--dtype", name_of(usual_dtype()), "--hw", hw, "--nvme", tmp_path]
    run = subprocess.run([sys.executable, SCRIPT, *map(str, options)], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}"
    (found,) = json.loads(run.stdout.strip().splitlines()[-1])["cases"]
    assert found["most_bytes"] > found["promise_bytes"] * 3 // 4, "it has room to spare: nothing is tested"
    assert found["state_bytes"] > 3 * found["promise_bytes"]
    assert not found["refused"]
