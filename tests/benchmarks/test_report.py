"""What all benchmarks share: their arguments, and what earlier runs have saved."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
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


def test_a_benchmark_works_in_a_folder_of_its_own_and_leaves_the_users_files(
    report: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "profile.toml").write_text("the user's")
    args = argparse.Namespace(nvme=tmp_path)
    with pytest.raises(ValueError, match="failed half-way"), report.own_folder(args):
        assert args.nvme.parent == tmp_path
        (args.nvme / "profile.toml").write_text("ours")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=args.nvme)
        raise ValueError("failed half-way")
    assert child.poll() is not None
    assert [path.name for path in tmp_path.iterdir()] == ["profile.toml"]
    assert (tmp_path / "profile.toml").read_text() == "the user's"
    assert args.nvme == tmp_path


def test_each_case_says_what_it_was_measured_by(
    report: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    earlier = {"measured_by": {"command": "python earlier.py", "date": "2026-01-02"}, "case": "a"}
    (tmp_path / "x.json").write_text(json.dumps({"cases": [earlier]}))
    with pytest.raises(SystemExit) as ended:
        report.finish("x", [], {"cases": report.with_saved("x", [{"case": "b"}])}, [], save=True)
    assert ended.value.code == 0
    saved = json.loads((tmp_path / "x.json").read_text())
    assert saved["cases"][0] == earlier
    assert saved["cases"][1]["case"] == "b"
    assert saved["cases"][1]["measured_by"]["date"] == saved["date"]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == saved


def test_cases_are_named_by_their_numbers(monkeypatch: pytest.MonkeyPatch, report: ModuleType) -> None:
    workload = importlib.import_module("workload")
    assert workload.case_numbers("0,2") == [0, 2]
    for given in ("x", "-1", "0,,1", ""):
        with pytest.raises(
            argparse.ArgumentTypeError, match="are no numbers of cases: give some from 0 on, such as 0,2"
        ):
            workload.case_numbers(given)
    assert workload.numbered("abc", argparse.Namespace(cases=None)) == ["a", "b", "c"]
    assert workload.numbered("abc", argparse.Namespace(cases=[2, 0])) == ["c", "a"]
    with pytest.raises(SystemExit, match="--cases names 3: the last of 3 is 2"):
        workload.numbered("abc", argparse.Namespace(cases=[3]))
