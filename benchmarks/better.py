"""The searched plan against the others: its measured step is the best, or within 3% of the best.

    python benchmarks/better.py [--size demo6 --batch 4 --seq 128 --host-memory 700MiB --random 20] [--save]

Every candidate trains in a process of its own, in alternating rounds: the searched plan, all keep, all swap, all
recompute, every policy that this runtime runs, and ``--random`` random feasible plans (decisions for activations drawn
at random, where parameters and states are drawn too). What does not fit is listed as that. Bar: 1.03x the best.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from report import arguments, finish, profile
from workload import SIZES, Workload, streamed

import lohan_fx
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from lohan_fx.policies import ALL

MOST_RATIO = 1.03
WARM_UP = 2
SEARCHED = "lohan"


def candidates(count: int) -> list[str]:
    """The searched plan first, then every policy that runs, then random ones."""
    runnable = [found.name for found in ALL if found.runs and found.name != SEARCHED]
    return [SEARCHED, *runnable, *(f"random-{seed}" for seed in range(count))]


def drawn(plan: Plan, seed: int) -> Plan:
    """A random plan for the graph of ``plan``."""
    rng = random.Random(seed)
    weights = [rng.random() for _ in range(3)]
    choices: list[Decision] = [Keep(), Swap(Tier.NVME), Recompute()]
    decisions = {}
    for activation in plan.activations:
        decision = rng.choices(choices, weights)[0]
        decisions[activation.node] = Keep() if activation.mandatory and decision == Recompute() else decision
    home, states = rng.choice([(Tier.NVME, Tier.NVME), (Tier.DEVICE, Tier.NVME), (Tier.NVME, Tier.HOST)])
    return plan.with_decisions(decisions).with_homes(home, states)


def child(name: str, args: argparse.Namespace) -> None:
    """Train by one plan; prints its seconds, or why there are none."""
    hw, workload = HardwareProfile.load(args.hw), Workload(args.size, args.batch, args.seq)
    options: dict[str, Any] = {"host_memory": args.host_memory, "revise": False, "policy": name}
    try:
        if name.startswith("random-"):
            base = Plan.from_json(args.base.read_text())
            options |= {"policy": SEARCHED, "plan": drawn(base, int(name.removeprefix("random-")))}
        ours = streamed(workload, hw, args.nvme, **options)
    except InfeasiblePlan as error:
        print(json.dumps({"infeasible": str(error)}))
        return
    if name == SEARCHED:
        args.base.write_text(ours.plan.to_json())
    prediction = ours.plan.prediction
    assert prediction is not None
    seconds = []
    for number in range(WARM_UP + args.steps):
        start_s = time.perf_counter()
        ours.step()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start_s)
    lohan_fx.release(ours.model)
    print(json.dumps({"seconds": seconds, "predicted_s": prediction.step_s}))


def trained(name: str, args: argparse.Namespace, hw: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--hw", str(hw), "--nvme", str(args.nvme)]
    for option in ("size", "batch", "seq", "host_memory", "steps", "base"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, default="demo6")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--host-memory", default="700MiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--child", help="internal: the plan to train by")
    parser.add_argument("--base", type=Path, help="internal: where the searched plan is kept")
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
        return
    hw = profile(args)
    path, args.base = args.nvme / "profile.toml", args.nvme / "searched.json"
    hw.save(path)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in candidates(args.random)}
    for number in range(args.rounds):
        for name, runs in found.items():
            if not any("infeasible" in run for run in runs):
                print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
                runs.append(trained(name, args, path))
    path.unlink()
    args.base.unlink()
    _report(found, args)


def _report(found: dict[str, list[dict[str, Any]]], args: argparse.Namespace) -> None:
    feasible = {name: runs for name, runs in found.items() if not any("infeasible" in run for run in runs)}
    measured = {name: statistics.median(s for run in runs for s in run["seconds"]) for name, runs in feasible.items()}
    best = min(measured, key=lambda name: measured[name])
    ratio = measured[SEARCHED] / measured[best]
    rows = [
        (name, f"{seconds:.3f} s, predicted {statistics.median(run['predicted_s'] for run in feasible[name]):.3f}")
        for name, seconds in sorted(measured.items(), key=lambda item: item[1])
    ]
    rows += [(name, "does not fit") for name in found if name not in feasible]
    finish(
        "better",
        [*rows, (f"searched plan over the best ({best})", f"{ratio:.3f}x")],
        {
            "searched_s": measured[SEARCHED], "best_s": measured[best], "best": best, "ratio": ratio,
            "measured_s": measured, "infeasible": [name for name in found if name not in feasible],
            "size": args.size, "batch": args.batch, "seq": args.seq, "host_memory": args.host_memory,
        },
        [] if ratio <= MOST_RATIO else [f"{ratio:.3f}x the best plan ({best}), at most {MOST_RATIO} allowed"],
        save=args.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
