"""Predicted against measured: step seconds, bytes per tier and peak RSS, by the planner's formula and by the simulator.

    python benchmarks/prediction.py [--rounds 3 --passes 1 --steps 4] [--cases 0,3,5] [--device cuda] [--save]

Each case is a process of its own: it compiles, predicts, and only then trains. On a machine whose rates drift by a third
within minutes, what is judged is the prediction from known rates: a process measures the machine and the ops of its graphs
(unless ``--hw`` names a profile), predicts what its plan will take, and then trains; with ``--passes`` it does so again, and a
prediction and its steps are seconds apart. ``--rounds`` takes turns over all cases, which costs another capture of each and is
worth it: processes differ by more than passes of one do (docs/0041). Medians over all passes and rounds count, without the steps
that warm up. How much slower or faster the same few ops were after the steps than before is shown beside each error ("drift") and
changes none, and so is the share of the processor that the hypervisor gave to others during the steps ("stolen").

Bytes are those of NVMe, read and written, in whole pages, and those that the lanes h2d and d2h copied, all as the runtime
counts them. On a CPU, where all cases run, these two copy within memory: all that is swapped on its way out (d2h), and what
comes back from host memory (h2d). What comes from a drive is read to where it belongs, and gradients are updated where
they are.

Bars: step time within 10% in at least 10 of 12 cases, or as large a share of however many there are, and none beyond 20%; all
bytes exact, by the formula and by the simulator; peak RSS within 5%.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import workload
from report import arguments, at_least_one, device_argument, finish, name_on, own_folder, profile, with_saved
from workload import Streamed, case_arguments, chosen, memory_bytes, stolen_core_s, streamed

import lohan_fx
from lohan_fx import cost
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile
from lohan_fx.measuring import op_times
from lohan_fx.measuring.measure_contention import few_ops, runs_per_s
from lohan_fx.passes.traffic import padding_bytes
from lohan_fx.planning.budgets import mean_request_bytes
from lohan_fx.planning.predict import predict, work_of
from lohan_fx.request import Request

WITHIN, MOST, OF = 0.10, 0.20, 10 / 12
RSS_WITHIN = 0.05
WARM_UP = 2
PACE_S = 0.4
"""For seeing how fast the processor is now."""


@dataclass(frozen=True)
class Case(workload.Case):
    policy: str
    device_memory: str | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        gpu = f" and {self.device_memory} of a GPU" if self.device_memory else ""
        return f"{self.size} {self.batch}x{self.seq} {self.policy} {self.host_memory}{gpu}{self._unusual_dtype}"


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
    Case("dit-77m", 4, 256, "768MiB", "lohan"),
)
GPU_CASES = (
    Case("gpt2", 8, 512, "1GiB", "lohan", device_memory="3GiB"),
    Case("gpt2", 8, 512, "1GiB", "swap-nvme", device_memory="3GiB"),
    Case("gpt2", 8, 512, "4GiB", "lohan", device_memory="3GiB"),
    Case("gpt2", 8, 512, "1GiB", "zero-infinity", device_memory="3GiB"),
    Case("350m", 4, 512, "2GiB", "lohan", device_memory="2GiB"),
    Case("350m", 16, 512, "2GiB", "fuyou", device_memory="3GiB"),
    Case("350m", 4, 512, "12GiB", "lohan", device_memory="3GiB"),
)
LINKS = ("h2d", "d2h")
"""The lanes that copy between memories."""


def child(case: Case, args: argparse.Namespace) -> None:
    """Compile; predict and train, ``--passes`` times; prints the figures as one JSON line."""
    ours = streamed(
        case.workload,
        profile(args),
        args.nvme,
        host_memory=case.host_memory,
        device_memory=case.device_memory,
        policy=case.policy,
        revise=False,
    )
    monitor = lohan_fx.Monitor(ours.model)
    expected, passes = monitor.expected_peak_rss_bytes(), []
    for number in range(args.passes):
        hw = compiled(ours.model).request().hw
        if number:  # the peak is that of the first pass: measuring takes memory, too
            hw = profile(args).at_requests(mean_request_bytes(ours.plan.parameters, ours.plan.windows))
            time_again(ours.model)
        found = one_pass(ours, monitor, hw, args.steps, WARM_UP if number == 0 else 1)
        if number == 0:
            report, peak = monitor.memory(), memory_bytes("VmHWM")
        passes.append(found | {"drift": found["pace"] / pace(ours.model) - 1})
    print(report, file=sys.stderr, flush=True)
    planned = ours.plan.prediction
    assert planned is not None
    figures = {
        "passes": passes,
        "predicted_peak_rss_bytes": expected,
        "planned_peak_rss_bytes": monitor.other_rss_bytes + planned.peak_bytes["host"],
        "peak_rss_bytes": peak,
        "memory": asdict(report),
    }
    lohan_fx.release(ours.model)
    print(json.dumps(figures))


def time_again(model: torch.nn.Module) -> None:
    """Measure the seconds of the ops of its graphs anew, as capture does."""
    found = compiled(model)
    op_times.forget()
    for _, gm in found.halves[-1].graphs():
        op_times.time_ops(gm, found.engine.device)


def one_pass(
    ours: Streamed, monitor: lohan_fx.Monitor, hw: HardwareProfile, steps: int, warm_up: int
) -> dict[str, Any]:
    """What is predicted by rates known now, and what the next steps take."""
    found = compiled(ours.model)
    planned = found.halves[-1], found.plans[-1], request_by(ours.model, hw)
    prediction, work = predict(*planned), work_of(*planned)
    simulation = lohan_fx.simulate(ours.model, hw=hw)
    store, engine, seconds, lanes = found.engine.store, found.engine, [], []
    at_prediction = pace(ours.model)
    for _ in range(warm_up):
        ours.step()
    engine.before_reading()  # updates that run beside the next forward belong to the step before
    read, written, copied = store.bytes_read, store.bytes_written, engine.timeline.snapshot()
    monitor.step()
    stolen_s, began_s = stolen_core_s(), time.perf_counter()
    for _ in range(steps):
        start_s = time.perf_counter()
        ours.step()
        seconds.append(time.perf_counter() - start_s)
        lanes.append(monitor.step().lanes_s)
    stolen = (stolen_core_s() - stolen_s) / (time.perf_counter() - began_s) / hw.cpu_cores
    engine.before_reading()
    copied = engine.timeline.snapshot().since(copied)
    return {
        "pace": at_prediction,
        "stolen": stolen,
        "predicted_s": prediction.step_s,
        "simulated_s": simulation.step_s,
        "seconds": seconds,
        "predicted_lanes_s": prediction.lanes_s,
        "simulated_lanes_s": dict(simulation.busy_s),
        "lanes_s": {lane: statistics.median(step.get(lane, 0.0) for step in lanes) for lane in simulation.busy_s},
        "lost_s": {"per_request": hw.io_core_s_per_request, "per_byte": hw.io_core_s_per_byte},
        "drive_bytes_per_s": [hw.ssd_read_bytes_per_s, hw.ssd_write_bytes_per_s, hw.ssd_mixed_bytes_per_s],
        "bytes": [(store.bytes_read - read) / steps, (store.bytes_written - written) / steps],
        "predicted_bytes": [prediction.nvme_read_bytes, prediction.nvme_write_bytes],
        "simulated_bytes": [simulation.nvme_read_bytes, simulation.nvme_write_bytes],
        "padding_bytes": list(padding_bytes(*planned[:2])),
        "link_bytes": [copied.bytes.get(lane, 0) / steps for lane in LINKS],
        "predicted_link_bytes": link_bytes(work, hw),
        "simulated_link_bytes": [simulation.bytes[lane] for lane in LINKS],
    }


def pace(model: torch.nn.Module) -> float:
    """How many times a second a few ops run now. Their weights, 57 MB, are gone afterwards: they are not the training's."""
    return runs_per_s(few_ops(getattr(torch, compiled(model).request().compute_dtype)), PACE_S)


def request_by(model: torch.nn.Module, hw: HardwareProfile) -> Request:
    """What the last graph of ``model`` was planned for, by the rates of ``hw``."""
    found = compiled(model)
    request = found.request(before=len(found.halves) - 1)
    return dataclasses.replace(request, hw=hw, matmul_rate=hw.matmul_rate(getattr(torch, request.compute_dtype)))


def link_bytes(work: cost.Work, hw: HardwareProfile) -> list[float]:
    """What the formula counts for each of ``LINKS``, over both stages."""
    found = cost.values(work, hw)
    fetched = found["fetched_forward_bytes"] + found["fetched_backward_bytes"]
    return [fetched + found["swapped_bytes"], found["gradient_bytes"] + found["swapped_bytes"]]


def measured(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", json.dumps(vars(case))]
    command += ["--steps", str(args.steps), "--passes", str(args.passes)]
    command += ["--nvme", str(args.nvme), "--device", args.device, *(["--hw", str(args.hw)] if args.hw else [])]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def judged(case: Case, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """One case over all rounds: medians, and how far the predictions are off."""
    passes = [one for found in rounds for one in found["passes"]]
    took_s = statistics.median(seconds for one in passes for seconds in one["seconds"])
    row = {"case": str(case), **vars(case), "measured_s": took_s}
    row |= {
        key: statistics.median(one[key] for one in passes) for key in ("predicted_s", "simulated_s", "drift", "stolen")
    }
    kinds = ("planned_peak_rss_bytes", "predicted_peak_rss_bytes", "peak_rss_bytes")
    row |= {key: statistics.median(found[key] for found in rounds) for key in kinds}
    row["bytes_differ"] = sorted({name for one in passes for name in differing(one)})
    row["bytes_exact"] = not row["bytes_differ"]
    row["rounds"] = rounds
    row["error"] = row["predicted_s"] / took_s - 1
    row["simulated_error"] = row["simulated_s"] / took_s - 1
    row["rss_error"] = row["predicted_peak_rss_bytes"] / row["peak_rss_bytes"] - 1
    return row


def differing(one: dict[str, Any]) -> list[str]:
    """Which bytes of a pass are not those that were foretold. The simulator's do not count that drives move whole pages."""
    simulated = [nbytes + more for nbytes, more in zip(one["simulated_bytes"], one["padding_bytes"], strict=True)]
    foretold = {
        "NVMe by formula": ("bytes", one["predicted_bytes"]),
        "NVMe by simulator": ("bytes", simulated),
        "copies by formula": ("link_bytes", one["predicted_link_bytes"]),
        "copies by simulator": ("link_bytes", one["simulated_link_bytes"]),
    }
    return [name for name, (moved, nbytes) in foretold.items() if one[moved] != nbytes]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument(
        "--passes", type=at_least_one, default=1, help="per process: measure the machine, predict, train"
    )
    parser.add_argument("--steps", type=at_least_one, default=4, help="measured ones of a pass")
    case_arguments(parser)
    device_argument(parser)
    parser.add_argument("--child", help="internal: the measured process")
    args = parser.parse_args()
    if args.child:
        child(Case(**json.loads(args.child)), args)
        return
    cases_here = CASES if args.device == "cpu" else GPU_CASES
    found: dict[Case, list[dict[str, Any]]] = {case: [] for case in chosen(cases_here, args)}
    with own_folder(args):
        for number in range(args.rounds):
            for case in found:
                print(f"round {number + 1}: {case}", file=sys.stderr, flush=True)
                found[case].append(measured(case, args))
    cases = [judged(case, rounds) for case, rounds in found.items()]
    name = name_on(args.device, "prediction")
    cases = with_saved(name, cases) if args.save else cases
    figures = {"cases": cases, "of_cases": len(cases_here)}
    finish(name, [_row(case) for case in cases], figures, _missed(cases), save=args.save)


def _row(case: dict[str, Any]) -> tuple[str, str]:
    return case["case"], (
        f"{case['measured_s']:.2f} s; formula {case['predicted_s']:.2f} ({case['error']:+.0%}), simulated "
        f"{case['simulated_s']:.2f} ({case['simulated_error']:+.0%}), drift {case['drift']:+.0%}, stolen "
        f"{case['stolen']:.0%}; "
        f"RSS {case['peak_rss_bytes'] / 1e9:.2f} GB ({case['rss_error']:+.0%}); "
        f"bytes {'exact' if case['bytes_exact'] else f'DIFFER: {_differ(case)}'}"
    )


def _differ(case: dict[str, Any]) -> str:
    """Earlier results had only the formula's for NVMe."""
    return ", ".join(case.get("bytes_differ", ["NVMe by formula"]))


def _missed(cases: list[dict[str, Any]]) -> list[str]:
    missed = [f"{c['case']}: step time off by {c['error']:+.0%}" for c in cases if abs(c["error"]) > MOST]
    close = sum(abs(case["error"]) <= WITHIN for case in cases)
    if close < OF * len(cases):
        missed.append(f"step time within {WITHIN:.0%} in {close} of {len(cases)} cases")
    missed += [f"{c['case']}: bytes differ: {_differ(c)}" for c in cases if not c["bytes_exact"]]
    missed += [f"{c['case']}: peak RSS off by {c['rss_error']:+.0%}" for c in cases if abs(c["rss_error"]) > RSS_WITHIN]
    return missed


if __name__ == "__main__":
    main()
