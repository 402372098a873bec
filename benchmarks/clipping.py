"""What clipping by the global norm costs: seconds per step with and without it, in alternating turns.

    python benchmarks/clipping.py [--cases 0,1 --rounds 3 --steps 4] [--save]
    python benchmarks/clipping.py --size demo --batch 4 --seq 128 --host-memory 1GiB

Each is a process of its own. With clipping, updates run beside the next forward. So a turn is one step that is not timed,
``--steps`` that are, and a wait, not timed, until every update is in place: each timed step has the updates of its
predecessor beside its forward, as in training, and nothing of one process runs in the turn of the other. The same turn
without clipping. Prediction and simulation, of the same steady state, were made before the first step. Bar: 1.10x the step
without, in every case.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from report import arguments, at_least_one, finish, own_folder, profile, with_saved
from turns import Process, serve
from workload import SIZES, Case, case_arguments, chosen, streamed

import lohan_fx
from lohan_fx.planning.self_check import STAGES

MAX_NORM = 1.0
MOST_RATIO = 1.10
CLIPPED, PLAIN = "with", "without"
CASES = (Case("demo", 4, 128, "1GiB"), Case("350m", 4, 512, "2.5GiB"))


def child(case: Case, args: argparse.Namespace) -> None:
    """Train with or without clipping, step by step as asked."""
    max_norm = MAX_NORM if args.child == CLIPPED else None
    hw = profile(args)
    ours = streamed(case.workload, hw, args.nvme, max_norm=max_norm, host_memory=case.host_memory, revise=False)
    assert ours.plan.prediction is not None
    expected = {"predicted_s": ours.plan.prediction.step_s, "simulated_s": lohan_fx.simulate(ours.model).step_s}
    ours.step()
    serve({"step": ours.step, "drain": ours.drain}, expected, ours.end)


def turn_s(process: Process, steps: int) -> float:
    """Seconds per step of one turn."""
    process.run("step")
    seconds = [process.run("step") for _ in range(steps)]
    process.run("drain")
    return sum(seconds) / steps


def measured(case: Case, args: argparse.Namespace, hw: Path) -> dict[str, Any]:
    """One case."""

    def process(name: str) -> Process:
        command = [__file__, "--child", name, "--case", json.dumps(vars(case)), "--hw", str(hw)]
        return Process([*command, "--nvme", str(args.nvme / name)])

    processes = {name: process(name) for name in (PLAIN, CLIPPED)}
    rounds = [[turn_s(process, args.steps) for process in processes.values()] for _ in range(args.rounds)]
    without_s, with_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {
        "case": str(case), **vars(case), "steps": args.steps, "threads": torch.get_num_threads(),
        "without_s": without_s, "with_s": with_s,
        "ratio": statistics.median(clipped / plain for plain, clipped in rounds), "rounds": rounds,
        "expected": {name: process.said for name, process in processes.items()},
        "stages": {name: process.end() for name, process in processes.items()},
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    case_arguments(parser)
    parser.add_argument("--size", choices=SIZES, help="a case of one's own instead, with the three that follow")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--steps", type=at_least_one, default=4, help="timed steps per turn")
    parser.add_argument("--child", choices=(CLIPPED, PLAIN), help="internal: the measured process")
    parser.add_argument("--case", help="internal: what it measures")
    args = parser.parse_args()
    if args.child:
        child(Case(**json.loads(args.case)), args)
        return
    if args.cases and args.size:
        parser.error("--cases names known cases, --size one of your own: give one of them")
    own = Case(args.size, args.batch, args.seq, args.host_memory, dtype=args.dtype) if args.size else None
    asked = [own] if own else chosen(CASES, args)
    with own_folder(args):
        hw, path = profile(args), args.nvme / "profile.toml"
        hw.save(path)
        cases = [measured(case, args, path) for case in asked]
    cases = with_saved("clipping", cases) if args.save else cases
    rows = [row for found in cases for row in _rows(found)]
    figures = {"ratio": max(found["ratio"] for found in cases), "cases": cases, "of_cases": len(CASES)}
    finish("clipping", rows, figures, _missed(cases), save=args.save)


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [(found["case"], f"{found['ratio']:.3f}x the step without clipping")]
    for name in (PLAIN, CLIPPED):
        expected, stages = found["expected"][name], found["stages"][name]["stages_s"]
        rows.append(
            (
                f"  {name} clipping",
                f"{found[f'{name}_s']:.3f} s per step, predicted {expected['predicted_s']:.3f}, simulated "
                f"{expected['simulated_s']:.3f}; {', '.join(f'{stage} {stages[stage]:.3f}' for stage in STAGES)}",
            )
        )
    return rows


def _missed(cases: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"{found['case']}: {found['ratio']:.3f}x the step without clipping, at most {MOST_RATIO} allowed"
        for found in cases
        if found["ratio"] > MOST_RATIO
    ]


if __name__ == "__main__":
    main()
