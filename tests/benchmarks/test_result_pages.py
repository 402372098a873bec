"""docs/reliability.md and docs/performance.md are what their commands make of the saved results, today's and others'."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import results_table

BENCHMARKS = Path(results_table.__file__).parent
FOUND = {"date": "2026-01-02T03:04:05+00:00", "command": "python x.py", "missed": ["a | bar"], "lost": 3}


@pytest.mark.parametrize("script", ["reliability_table.py", "performance_table.py"])
def test_the_committed_page_is_what_the_command_makes_of_the_committed_results(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    try:
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    except SystemExit as ended:
        assert not ended.code, capsys.readouterr().err


def test_a_row_tells_what_was_measured_or_that_nothing_was(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(FOUND))
    rows = (
        results_table.Row("one", "Nothing is lost", "0", lambda found: f"{found['lost']} lost"),
        results_table.Row("one", "Of no concern", "0", results_table.scalars, judged=False),
        results_table.Row("two", "Never run", "1", results_table.scalars),
    )
    assert results_table.table(rows, tmp_path).splitlines()[2:] == [
        "| Nothing is lost | 0 | 3 lost. **Missed**: a \\| bar | 2026-01-02 | `python x.py` |",
        "| Of no concern | 0 | lost 3 | 2026-01-02 | `python x.py` |",
        "| Never run | 1 | not measured | | |",
    ]


def test_what_was_saved_is_judged_by_the_bars_of_today(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(FOUND))
    rows = [
        results_table.Row("one", "", "2", results_table.scalars, missed=lambda found: [f"{found['lost']} lost"]),
        results_table.Row("one", "", "3", results_table.scalars, missed=lambda found: []),
    ]
    assert [line.split(" | ")[2] for line in results_table.table(rows, tmp_path).splitlines()[2:]] == [
        "lost 3. **Missed**: 3 lost",
        "lost 3",
    ]


def test_a_row_tells_the_dates_and_commands_of_all_its_cases_and_how_many_there_are(tmp_path: Path) -> None:
    cases = [
        {"measured_by": {"date": "2026-01-02T03:04:05+00:00", "command": "python x.py --cases 0"}},
        {"measured_by": {"date": "2026-01-02T04:04:05+00:00", "command": "python x.py --cases 1"}},
        {"measured_by": {"date": "2026-02-02T03:04:05+00:00", "command": "python x.py --cases 0"}},
    ]
    (tmp_path / "one.json").write_text(json.dumps({**FOUND, "missed": [], "cases": cases, "of_cases": 4}))
    row = results_table.Row("one", "Nothing is lost", "0", lambda found: f"{found['lost']} lost")
    assert results_table.table([row], tmp_path).splitlines()[2:] == [
        "| Nothing is lost | 0 | 3 lost. **3 of 4 cases measured** | 2026-01-02, 2026-02-02 | "
        "`python x.py --cases 0`; `python x.py --cases 1` |",
    ]


@pytest.mark.parametrize(("value", "told"), [(None, "-"), (1234567, "1,234,567"), (0.98765, "0.988")])
def test_numbers_have_three_digits(value: float | None, told: str) -> None:
    assert results_table.number(value) == told
