"""Predicted against measured: step seconds, bytes per tier and peak RSS, by the planner's formula and by the simulator.

    python benchmarks/prediction.py [--rounds 2 --steps 4] [--cases 0,3,5] [--save]

Each case is a process of its own: it compiles, predicts, and only then trains. Rounds alternate over all cases; the
median of all steps counts, the first two of each process (warming up) left out. The machine is measured again before
each, unless ``--hw`` names a profile: here rates drift by a third within minutes, and what is judged is the prediction
from known rates. How much slower or faster the same few ops were around the steps than around the capture, which
times the graph's, is shown beside each error ("drift") and changes none, and so is the share of the processor that the
hypervisor gave to others during the steps ("stolen"). Bars: step time within 10% in at least 10 of 12
cases and none beyond 20%; bytes exact; peak RSS within 5%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import workload
from report import arguments, finish, profile
from workload import chosen, memory_bytes, stolen_core_s, streamed

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.measure_contention import few_ops, runs_per_s

WITHIN, MOST, OF = 0.10, 0.20, 10 / 12
RSS_WITHIN = 0.05
WARM_UP = 2
PACE_S = 0.4
"""For seeing how fast the processor is now."""


@dataclass(frozen=True)
class Case(workload.Case):
    policy: str

    def __str__(self) -> str:
        return f"{self.size} {self.batch}x{self.seq} {self.policy} {self.host_memory}"


CASES = (
    Case("demo", 4, 128, "6GiB", "in-memory"),
    Case("demo", 4, 128, "1GiB", "lohan"),
    Case("demo", 8, 128, "1GiB", "lohan"),
    Case("demo", 4, 128, "1GiB", "swap-nvme"),
    Case("demo", 2, 128, "1GiB", "zero-infinity"),
    Case("demo", 4, 128, "1GiB", "recompute"),
    Case("gpt2", 2, 128, "1.5GiB", "lohan"),
    Case("gpt2", 4, 128, "2GiB", "keep"),
    Case("gpt2", 2, 256, "2GiB", "swap-host"),
    Case("350m", 1, 128, "2GiB", "lohan"),
    Case("350m", 2, 128, "2GiB", "fuyou"),
    Case("350m", 1, 256, "2GiB", "recompute"),
)


def child(case: Case, args: argparse.Namespace) -> None:
    """Compile, predict, train; prints its figures as one JSON line."""
    hw = profile(args)
    at_capture = [runs_per_s(few_ops(), PACE_S)]
    ours = streamed(case.workload, hw, args.nvme, host_memory=case.host_memory, policy=case.policy, revise=False)
    at_capture.append(runs_per_s(few_ops(), PACE_S))
    engine = compiled(ours.model).engine
    prediction, store = ours.plan.prediction, engine.store
    assert prediction is not None
    simulation = lohan_fx.simulate(ours.model)
    seconds = []
    monitor = lohan_fx.Monitor(ours.model)
    expected = monitor.expected_peak_rss_bytes()
    for _ in range(WARM_UP):
        ours.step()
    engine.before_reading()  # updates that run beside the next forward belong to the step before
    at_steps = [runs_per_s(few_ops(), PACE_S)]
    read, written = store.bytes_read, store.bytes_written
    monitor.step()
    lanes = []
    stolen_s, began_s = stolen_core_s(), time.perf_counter()
    for _ in range(args.steps):
        start_s = time.perf_counter()
        ours.step()
        seconds.append(time.perf_counter() - start_s)
        lanes.append(monitor.step().lanes_s)
    stolen = (stolen_core_s() - stolen_s) / (time.perf_counter() - began_s) / hw.cpu_cores
    report = monitor.memory()
    print(report, file=sys.stderr, flush=True)
    engine.before_reading()
    at_steps.append(runs_per_s(few_ops(), PACE_S))
    figures = {
        "drift": statistics.mean(at_capture) / statistics.mean(at_steps) - 1,
        "stolen": stolen,
        "predicted_s": prediction.step_s,
        "simulated_s": simulation.step_s,
        "seconds": seconds,
        "predicted_lanes_s": _lanes(prediction),
        "simulated_lanes_s": dict(simulation.busy_s),
        "lanes_s": {lane: statistics.median(step.get(lane, 0.0) for step in lanes) for lane in simulation.busy_s},
        "drive_bytes_per_s": [hw.ssd_read_bytes_per_s, hw.ssd_write_bytes_per_s, hw.ssd_mixed_bytes_per_s],
        "bytes": [(store.bytes_read - read) / args.steps, (store.bytes_written - written) / args.steps],
        "predicted_bytes": [prediction.nvme_read_bytes, prediction.nvme_write_bytes],
        "simulated_bytes": [simulation.nvme_read_bytes, simulation.nvme_write_bytes],
        "predicted_peak_rss_bytes": expected,
        "planned_peak_rss_bytes": monitor.other_rss_bytes + prediction.peak_bytes["host"],
        "peak_rss_bytes": memory_bytes("VmHWM"),
        "memory": asdict(report),
    }
    lohan_fx.release(ours.model)
    print(json.dumps(figures))


def _lanes(prediction: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for stage in (prediction.forward, prediction.backward, prediction.optimizer):
        for lane, seconds in stage.lanes_s.items():
            total[lane] = total.get(lane, 0.0) + seconds
    return total


def measured(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(vars(case)), "--steps", str(args.steps)]
    command += ["--nvme", str(args.nvme), *(["--hw", str(args.hw)] if args.hw else [])]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def judged(case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One case over all rounds: medians, and how far the predictions are off."""
    took_s = statistics.median(seconds for found in rounds for seconds in found["seconds"])
    row = {
        "case": str(case),
        **vars(case),
        "predicted_s": statistics.median(found["predicted_s"] for found in rounds),
        "simulated_s": statistics.median(found["simulated_s"] for found in rounds),
        "measured_s": took_s,
        "planned_peak_rss_bytes": statistics.median(found["planned_peak_rss_bytes"] for found in rounds),
        "predicted_peak_rss_bytes": statistics.median(found["predicted_peak_rss_bytes"] for found in rounds),
        "peak_rss_bytes": statistics.median(found["peak_rss_bytes"] for found in rounds),
        "bytes_exact": all(found["bytes"] == found["predicted_bytes"] for found in rounds),
        "drift": statistics.median(found["drift"] for found in rounds),
        "stolen": statistics.median(found["stolen"] for found in rounds),
        "rounds": rounds,
    }
    row["error"] = row["predicted_s"] / took_s - 1
    row["simulated_error"] = row["simulated_s"] / took_s - 1
    row["rss_error"] = row["predicted_peak_rss_bytes"] / row["peak_rss_bytes"] - 1
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--cases", help="only these, by number, such as 0,3")
    parser.add_argument("--child", help="internal: the measured process")
    args = parser.parse_args()
    if args.child:
        child(Case(**json.loads(args.child)), args)
        return
    found: dict[Case, list[dict[str, Any]]] = {case: [] for case in chosen(CASES, args.cases)}
    for number in range(args.rounds):
        for case in found:
            print(f"round {number + 1}: {case}", file=sys.stderr, flush=True)
            found[case].append(measured(case, args))
    cases = [judged(case, rounds) for case, rounds in found.items()]
    finish("prediction", [_row(case) for case in cases], {"cases": cases}, _missed(cases), save=args.save)


def _row(case: dict[str, Any]) -> tuple[str, str]:
    return case["case"], (
        f"{case['measured_s']:.2f} s; formula {case['predicted_s']:.2f} ({case['error']:+.0%}), simulated "
        f"{case['simulated_s']:.2f} ({case['simulated_error']:+.0%}), drift {case['drift']:+.0%}, stolen "
        f"{case['stolen']:.0%}; "
        f"RSS {case['peak_rss_bytes'] / 1e9:.2f} GB ({case['rss_error']:+.0%}); "
        f"bytes {'exact' if case['bytes_exact'] else 'DIFFER'}"
    )


def _missed(cases: list[dict[str, Any]]) -> list[str]:
    missed = [f"{c['case']}: step time off by {c['error']:+.0%}" for c in cases if abs(c["error"]) > MOST]
    close = sum(abs(case["error"]) <= WITHIN for case in cases)
    if close < OF * len(cases):
        missed.append(f"step time within {WITHIN:.0%} in {close} of {len(cases)} cases")
    missed += [f"{c['case']}: bytes differ" for c in cases if not c["bytes_exact"]]
    missed += [f"{c['case']}: peak RSS off by {c['rss_error']:+.0%}" for c in cases if abs(c["rss_error"]) > RSS_WITHIN]
    return missed


if __name__ == "__main__":
    main()
