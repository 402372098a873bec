"""The searched plan against the others: its measured step is the best, or within 3% of the best.

    python benchmarks/better.py [--cases 1,6 --random 20 --rounds 1] [--save]

The models, batches and limits are those of ``prediction.py``, by number. The candidates, one after the other in one process
and so without importing and timing ops anew: the searched plan, all keep, all swap, all recompute, every policy that this
runtime runs, and ``--random`` random feasible plans (what is done with each activation, and which parameters and states
stay in memory, drawn at random; of what stays only a half, again and again, until it fits). What does not fit is listed as that.
A candidate one of whose steps takes ``FAR_BEHIND`` times what the searched plan's step of the same number took is given up
there: first steps are slower, by any plan. One whose fastest step is beyond ``GIVEN_UP`` times the searched plan's gets no more
rounds. What decides as the search did (where everything fits, several policies do) is the same plan and no rival; it is named.
Of forty equally good ones chance makes one the fastest; so the three fastest others and the searched plan meet again,
in ``--finals`` alternating rounds of processes of their own, and these alone decide. Bar: 1.03x the best. With ``--save``
the cases that an earlier run saved, and this one did not compare, stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import workload
from prediction import CASES, Case
from report import arguments, at_least_one, finish, own_folder, profile, with_saved
from turns import Ended, Process, answer_each
from workload import Streamed, case_arguments, chosen, streamed

from lohan_fx.compile import compiled as compiled_model
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from lohan_fx.planning.memory_model import lowest_tier
from lohan_fx.policies import ALL

MOST_RATIO = 1.03
GIVEN_UP = 1.15
FAR_BEHIND = 1.5
WARM_UP = 2
SEARCHED = "lohan"
RANDOM = "random-"
MOST_HALVINGS = 8
FINALISTS = 3


def candidates(count: int, only: str | None) -> list[str]:
    """The searched plan first, then every policy that runs, then random ones; of these ``only`` some. Raises ``ValueError``
    for one that is not among them."""
    runnable = [found.name for found in ALL if found.runs and found.name != SEARCHED]
    others = [*runnable, *(f"{RANDOM}{seed}" for seed in range(count))]
    wanted = only.split(",") if only else others
    if unknown := [name for name in wanted if name not in others]:
        raise ValueError(f"--only names {', '.join(unknown)}: expected some of {', '.join(others)}")
    return [SEARCHED, *wanted]


def drawn(plan: Plan, seed: int, share: float) -> Plan:
    """A random plan for the graph of ``plan``, of which so large a ``share`` stays in memory of what is drawn to."""
    rng = random.Random(seed)
    weights = [rng.random() * share, rng.random(), rng.random()]
    parameters_stay, states_stay = rng.random() * share, rng.random() * share
    choices: list[Decision] = [Keep(), Swap(Tier.NVME), Recompute()]
    decisions = {}
    for activation in plan.activations:
        decision = rng.choices(choices, weights)[0]
        decisions[activation.node] = Swap(Tier.NVME) if activation.mandatory and decision == Recompute() else decision
    homeless = plan.with_decisions(decisions).with_homes(Tier.NVME, Tier.NVME)
    parameters = tuple(
        dataclasses.replace(
            p,
            home=Tier.DEVICE if rng.random() < parameters_stay else Tier.NVME,
            states_home=(Tier.HOST if rng.random() < states_stay else Tier.NVME) if p.trainable else None,
        )
        for p in homeless.parameters
    )
    return dataclasses.replace(homeless, parameters=parameters)


def compiled(name: str, case: Case, args: argparse.Namespace) -> Streamed:
    """``case`` by that candidate's plan. Raises ``InfeasiblePlan``."""
    hw = HardwareProfile.load(args.hw)
    options: dict[str, Any] = {"host_memory": case.host_memory, "revise": False}
    if not name.startswith(RANDOM):
        return streamed(case.workload, hw, args.nvme, policy=name, **options)
    base = Plan.from_json(args.base.read_text())
    for halvings in range(MOST_HALVINGS):
        plan = drawn(base, int(name.removeprefix(RANDOM)), 0.5**halvings)
        try:
            return streamed(case.workload, hw, args.nvme, policy=SEARCHED, plan=plan, **options)
        except InfeasiblePlan as error:
            found = error
    raise found


def same(plan: Plan, other: Plan) -> bool:
    """Whether a step does the same by both: they decide alike, and their windows are alike or nothing passes through them."""
    if (plan.activations, plan.parameters) != (other.activations, other.parameters):
        return False
    swaps = any(isinstance(a.decision, Swap) for a in plan.activations)
    moves = swaps or lowest_tier(plan) is Tier.NVME or any(p.gradient_home is not None for p in plan.parameters)
    return not moves or plan.windows == other.windows


def trained(name: str, rival_s: Sequence[float], args: argparse.Namespace) -> dict[str, Any]:
    """In the measured process: the seconds of the steps by one plan, or why there are none; it is given up at a step that
    takes ``FAR_BEHIND`` times the one of ``rival_s``."""
    try:
        ours = compiled(name, Case(**json.loads(args.child)), args)
    except InfeasiblePlan as error:
        return {"infeasible": str(error)}
    if name == SEARCHED:
        args.base.write_text(ours.plan.to_json())
    elif same(ours.plan, Plan.from_json(args.base.read_text())):
        compiled_model(ours.model).abandon()
        return {"same": True}
    prediction = ours.plan.prediction
    assert prediction is not None
    steps_s: list[float] = []
    for number in range(WARM_UP + args.steps):
        start_s = time.perf_counter()
        ours.step()
        steps_s.append(time.perf_counter() - start_s)
        # The first one of a process also starts threads.
        if number and rival_s and steps_s[number] > FAR_BEHIND * rival_s[number]:
            break
    ours.drain()
    compiled_model(ours.model).abandon()  # nobody reads what it has learned
    found: dict[str, Any] = {"steps_s": steps_s, "predicted_s": prediction.step_s}
    if len(steps_s) < WARM_UP + args.steps:
        return {**found, "given_up": steps_s[-1] / rival_s[len(steps_s) - 1]}
    return {**found, "seconds": steps_s[WARM_UP:]}


def serve(args: argparse.Namespace) -> None:
    """In the measured process: train by one plan after the other, each in the memory that the last has given back."""

    def answer(line: str) -> dict[str, Any]:
        asked = json.loads(line)
        found = trained(asked["name"], asked["rival_s"], args)
        gc.collect()
        return found

    answer_each(answer)


class Trainer:
    """Has one case trained in a process, until that fails; the next run then gets another."""

    def __init__(self, case: Case, args: argparse.Namespace) -> None:
        self._command = [__file__, "--child", json.dumps(vars(case))]
        for option in ("hw", "nvme", "steps", "base"):
            self._command += [f"--{option}", str(getattr(args, option))]
        self._process: Process | None = None

    def run(self, name: str, rival_s: Sequence[float]) -> dict[str, Any]:
        self._process = self._process or Process(self._command)
        try:
            found: dict[str, Any] = self._process.ask(json.dumps({"name": name, "rival_s": rival_s}))
        except Ended as error:
            self._process = None
            return {"infeasible": str(error), "failed": True}
        return found

    def end(self) -> None:
        if self._process is not None:
            self._process.end()


def compared(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """All candidates of one case in alternating rounds, and then the finalists."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in candidates(args.random, args.only)}
    trainer = Trainer(case, args)
    for number in range(args.rounds):
        for name, runs in found.items():
            lost = _fastest(runs) > GIVEN_UP * _fastest(found[SEARCHED]) if runs else False
            if not lost and all("seconds" in run for run in runs):
                rival_s = [] if name == SEARCHED else found[SEARCHED][0]["steps_s"]
                runs.append(_told(f"round {number + 1}", name, case, trainer, rival_s))
    trainer.end()
    measured = _medians(found)
    others = sorted((name for name in measured if name != SEARCHED), key=lambda name: measured[name])[:FINALISTS]
    finals: dict[str, list[dict[str, Any]]] = {name: [] for name in (SEARCHED, *others)}
    for number in range(args.finals):
        for name in list(finals)[:: -1 if number % 2 else 1]:  # who comes first is not always the same
            trainer = Trainer(case, args)
            finals[name].append(_told(f"finals {number + 1}", name, case, trainer, ()))
            trainer.end()
    return {**_judged(case, found, finals), "steps": args.steps, "finals": args.finals}


def _told(label: str, name: str, case: Case, trainer: Trainer, rival_s: Sequence[float]) -> dict[str, Any]:
    found = trainer.run(name, rival_s)
    given_up = " given up" if "given_up" in found else ""
    what = "the searched plan" if "same" in found else found.get("steps_s", found.get("infeasible"))
    print(
        f"{label}, {case}: {name}: {what}{given_up}",
        file=sys.stderr,
        flush=True,
    )
    return found


def _medians(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Of what fits and was not given up: the median step."""
    return {
        name: statistics.median(s for run in runs for s in run["seconds"])
        for name, runs in found.items()
        if runs and all("seconds" in run for run in runs)
    }


def _fastest(runs: list[dict[str, Any]]) -> float:
    return min((seconds for run in runs for seconds in run.get("seconds", ())), default=float("inf"))


def _judged(
    case: Case, found: dict[str, list[dict[str, Any]]], finals: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    measured, decided = _medians(found), _medians(finals) or _medians(found)
    best = min(decided, key=lambda name: decided[name])
    return {
        "case": workload.Case.__str__(case),
        "searched_s": decided[SEARCHED], "best_s": decided[best], "best": best,
        "ratio": decided[SEARCHED] / decided[best], "finals_s": decided, "measured_s": measured,
        "predicted_s": {name: runs[0]["predicted_s"] for name, runs in found.items() if "predicted_s" in runs[0]},
        "given_up": {name: runs[-1]["given_up"] for name, runs in found.items() if "given_up" in runs[-1]},
        "infeasible": [name for name, runs in found.items() if any("infeasible" in run for run in runs)],
        "failed": [name for name, runs in found.items() if any(run.get("failed") for run in runs)],
        "same": [name for name, runs in found.items() if "same" in runs[0]],
        "random": sum(name.startswith(RANDOM) and "predicted_s" in runs[0] for name, runs in found.items()),
    }  # fmt: skip


def distinct(cases: Sequence[Case]) -> list[Case]:
    """Those that differ by their policy only once."""
    return list(dict.fromkeys(dataclasses.replace(case, policy=SEARCHED) for case in cases))


def main() -> None:
    parser = arguments(__doc__ or "")
    case_arguments(parser)
    parser.add_argument("--steps", type=at_least_one, default=3)
    parser.add_argument("--rounds", type=at_least_one, default=1)
    parser.add_argument("--finals", type=int, default=3)
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--only", help="of the others only these, such as keep,random-3")
    parser.add_argument("--child", help="internal: what to train")
    parser.add_argument("--base", type=Path, help="internal: where the searched plan is kept")
    args = parser.parse_args()
    if args.child:
        serve(args)
        return
    try:
        candidates(args.random, args.only)
    except ValueError as error:
        parser.error(str(error))
    asked = distinct(chosen(CASES, args))
    with own_folder(args):
        hw = profile(args)
        args.hw, args.base = args.nvme / "profile.toml", args.nvme / "searched.json"
        hw.save(args.hw)
        cases = [compared(case, args) for case in asked]
    cases = with_saved("better", cases) if args.save else cases
    missed = [
        f"{case['case']}: {case['ratio']:.3f}x the best plan ({case['best']}), at most {MOST_RATIO} allowed"
        for case in cases
        if case["ratio"] > MOST_RATIO
    ]
    missed += [f"{case['case']}: {name} failed" for case in cases for name in case["failed"]]
    rows = [row for case in cases for row in _rows(case)]
    figures = {"ratio": max(c["ratio"] for c in cases), "cases": cases, "of_cases": len(distinct(CASES))}
    finish("better", rows, figures, missed, save=args.save)


def _rows(case: dict[str, Any]) -> list[tuple[str, str]]:
    ranked = sorted(case["measured_s"].items(), key=lambda item: item[1])
    rows = [(f"  {name}", f"{took_s:.3f} s, predicted {case['predicted_s'][name]:.3f}") for name, took_s in ranked]
    head = (
        case["case"],
        f"searched over the best ({case['best']}): {case['ratio']:.3f}x; {case['random']} random plans",
    )
    rows += [
        (
            f"  {name}",
            f"given up at a step {ratio:.2f}x the searched plan's, predicted {case['predicted_s'][name]:.3f} s",
        )
        for name, ratio in sorted(case.get("given_up", {}).items(), key=lambda item: item[1])
    ]
    rows += [(f"  finals: {name}", f"{took_s:.3f} s") for name, took_s in case["finals_s"].items()]
    if case.get("same"):
        rows.append(("  the searched plan", ", ".join(case["same"])))
    return [head, *rows, ("  do not fit", ", ".join(case["infeasible"]) or "none")]


if __name__ == "__main__":
    main()
