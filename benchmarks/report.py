"""report: how each benchmark ends: a table for people, one JSON line for machines, exit 1 where a bar is missed."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lohan_fx
from lohan_fx import machine

RESULTS = Path(__file__).parent / "results"


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path.home() / ".cache" / "lohan_fx" / "benchmark", metavar="DIR")
    parser.add_argument("--hw", type=Path, help="a hardware profile as TOML; measured where it is not given")
    parser.add_argument("--save", action="store_true", help="keep the JSON in benchmarks/results/")
    return parser


def at_least_one(given: str) -> int:
    """A number of rounds, steps or the like, as the type of an argument."""
    count = int(given)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{given} is none at all: give 1 or more")
    return count


def profile(args: argparse.Namespace, seconds: float = 12.0) -> lohan_fx.HardwareProfile:
    """The profile that ``--hw`` names, or this machine's, measured now."""
    args.nvme.mkdir(parents=True, exist_ok=True)
    if args.hw is not None:
        return lohan_fx.HardwareProfile.load(args.hw)
    return lohan_fx.HardwareProfile.measure(nvme=[args.nvme], seconds=seconds)


def today() -> str:
    """Now, to the second, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def with_saved(name: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``cases``, and before them those that the saved result of the benchmark ``name`` holds and that are not among them: what
    takes an hour a case is not run in one go. Each has its name as ``case``."""
    path, now = RESULTS / f"{name}.json", {case["case"] for case in cases}
    saved = json.loads(path.read_text())["cases"] if path.exists() else []
    return [*(case for case in saved if case["case"] not in now), *cases]


def finish(
    name: str,
    rows: Sequence[tuple[str, str]],
    figures: Mapping[str, Any],
    missed: Sequence[str],
    *,
    save: bool,
) -> None:
    """Print ``rows`` and what was missed, then ``figures`` as the last line, and exit 0 or 1."""
    table = Table(title=name, show_header=False)
    for label, value in rows:
        table.add_row(label, value)
    for bar in missed:
        table.add_row("MISSED", bar)
    Console(width=110).print(table)
    full = {
        "benchmark": name,
        **figures,
        "missed": list(missed),
        "command": " ".join(["python", *sys.argv]),
        "date": today(),
        "hardware": {"cpu": platform.processor() or platform.machine(), "fingerprint": machine.fingerprint()},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "lohan_fx": lohan_fx.__version__},
    }
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(full, indent=2) + "\n")
    print(json.dumps(full))
    sys.exit(1 if missed else 0)
