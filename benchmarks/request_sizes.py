"""How large requests of the drives should be: the size that the search chooses against each that it could have.

    python benchmarks/request_sizes.py [--cases 0,1 --rounds 2 --turns 4 --steps 3] [--save]

In each round each size has a process of its own, whose plan is made for it as a whole (``staging`` then has no other to choose);
they take turns, so that a drift of the machine hits all alike, and new ones the next round, because ops are faster in some
processes than in others. The choice is a further process's, which does not train. Prediction and simulation are from before the
first step. Bar: turn by turn, the size that is chosen takes in the median at most 1.03x the step of the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import unittest.mock
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from report import arguments, at_least_one, finish, own_folder, profile, with_saved
from turns import Process, serve
from workload import Case, Streamed, case_arguments, chosen, streamed

import lohan_fx
from lohan_fx.plan import Windows
from lohan_fx.planning import staging
from lohan_fx.planning.budgets import choose_windows
from lohan_fx.units import format_bytes

MOST_RATIO = 1.03
CHOSEN = "chosen"
CASES = (
    Case("demo", 4, 128, "1GiB"),
    Case("gpt2", 2, 128, "1.5GiB"),
    Case("350m", 1, 128, "2.5GiB"),
    Case("350m", 4, 512, "2.5GiB"),
)
FACTORS = {f"x{float(factor):g}": factor for factor in sorted({Fraction(1), *staging.FACTORS})}
"""What the rule's sizes are multiplied by, by name."""


def compiled(name: str, case: Case, args: argparse.Namespace) -> Streamed:
    """``case`` by that size alone, or by the one that is chosen."""

    def resized(*given: Any, **options: Any) -> Windows:
        windows = choose_windows(*given, **options)
        sizes = {size: int(getattr(windows, size) * FACTORS[name]) for size in staging.SIZES}
        return dataclasses.replace(windows, **sizes)

    def compile_it() -> Streamed:
        hw = profile(args)
        return streamed(case.workload, hw, args.nvme, host_memory=case.host_memory, revise=False)

    if name == CHOSEN:
        return compile_it()
    with (
        unittest.mock.patch.object(sys.modules["lohan_fx.compile"], "choose_windows", resized),
        unittest.mock.patch.object(staging, "FACTORS", (Fraction(1),)),
    ):
        return compile_it()


def child(case: Case, args: argparse.Namespace) -> None:
    """Train by one size, step by step as asked."""
    ours = compiled(args.child, case, args)
    assert ours.plan.prediction is not None
    expected = {
        "predicted_s": ours.plan.prediction.step_s,
        "simulated_s": lohan_fx.simulate(ours.model).step_s,
        "chunk_elements": ours.plan.windows.chunk_elements,
        "io_bytes": ours.plan.windows.io_bytes,
        "staging_note": next((note for note in ours.plan.notes if note.startswith("staging")), ""),
    }

    def end() -> None:
        lohan_fx.release(ours.model)

    serve({"step": ours.step}, expected, end)


def measured(case: Case, args: argparse.Namespace, hw: Path) -> dict[str, Any]:
    """One case, all its sizes in alternating turns."""

    def process(name: str) -> Process:
        command = [__file__, "--child", name, "--case", json.dumps(vars(case)), "--hw", str(hw)]
        return Process([*command, "--nvme", str(args.nvme / name)])

    asked = process(CHOSEN)
    asked.end()
    said: dict[str, list[dict[str, Any]]] = {name: [] for name in FACTORS}
    turns: list[dict[str, float]] = []
    for _ in range(args.rounds):
        processes = {name: process(name) for name in FACTORS}
        for name, found in processes.items():
            said[name].append(found.said)
        for _ in range(args.turns):
            turns.append({name: _turn_s(found, args.steps) for name, found in processes.items()})
            print(f"{case}: {turns[-1]}", file=sys.stderr, flush=True)
        for found in processes.values():
            found.end()
    sizes = {
        name: {
            **found[0],
            "measured_s": statistics.median(turn[name] for turn in turns),
            "predicted_s": statistics.median(one["predicted_s"] for one in found),
            "simulated_s": statistics.median(one["simulated_s"] for one in found),
        }
        for name, found in said.items()
    }
    picked = next(name for name, found in sizes.items() if found["io_bytes"] == asked.said["io_bytes"])
    ratios = {name: statistics.median(turn[picked] / turn[name] for turn in turns) for name in FACTORS}
    fastest = max(ratios, key=lambda name: ratios[name])
    return {
        "case": str(case), "chosen": picked, "fastest": fastest, "ratio": ratios[fastest], "sizes": sizes,
        "turns": turns, "staging_note": asked.said["staging_note"],
    }  # fmt: skip


def _turn_s(process: Process, steps: int) -> float:
    """The median step; the first finds what the others left in the caches and at the drives."""
    seconds = [process.run("step") for _ in range(1 + steps)]
    return statistics.median(seconds[1:])


def main() -> None:
    parser = arguments(__doc__ or "")
    case_arguments(parser)
    parser.add_argument("--rounds", type=at_least_one, default=2, help="of new processes")
    parser.add_argument("--turns", type=at_least_one, default=4, help="per process")
    parser.add_argument("--steps", type=at_least_one, default=3, help="timed steps per turn")
    parser.add_argument("--child", choices=(CHOSEN, *FACTORS), help="internal: the measured process")
    parser.add_argument("--case", help="internal: what it measures")
    args = parser.parse_args()
    if args.child:
        child(Case(**json.loads(args.case)), args)
        return
    asked = chosen(CASES, args)
    with own_folder(args):
        hw, path = profile(args), args.nvme / "profile.toml"
        hw.save(path)
        cases = [measured(case, args, path) for case in asked]
    cases = with_saved("request_sizes", cases) if args.save else cases
    missed = [
        f"{case['case']}: the size chosen takes {case['ratio']:.3f}x the fastest, at most {MOST_RATIO} allowed"
        for case in cases
        if case["ratio"] > MOST_RATIO
    ]
    rows = [row for case in cases for row in _rows(case)]
    figures = {"ratio": max(case["ratio"] for case in cases), "cases": cases, "of_cases": len(CASES)}
    finish("request_sizes", rows, figures, missed, save=args.save)


def _rows(case: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [(case["case"], f"chosen over the fastest: {case['ratio']:.3f}x ({case['chosen']} over {case['fastest']})")]
    for name, found in case["sizes"].items():
        seconds = ", ".join(f"{what} {found[f'{what}_s']:.3f} s" for what in ("measured", "predicted", "simulated"))
        rows.append((f"  {name}: {format_bytes(found['io_bytes'])}", seconds))
    return rows


if __name__ == "__main__":
    main()
