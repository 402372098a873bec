"""results_table: what ``results/*.json`` say, as rows of Markdown tables: for the commands that make pages of docs/."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"
NOT_MEASURED = "not measured"
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One line: what is promised, the bar, and how to tell the figures of ``results/<name>.json``."""

    name: str
    promise: str
    bar: str
    told: Callable[[Figures], str]
    judged: bool = True
    """Whether what that benchmark missed is about this promise."""
    missed: Callable[[Figures], Sequence[str]] = lambda found: found.get("missed", ())
    """What its figures miss: as it was saved, or by the bars of today (``bars``)."""


def load(name: str, results: Path = RESULTS) -> Figures | None:
    """The figures that a benchmark saved; None where it has not been run, or not saved."""
    path = results / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def table(rows: Sequence[Row], results: Path = RESULTS) -> str:
    """The rows as Markdown, with the dates and the commands of each, and how many of its cases were measured."""
    lines = ["| promise | bar | measured | date | command |", "|---|---|---|---|---|"]
    for row in rows:
        found = load(row.name, results)
        if found is None:
            lines.append(f"| {row.promise} | {row.bar} | {NOT_MEASURED} | | |")
            continue
        missed = "; ".join(map(str, row.missed(found) if row.judged else ()))
        told = f"{row.told(found)}{f'. **Missed**: {missed}' if missed else ''}"
        if (measured := len(found.get("cases", ()))) < (of := found.get("of_cases", 0)):
            told += f". **{measured} of {of} cases measured**"
        by = measured_by(found)
        dates, commands = (dict.fromkeys(one[key] for one in by) for key in ("date", "command"))
        cells = [row.promise, row.bar, told, ", ".join(dict.fromkeys(date[:10] for date in dates))]
        cells.append("; ".join(f"`{command}`" for command in commands))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


def measured_by(found: Figures) -> list[Figures]:
    """Date, command, hardware and versions: of each case, where there are some, else of the whole run."""
    return [case["measured_by"] for case in found.get("cases", ()) if "measured_by" in case] or [found]


def machines(rows: Sequence[Row], results: Path = RESULTS) -> str:
    """The hardware and the versions of all that was measured, each once."""
    found = [figures for row in rows if (figures := load(row.name, results)) is not None]
    lines = {
        f"- {f['hardware']['fingerprint']}; "
        + ", ".join(f"{name} {version}" for name, version in f["versions"].items())
        for figures in found
        for f in measured_by(figures)
    }
    return "\n".join(sorted(lines))


def scalars(figures: Figures) -> str:
    """All plain numbers of a benchmark that no row knows by name."""
    known = {"benchmark", "command", "date"}
    shown = {k: v for k, v in figures.items() if k not in known and isinstance(v, int | float)}
    return ", ".join(f"{name} {number(value)}" for name, value in shown.items()) or "see the JSON"


def number(value: float | None) -> str:
    """Three digits; a dash for what could not be measured."""
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"


def finish(page: str, text: str, description: str) -> None:
    """Print the page; with ``--write`` put it into docs/; with ``--check`` exit 1 where it is another one there."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true", help=f"write docs/{page}")
    parser.add_argument("--check", action="store_true", help=f"exit 1 unless docs/{page} is what this makes")
    args = parser.parse_args()
    path = DOCS / page
    if args.write:
        path.write_text(text)
    if args.check and (not path.exists() or path.read_text() != text):
        sys.exit(f"{path} is not what results/*.json say: run this with --write")
    print(text, end="")
