"""report: how each benchmark begins and ends: its arguments, a folder of its own, a table for people, one JSON line for
machines, exit 1 where a bar is missed."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

import lohan_fx
from lohan_fx.measuring import machine

RESULTS = Path(__file__).parent / "results"
MEASURED_BY = "measured_by"
"""Key of a case: which command measured it, when, on what, by which code (``measured_by``)."""


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--nvme", type=Path, default=Path.home() / ".cache" / "lohan_fx" / "benchmark", metavar="DIR")
    parser.add_argument("--hw", type=Path, help="a hardware profile as TOML; measured where it is not given")
    parser.add_argument("--save", action="store_true", help="keep the JSON in benchmarks/results/")
    return parser


def device_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where all that is compared computes")


def name_on(device: str, name: str) -> str:
    """Of the result of the benchmark ``name`` on that ``--device``."""
    return name if device == "cpu" else f"{name}_gpu"


def at_least_one(given: str) -> int:
    """A number of rounds, steps or the like, as the type of an argument."""
    count = int(given)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{given} is none at all: give 1 or more")
    return count


def in_a_process(script: str, case: str, args: argparse.Namespace, hw: Path, options: Sequence[str]) -> dict[str, Any]:
    """The JSON that ``script --case`` prints last in a process of its own, with those ``options`` of ``args``."""
    given = [text for name in options for text in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    command = [sys.executable, script, "--case", case, "--hw", str(hw), "--nvme", str(args.nvme), *given]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@contextmanager
def own_folder(args: argparse.Namespace) -> Iterator[None]:
    """``args.nvme`` is a new folder in the one that was given, until the end: then what still runs of ours is killed, and
    the folder removed. Nothing of the user's is touched, whatever happens."""
    given: Path = args.nvme
    given.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=given) as folder:
        args.nvme = Path(folder)
        try:
            yield
        finally:
            children = psutil.Process().children(recursive=True)
            for child in children:
                child.kill()
            psutil.wait_procs(children)
            args.nvme = given


def profile(args: argparse.Namespace, seconds: float = 12.0) -> lohan_fx.HardwareProfile:
    """The profile that ``--hw`` names, or this machine's, measured now: of the processor, or of ``--device``."""
    if args.hw is not None:
        return lohan_fx.HardwareProfile.load(args.hw)
    return lohan_fx.HardwareProfile.measure(nvme=[args.nvme], seconds=seconds, device=getattr(args, "device", "cpu"))


def measured_by() -> dict[str, Any]:
    """This command, when (UTC), on which machine, with which versions."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True
    )
    return {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": described.stdout.strip() or None,
        "hardware": {"cpu": platform.processor() or platform.machine(), "fingerprint": machine.fingerprint()},
        "versions": {"torch": torch.__version__, "python": platform.python_version(), "lohan_fx": lohan_fx.__version__},
    }


def with_saved(name: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``cases``, and before them those that the saved result of the benchmark ``name`` holds and that are not among them: what
    takes an hour a case is not run in one go. Each has its name as ``case``, and says what it was measured by."""
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
    by = measured_by()
    full = {"benchmark": name, **figures, "missed": list(missed), **by}
    if "cases" in figures:
        full["cases"] = [{MEASURED_BY: by, **case} for case in figures["cases"]]
    if save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(full, indent=2) + "\n")
    print(json.dumps(full))
    sys.exit(1 if missed else 0)
