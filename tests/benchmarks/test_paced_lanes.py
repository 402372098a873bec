"""paced_lanes: what it slows down is what the runtime calls."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_step_takes_as_long_as_its_reads_writes_and_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not less: a lane sleeps for what it moves. How much longer it takes is the machine's matter."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    paced_lanes = importlib.import_module("paced_lanes")
    with paced_lanes.paced():
        case = paced_lanes.Case("all of them", "swap-nvme", microseconds=1000)
        seconds, found = paced_lanes.measured(case, paced_lanes.machine(str(tmp_path)), rounds=1)
    drives_s = found.nvme_read_bytes / paced_lanes.READ + found.nvme_write_bytes / paced_lanes.WRITE
    assert drives_s > 0.5 and found.bytes["d2h"]
    assert seconds > 0.8 * drives_s
