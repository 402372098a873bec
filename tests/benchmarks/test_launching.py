"""launching: what plans for a GPU count is what lanes are given."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

from lohan_fx.hardware import NvmeProfile
from tests.tiny import profile

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize("case", ["in host memory", "on NVMe"])
def test_lanes_get_as_many_jobs_as_foretold(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    launching = importlib.import_module("launching")
    profile(nvme=(NvmeProfile(str(tmp_path), 1e9, 1e9, 1e9, 1 << 40),)).save(tmp_path / "profile.toml")
    found = launching.measured(
        case, argparse.Namespace(layers=1, rounds=1, hw=tmp_path / "profile.toml", nvme=tmp_path)
    )
    assert found["jobs"] == found["foretold_jobs"] > 0
