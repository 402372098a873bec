"""Measured processes answer in turn, whatever libraries print meanwhile, and say so when they end without an answer."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from turns import answer_each, serve
def answer(line):
    print("a library's line")
    if line == "die":
        sys.exit(3)
    return {"asked": line}
if sys.argv[2] == "answers":
    answer_each(answer, said="ready", end=lambda: "done")
else:
    serve({"nothing": lambda: None}, said={"predicted_s": 1.0}, end=lambda: [1, 2])
"""


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("turns")


def process(turns: ModuleType, folder: Path, what: str) -> Any:
    script = folder / "child.py"
    script.write_text(CHILD)
    return turns.Process([str(script), str(BENCHMARKS), what])


def test_each_line_has_its_answer_and_the_end_too(turns: ModuleType, tmp_path: Path) -> None:
    found = process(turns, tmp_path, "answers")
    assert found.said == "ready"
    assert [found.ask(line) for line in ("x", "y")] == [{"asked": "x"}, {"asked": "y"}]
    assert found.end() == "done"


def test_runs_are_timed(turns: ModuleType, tmp_path: Path) -> None:
    found = process(turns, tmp_path, "runs")
    assert found.said == {"predicted_s": 1.0}
    assert 0 <= found.run("nothing") < 60
    assert found.end() == [1, 2]


def test_an_end_without_an_answer_is_told(turns: ModuleType, tmp_path: Path) -> None:
    found = process(turns, tmp_path, "answers")
    with pytest.raises(turns.Ended, match="ended with status 3"):
        found.ask("die")
