"""``host_memory`` binds: processes of their own grow by less in every phase, and run where the kernel refuses them more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.recipes import cpu_profile, name_of, usual_dtype

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "within_promise.py"


def test_every_phase_stays_below_the_promise(tmp_path: Path) -> None:
    hw = tmp_path / "hw.toml"
    cpu_profile().save(hw)
    options = ["--size", "demo", "--layers", "8", "--host-memory", "320MiB", "--hw", hw, "--nvme", tmp_path]
    options += ["--batch", 1, "--seq", 32, "--dtype", name_of(usual_dtype())]
    run = subprocess.run([sys.executable, SCRIPT, *map(str, options)], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, f"{run.stdout}{run.stderr}"
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert found["state_bytes"] > 2 * found["promise_bytes"], "the model is too small to show anything"
    assert list(found["growth_bytes"]) == [
        "compile", "prepare", "steps", "evaluation", "checkpoint", "steps after the checkpoint",
        "compile, resumed", "prepare, resumed", "steps after the checkpoint, resumed",
    ]  # fmt: skip
