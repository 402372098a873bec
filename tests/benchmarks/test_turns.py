"""Measured processes answer in turn, whatever libraries print meanwhile, and say so when they end without an answer."""

from __future__ import annotations

import sys
from pathlib import Path

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
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import turns

    script = tmp_path / "child.py"
    script.write_text(CHILD)
    return lambda what: turns.Process([str(script), str(BENCHMARKS), what])


def test_each_line_has_its_answer_and_the_end_too(process) -> None:  # type: ignore[no-untyped-def]
    found = process("answers")
    assert found.said == "ready"
    assert [found.ask(line) for line in ("x", "y")] == [{"asked": "x"}, {"asked": "y"}]
    assert found.end() == "done"


def test_runs_are_timed(process) -> None:  # type: ignore[no-untyped-def]
    found = process("runs")
    assert found.said == {"predicted_s": 1.0}
    assert 0 <= found.run("nothing") < 60
    assert found.end() == [1, 2]


def test_an_end_without_an_answer_is_told(process) -> None:  # type: ignore[no-untyped-def]
    found = process("answers")
    with pytest.raises(SystemExit, match="ended with status 3") as ended:
        found.ask("die")
    assert type(ended.value) is sys.modules["turns"].Ended
