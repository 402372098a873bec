"""What all benchmarks share: their arguments, and what earlier runs have saved."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("report")


def test_rounds_are_counted_from_one(report: ModuleType) -> None:
    assert report.at_least_one("3") == 3
    for given in ("0", "-1"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"{given} is none at all: give 1 or more"):
            report.at_least_one(given)
    with pytest.raises(ValueError):
        report.at_least_one("x")


def test_what_was_saved_of_other_cases_stays(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    new = [{"case": "b", "ratio": 2}]
    assert report.with_saved("x", new) == new
    (tmp_path / "x.json").write_text(json.dumps({"cases": [{"case": "a", "ratio": 1}, {"case": "b", "ratio": 1}]}))
    assert report.with_saved("x", new) == [{"case": "a", "ratio": 1}, *new]
