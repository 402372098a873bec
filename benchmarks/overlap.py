"""Overlap: each lane's work alone, one lane after the other, and all of them overlapped, in one run.

    python benchmarks/overlap.py [--cases 0,1,2 --rounds 5] [--save]

Alone means the same work: the compute lane runs the same rewritten graphs and the same updates with parameters and
states at home in memory; the ssd lane repeats the very reads and writes of one step (same sizes, offsets, threads)
without anybody waiting for them; the copies are repeated in the pieces in which they came. On a CPU the model and
Adam share the cores and are one lane. Where the gap is: per stage, what compute was busy for, alone and overlapped, and
what it waited for. What is overlapped and what is alone are processes of their own, because a model's promise is about
its whole process; they take turns, and the one whose turn it is not sleeps. Bar: overlapped <= 1.10x the busiest lane
(medians of alternating rounds).

Where fio is installed, each round also times compute alone while fio moves as many bytes a second as the overlapped step did,
in as large requests, all the time: what a drive costs compute without our runtime. A figure to compare with, not another bar.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fio_beside import Traffic, fio_beside, installed, lay_out
from report import arguments, at_least_one, finish, own_folder, profile, with_saved
from turns import Process, serve
from workload import Case, Streamed, Workload, case_arguments, chosen, streamed

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.plan import Tier
from lohan_fx.planning.self_check import STAGES, StepCheck
from lohan_fx.runtime.host_pool import HostPool, Reservation
from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.nvme_store import SSD_THREADS
from lohan_fx.runtime.timeline import Event

MOST_RATIO = 1.10
AMPLE_BYTES = 1 << 40
OVERLAPPED, COMPUTE, BESIDE_FIO = "overlapped", "compute+cpu", "beside fio"


CASES = (Case("demo", 4, 128, "1GiB"), Case("350m", 4, 512, "2.5GiB"), Case("350m", 1, 128, "2.5GiB"))

Request = tuple[str, str, int, int]
"""(read or write, extent, offset, bytes)."""


def trace_step(ours: Streamed) -> tuple[list[Request], list[Event]]:
    """One step's requests to the store and its events on all lanes."""
    engine = compiled(ours.model).engine
    requests: list[Request] = []
    store = engine.store
    originals: dict[str, Callable[..., Any]] = {"read": store.read_uncompared, "write": store.write}

    def spy(kind: str) -> Callable[..., Any]:
        def call(name: str, offset: int, buffer: torch.Tensor, nbytes: int, *more: Any, **at: int) -> Any:
            requests.append((kind, name, offset, nbytes))
            return originals[kind](name, offset, buffer, nbytes, *more, **at)

        return call

    store.read_uncompared, store.write = spy("read"), spy("write")  # type: ignore[method-assign]
    engine.timeline.start_recording()
    try:
        ours.step()
    finally:
        events = engine.timeline.stop_recording()
        store.read_uncompared, store.write = originals["read"], originals["write"]  # type: ignore[method-assign]
    return requests, events


class Replay:
    """The ssd lane's work alone: the requests of a step, on extents of their own, by as many threads."""

    def __init__(self, ours: Streamed, requests: list[Request], threads: int) -> None:
        self._store = compiled(ours.model).engine.store
        self._requests = [(kind, f"replay:{name}", offset, nbytes) for kind, name, offset, nbytes in requests]
        self._threads = threads
        self._most_bytes = max(nbytes for *_, nbytes in requests)
        sizes: dict[str, int] = {}
        for _, name, offset, nbytes in self._requests:
            sizes[name] = max(sizes.get(name, 0), offset + nbytes)
        self._store.allocate(sizes)
        with HostPool({"replay": Reservation(1, self._most_bytes)}) as pool, pool.acquire("replay") as buffer:
            for _, name, offset, nbytes in self._requests:
                self._store.write(name, offset, buffer.tensor, nbytes)

    def run(self) -> None:
        reservation = {"replay": Reservation(self._threads, self._most_bytes)}
        with HostPool(reservation) as pool, Lane("replay", threads=self._threads) as lane:

            def one(kind: str, name: str, offset: int, nbytes: int) -> None:
                with pool.acquire("replay") as buffer:
                    (self._store.read if kind == "read" else self._store.write)(name, offset, buffer.tensor, nbytes)

            works = [lane.submit(functools.partial(one, *request)) for request in self._requests]
            for work in works:
                work.wait()


def replay_copies(events: list[Event], lane: str) -> Callable[[], None]:
    """The copies of ``lane`` alone, in the pieces in which they came."""
    sizes = [event.bytes for event in events if event.lane == lane and event.bytes]
    source = torch.ones(max(sizes, default=1), dtype=torch.uint8)
    target = torch.zeros_like(source)

    def run() -> None:
        for nbytes in sizes:
            target[:nbytes].copy_(source[:nbytes])

    return run


def compute_alone(workload: Workload, hw: lohan_fx.HardwareProfile, plan: lohan_fx.Plan, nvme: Path) -> Streamed:
    """The same graphs and updates, with nothing to move."""
    at_home = dataclasses.replace(
        plan.with_homes(Tier.DEVICE, Tier.HOST), host_memory_bytes=AMPLE_BYTES, device_memory_bytes=AMPLE_BYTES
    )
    return streamed(workload, hw, nvme, plan=at_home)


def serve_overlapped(case: Case, args: argparse.Namespace) -> None:
    """The process in which all lanes overlap, and each but compute is alone."""
    ours = streamed(case.workload, profile(args), args.nvme, host_memory=case.host_memory, policy="lohan", revise=False)
    args.plan.write_text(ours.plan.to_json())
    ours.step()
    requests, events = trace_step(ours)
    if not requests:
        sys.exit(f"{case}: that memory holds everything: nothing moves that could overlap; lower it")
    replay = Replay(ours, requests, threads=SSD_THREADS)
    copies = {lane: replay_copies(events, lane) for lane in ("h2d", "d2h")}
    assert ours.plan.prediction is not None
    runs: dict[str, Callable[[], Any]] = {OVERLAPPED: ours.step, "ssd": replay.run, **copies}
    said = {"predicted_s": ours.plan.prediction.step_s, "moved": [dataclasses.asdict(one) for one in moved(requests)]}
    serve(runs, said, ours.end)


def moved(requests: Sequence[Request]) -> list[Traffic]:
    """What those requests are, in each direction that has any."""
    sizes = {way: [nbytes for kind, _, _, nbytes in requests if kind == way] for way in ("read", "write")}
    return [Traffic(way, sum(found), len(found)) for way, found in sizes.items() if found]


def serve_alone(case: Case, args: argparse.Namespace) -> None:
    """The process in which compute and the updates are alone."""
    plan = lohan_fx.Plan.from_json(args.plan.read_text())
    ours = compute_alone(case.workload, profile(args), plan, args.nvme)
    ours.step()

    def beside() -> None:
        """A step that is none of those whose stages are told in the end."""
        ours.step()
        compiled(ours.model).checks.steps.pop()

    serve({COMPUTE: ours.step, BESIDE_FIO: beside}, end=ours.end)


def measured(case: Case, args: argparse.Namespace, hw: Path) -> dict[str, Any]:
    """One case."""

    def process(role: str) -> Process:
        command = [__file__, "--child", role, "--case", json.dumps(vars(case)), "--hw", str(hw)]
        return Process([*command, "--nvme", str(args.nvme / role), "--plan", str(args.nvme / "plan.json")])

    overlapped, alone = process("overlapped"), process("alone")
    servers = {OVERLAPPED: overlapped, COMPUTE: alone, "ssd": overlapped, "h2d": overlapped, "d2h": overlapped}
    rounds, beside_fio, shares = [], [], []
    traffic = [Traffic(**one) for one in overlapped.said["moved"]]
    if installed():
        lay_out(traffic, args.nvme)
    else:
        print("fio is not installed: compute is not timed beside it (apt-get install fio)", file=sys.stderr)
    for _ in range(args.rounds):
        rounds.append([server.run(name) for name, server in servers.items()])
        if installed():
            with fio_beside(traffic, rounds[-1][0], args.nvme) as reached:
                beside_fio.append(alone.run(BESIDE_FIO))
            shares.append(min(reached.values()))
    stages = gaps(StepCheck(**overlapped.end()), StepCheck(**alone.end()))
    medians = dict(zip(servers, (statistics.median(times) for times in zip(*rounds, strict=True)), strict=True))
    overlapped_s = medians.pop(OVERLAPPED)
    busiest = max(medians, key=lambda lane: medians[lane])
    return {
        "case": str(case), **vars(case), "serial_s": sum(medians.values()), "overlapped_s": overlapped_s,
        "busiest_lane_s": medians[busiest], "lanes": medians, "busiest_lane": busiest,
        "ratio": statistics.median(times[0] / max(times[1:]) for times in rounds), "rounds": rounds,
        "compute_beside_fio_s": statistics.median(beside_fio) if beside_fio else None, "rounds_beside_fio": beside_fio,
        "fio_moved_share": statistics.median(shares) if shares else None,
        **overlapped.said, "stages": stages,
    }  # fmt: skip


def gaps(overlapped: StepCheck, alone: StepCheck) -> dict[str, dict[str, float]]:
    """Stage -> its seconds, those in which compute was busy, in which it waited, and in which it is busy alone."""
    return {
        stage: {
            "seconds": overlapped.stages_s[stage],
            "compute_s": overlapped.lanes_s[stage].get("compute", 0.0),
            "waited_s": overlapped.stages_s[stage] - overlapped.lanes_s[stage].get("compute", 0.0),
            "alone_s": alone.stages_s[stage],
        }
        for stage in STAGES
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    case_arguments(parser)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--child", choices=CHILDREN, help="internal: which of the measured processes")
    parser.add_argument("--case", help="internal: what it measures")
    parser.add_argument("--plan", type=Path, help="internal: where the plan of both is kept")
    args = parser.parse_args()
    if args.child:
        CHILDREN[args.child](Case(**json.loads(args.case)), args)
        return
    asked = chosen(CASES, args)
    with own_folder(args):
        hw, path = profile(args), args.nvme / "profile.toml"
        hw.save(path)
        cases = [measured(case, args, path) for case in asked]
    cases = with_saved("overlap", cases) if args.save else cases
    rows = [row for found in cases for row in _rows(found)]
    missed = [
        f"{found['case']}: {found['ratio']:.3f}x the busiest lane, at most {MOST_RATIO} allowed"
        for found in cases
        if found["ratio"] > MOST_RATIO
    ]
    scalars = {key: cases[0][key] for key in ("serial_s", "overlapped_s", "busiest_lane_s", "ratio")}
    finish("overlap", rows, {**scalars, "cases": cases, "of_cases": len(CASES)}, missed, save=args.save)


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    lanes = ", ".join(f"{lane} {seconds:.3f}" for lane, seconds in found["lanes"].items())
    rows = [
        (found["case"], f"{found['overlapped_s']:.3f} s, predicted {found['predicted_s']:.3f}"),
        ("  each lane alone", f"{lanes}; one after the other {found['serial_s']:.3f} s"),
        (f"  over the busiest lane ({found['busiest_lane']})", f"{found['ratio']:.3f}x"),
    ]
    if beside_fio_s := found.get("compute_beside_fio_s"):
        lost = f"{beside_fio_s:.3f} s, {beside_fio_s / found['lanes'][COMPUTE]:.3f}x of what it takes alone"
        rows.append(("  compute beside fio", f"{lost}; fio moves {found['fio_moved_share']:.0%} as much"))
    return rows + [
        (
            f"  {stage}",
            f"{at['seconds']:.3f} s: compute {at['compute_s']:.3f} (alone {at['alone_s']:.3f}), waited {at['waited_s']:.3f}",
        )
        for stage, at in found["stages"].items()
    ]


CHILDREN = {"overlapped": serve_overlapped, "alone": serve_alone}


if __name__ == "__main__":
    main()
