"""The same model, tokens and recipe with lohan_fx and with the systems of ``shared/peers/peer_bench.py``.

    python benchmarks/peers.py [--cases 0,1] [--rounds 3] [--systems plain,zero_offload,zero_infinity] [--save]
    python benchmarks/peers.py --model-size tiny --batch 2 --seq 64 --host-memory 512MiB --systems plain --rounds 1
    python benchmarks/peers.py --device cuda [--save]

Rounds alternate over all systems, one process each. Before any speed is reported all losses must agree, step by step,
to ``TOLERANCE`` of the loss: systems round bf16 in other places (measured: docs/0016). Where ours may have as much memory as
a peer that keeps its states in RAM, the planner keeps them there too: each case tells what ours moved on NVMe.

Without options of a model it runs the cases below, whose limits are shares of the peak RSS that a peer had in the first
round; a case of one's own gets ``--host-memory``, or a third of the first peer's peak RSS. Beside a GPU ours may take as much of
its memory as that peer's tensors did at their peak. DeepSpeed may live with another Python: ``--peer-python``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_harness import DEFAULT_PATH, INSTALLING, Harness, Trained, last_line, loaded, merged
from peer_traffic import traffic
from report import arguments, at_least_one, device_argument, finish, name_on, own_folder, profile, with_saved
from workload import cases_argument, numbered

OURS = Path(__file__).with_name("peer_ours.py")
NAME = "lohan_fx"
TOLERANCE = 2e-3
"""Share of the loss by which two systems may differ at any step."""
PEER_STEPS, PEER_WARMUP = 5, 2


@dataclass(frozen=True)
class Model:
    """What to train; 0 is the harness' own number for ``size``."""

    size: str
    batch: int
    seq: int
    layers: int = 0
    hidden: int = 0

    def options(self) -> list[str]:
        """As the harness takes it."""
        found = ["--model-size", self.size, "--batch", str(self.batch), "--seq", str(self.seq)]
        found += ["--layers", str(self.layers)] if self.layers else []
        return found + (["--hidden", str(self.hidden)] if self.hidden else [])

    def __str__(self) -> str:
        changed = [f"{name} {value}" for name, value in (("layers", self.layers), ("hidden", self.hidden)) if value]
        return " ".join([self.size, *changed, f"{self.batch}x{self.seq}"])


@dataclass(frozen=True)
class Case:
    """``model`` with ``share`` of the peak RSS of ``of``, or with ``host_memory``; ``bars``: least ratio per peer."""

    model: Model
    share: float = 0.0
    of: str = ""
    host_memory: str = ""
    bars: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model}, {self.host_memory or f'{self.share:.2f} of the peak RSS of {self.of}'}"

    def gpu_bytes(self, runs: Mapping[str, Sequence[Trained]]) -> int:
        """What our tensors may take on the GPU; 0 on a CPU."""
        return runs[self.of][0].peak_gpu_bytes if self.of in runs else 0

    def limit_bytes(self, peaks: Mapping[str, int]) -> int:
        """What our whole process may have in RAM; 0 where ``host_memory`` says something else."""
        return 0 if self.host_memory else int(self.share * peaks[self.of])


COMPUTE_BOUND, TRAFFIC_BOUND = Model("350m", 4, 512), Model("350m", 1, 128)
CASES = (
    Case(COMPUTE_BOUND, 1 / 3, "plain", bars={"plain": 0.9, "zero_offload": 1.0, "zero_infinity": 1.0}),
    Case(COMPUTE_BOUND, 1.0, "plain", bars={"plain": 1.0}),
    Case(TRAFFIC_BOUND, 1 / 3, "zero_infinity", bars={"zero_infinity": 2.0}),
    Case(TRAFFIC_BOUND, 1.0, "zero_offload", bars={"zero_offload": 1.5}),
)
GPU_CASES = (
    Case(COMPUTE_BOUND, 1 / 3, "zero_infinity", bars={"zero_infinity": 2.0}),
    Case(COMPUTE_BOUND, 1.0, "zero_offload", bars={"zero_offload": 1.0}),
)
"""Beside a GPU traffic binds in all of them."""


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    environment = os.environ.get
    parser.add_argument("--harness", type=Path, default=Path(environment("LOHAN_FX_PEERS", str(DEFAULT_PATH))))
    parser.add_argument("--peer-python", default=environment("LOHAN_FX_PEER_PYTHON", sys.executable))
    parser.add_argument("--systems", default="plain,zero_offload,zero_infinity", help="the peers; lohan_fx always runs")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--steps", type=at_least_one, default=3, help="measured steps per process")
    cases_argument(parser)
    device_argument(parser)
    parser.add_argument("--model-size")
    for name in ("layers", "hidden", "batch", "seq"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--host-memory", help="what lohan_fx may grow by, such as 2GiB")
    args = parser.parse_args()
    own = (args.model_size, args.layers, args.hidden, args.batch, args.seq, args.host_memory)
    if args.cases and any(own):
        parser.error("--cases chooses among the cases there are; a model of one's own is another one")
    if not args.systems:
        parser.error("--systems is empty: name at least one peer, such as plain")
    return args


def chosen(args: argparse.Namespace, systems: Sequence[str]) -> list[Case]:
    """The cases to run with these peers; a limit that is a share of an absent one's RSS is one of the first instead."""
    if any((args.model_size, args.layers, args.hidden, args.batch, args.seq, args.host_memory)):
        model = Model(
            args.model_size or "350m", args.batch or 4, args.seq or 512, args.layers or 0, args.hidden or 0
        )  # fmt: skip
        return [Case(model, 1 / 3, systems[0], args.host_memory or "")]
    found = []
    for case in numbered(cases_of(args), args):
        here = case.of in systems
        found.append(case if here else Case(case.model, case.share, systems[0], bars=case.bars))
    return found


def cases_of(args: argparse.Namespace) -> Sequence[Case]:
    return CASES if args.device == "cpu" else GPU_CASES


class Rounds:
    """Runs everything, alternating; what each case's systems did, round by round."""

    def __init__(self, args: argparse.Namespace, harness: Harness, systems: Sequence[str], cases: Sequence[Case]):
        self._args, self._harness, self._systems = args, harness, systems
        self.peers: dict[Model, dict[str, list[Trained]]] = {c.model: {s: [] for s in systems} for c in cases}
        self.ours: list[list[dict[str, Any]]] = [[] for _ in cases]
        self._cases = cases

    def run(self, hw: Path) -> None:
        for number in range(self._args.rounds):
            for model, found in self.peers.items():
                for system, runs in found.items():
                    say(f"round {number + 1}: {model}, {system}")
                    steps = PEER_WARMUP + self._args.steps
                    runs.append(self._harness.train(system, model.options(), steps=steps, warmup=PEER_WARMUP))
                for index, case in enumerate(self._cases):
                    if case.model == model:
                        say(f"round {number + 1}: {case}, {NAME}")
                        self.ours[index].append(self._ours(index, case, hw))

    def _ours(self, index: int, case: Case, hw: Path) -> dict[str, Any]:
        """Later rounds obey the plan that the first one's steps have corrected."""
        peaks = {system: runs[0].peak_rss_bytes for system, runs in self.peers[case.model].items()}
        limit = case.limit_bytes(peaks)
        plan, store = hw.with_name(f"plan{index}.json"), hw.with_name(NAME)
        store.mkdir(exist_ok=True)
        command = [sys.executable, str(OURS), str(self._args.harness), "--hw", str(hw)]
        command += ["--nvme", str(store), "--steps", str(self._args.steps)]
        command += ["--peak-rss", str(limit)] if limit else ["--host-memory", case.host_memory]
        gpu = case.gpu_bytes(self.peers[case.model])
        command += ["--device-memory", str(gpu)] if gpu else []
        command += ["--plan" if plan.exists() else "--save-plan", str(plan), "--", *case.model.options()]
        return {**last_line(command, f"{NAME} ({case})"), "limit_bytes": limit}

    def results(self) -> Iterator[dict[str, Any]]:
        """Case by case: speeds, memory, losses and ratios. Exits where losses disagree, before it tells any speed."""
        for case, runs in zip(self._cases, self.ours, strict=True):
            peers = self.peers[case.model]
            tokens = case.model.batch * case.model.seq
            check_losses(
                str(case),
                {f"{name}, round {n + 1}": run.losses for name, found in peers.items() for n, run in enumerate(found)}
                | {f"{NAME}, round {n + 1}": run["losses"] for n, run in enumerate(runs)},
            )
            systems = {name: _figures(merged(found), tokens) for name, found in peers.items()}
            mine = [
                Trained(
                    run["s_per_step"],
                    run["peak_rss_bytes"],
                    tuple(run["losses"]),
                    tuple(run["seconds"]),
                    run["peak_gpu_bytes"],
                )
                for run in runs
            ]
            systems[NAME] = {**_figures(merged(mine), tokens), "rounds": runs}
            speed = systems[NAME]["tokens_per_s"]
            ratios = {name: speed / systems[name]["tokens_per_s"] for name in peers}
            yield {
                "case": str(case),
                "config": str(case),
                "systems": systems,
                "ratios": ratios,
                "missed": missed(case, systems, ratios),
                "not_judged": [f"{least} of {peer}" for peer, least in case.bars.items() if peer not in ratios],
            }


def _figures(run: Trained, tokens: int) -> dict[str, Any]:
    return {
        "s_per_step": run.s_per_step,
        "tokens_per_s": tokens / run.s_per_step,
        "peak_rss_bytes": run.peak_rss_bytes,
        "losses": list(run.losses),
        "seconds": list(run.seconds),
    } | ({"peak_gpu_bytes": run.peak_gpu_bytes} if run.peak_gpu_bytes else {})


def check_losses(case: str, losses: Mapping[str, Sequence[float]]) -> None:
    """Exit with the first step at which two of ``losses`` (by run) are further apart than ``TOLERANCE``."""
    for step in range(min(map(len, losses.values()))):
        at = {run: found[step] for run, found in losses.items()}
        numbers = all(map(math.isfinite, at.values()))
        if not numbers or max(at.values()) - min(at.values()) > TOLERANCE * max(at.values()):
            listed = "\n".join(f"    {loss:.5f} {run}" for run, loss in at.items())
            sys.exit(
                f"{case}: the losses of step {step} differ by more than {TOLERANCE:.2%}; no speed is told:\n{listed}"
            )


def missed(case: Case, systems: Mapping[str, Any], ratios: Mapping[str, float]) -> list[str]:
    """The bars of ``case`` that were not reached."""
    found = [
        f"{case}: {ratios[peer]:.2f}x {peer}, at least {least} wanted"
        for peer, least in case.bars.items()
        if peer in ratios and ratios[peer] < least
    ]
    peaks = {name: figures["peak_rss_bytes"] for name, figures in systems.items()}
    if case.bars and peaks[NAME] > (limit := case.limit_bytes(peaks)):
        found.append(f"{case}: peak RSS {peaks[NAME] / 1e9:.2f} GB, {limit / 1e9:.2f} allowed")
    return found


def rows(case: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield case["config"], ""
    for name, found in case["systems"].items():
        ratio = f", ours {case['ratios'][name]:.2f}x" if name in case["ratios"] else ""
        gpu = f" and {found['peak_gpu_bytes'] / 1e9:.2f} GB of the GPU" if "peak_gpu_bytes" in found else ""
        memory = f"{found['peak_rss_bytes'] / 1e9:.2f} GB{gpu}"
        yield f"  {name}", f"{found['s_per_step']:.2f} s/step, {found['tokens_per_s']:.0f} tokens/s, {memory}{ratio}"
    run = case["systems"][NAME]["rounds"][-1]
    stages = " + ".join(f"{seconds:.2f}" for seconds in run["stages_s"].values())
    yield "  forward + backward + step", f"{stages} s; predicted {run['predicted_s']:.2f} s"
    yield "  NVMe", traffic(run)
    if case.get("not_judged"):
        yield "  NOT JUDGED", ", ".join(case["not_judged"])


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    args = parsed()
    loaded(args.harness)
    with own_folder(args):
        harness = Harness(args.harness, args.peer_python, args.nvme, args.device)
        systems = harness.available(args.systems.split(","))
        if not systems:
            sys.exit(f"none of {args.systems} can run: {INSTALLING}")
        cases = chosen(args, systems)
        hw = args.nvme / "profile.toml"
        profile(args).save(hw)
        rounds = Rounds(args, harness, systems, cases)
        rounds.run(hw)
        absent = [name for name in args.systems.split(",") if name not in systems]
        results = [{**found, "rounds": args.rounds, "not_installed": absent} for found in rounds.results()]
    name = name_on(args.device, "peers")
    results = with_saved(name, results) if args.save else results
    finish(
        name,
        [row for case in results for row in rows(case)],
        {"cases": results, "of_cases": len(cases_of(args)), "tolerance": TOLERANCE},
        [bar for case in results for bar in case["missed"]],
        save=args.save,
    )


if __name__ == "__main__":
    main()
