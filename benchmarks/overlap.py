"""Overlap: each lane's work alone, one lane after the other, and all of them overlapped, in one run.

    python benchmarks/overlap.py [--size demo --batch 4 --seq 128 --rounds 5] [--save]

Alone means the same work: the compute lane runs the same rewritten graphs and the same updates with parameters and
states at home in memory; the ssd lane repeats the very reads and writes of one step (same sizes, offsets, threads)
without anybody waiting for them; the copies are repeated in the pieces in which they came. On a CPU the model and
Adam share the cores and are one lane. Bar: overlapped <= 1.25x the busiest lane (medians of alternating rounds).
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import arguments, finish, profile
from workload import SIZES, Streamed, Workload, alternating, streamed

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.plan import Tier
from lohan_fx.runtime.host_pool import HostPool, Reservation
from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.timeline import Event

MOST_RATIO = 1.25
AMPLE_BYTES = 1 << 40

Request = tuple[str, str, int, int]
"""(read or write, extent, offset, bytes)."""


def timed(run: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


def trace_step(ours: Streamed) -> tuple[list[Request], list[Event]]:
    """One step's requests to the store and its events on all lanes."""
    engine = compiled(ours.model).engine
    requests: list[Request] = []
    store = engine.store
    originals = {"read": store.read, "write": store.write}

    def spy(kind: str) -> Callable[..., None]:
        def call(name: str, offset: int, buffer: torch.Tensor, nbytes: int) -> None:
            requests.append((kind, name, offset, nbytes))
            originals[kind](name, offset, buffer, nbytes)

        return call

    store.read, store.write = spy("read"), spy("write")  # type: ignore[method-assign]
    engine.timeline.start_recording()
    try:
        ours.step()
    finally:
        events = engine.timeline.stop_recording()
        store.read, store.write = originals["read"], originals["write"]  # type: ignore[method-assign]
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


def compute_alone(workload: Workload, hw: lohan_fx.HardwareProfile, plan: lohan_fx.Plan, nvme: Any) -> Streamed:
    """The same graphs and updates, with nothing to move."""
    at_home = dataclasses.replace(
        plan.with_homes(Tier.DEVICE, Tier.HOST), host_memory_bytes=AMPLE_BYTES, device_memory_bytes=AMPLE_BYTES
    )
    return streamed(workload, hw, nvme, plan=at_home)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--policy", default="lohan")
    args = parser.parse_args()
    hw = profile(args)
    workload = Workload(args.size, args.batch, args.seq)
    ours = streamed(workload, hw, args.nvme / "overlapped", host_memory=args.host_memory, policy=args.policy)
    alone = compute_alone(workload, hw, ours.plan, args.nvme / "alone")
    for step in (ours.step, alone.step):
        step()
    requests, events = trace_step(ours)
    if not requests:
        parser.error(f"--host-memory {args.host_memory} holds everything: nothing moves that could overlap; lower it")
    replay = Replay(ours, requests, threads=3)
    runs: dict[str, Callable[[], Any]] = {
        "overlapped": ours.step, "compute+cpu": alone.step, "ssd": replay.run,
        "h2d": replay_copies(events, "h2d"), "d2h": replay_copies(events, "d2h"),
    }  # fmt: skip
    rounds = list(alternating(args.rounds, *(lambda run=run: timed(run) for run in runs.values())))
    medians = dict(zip(runs, (statistics.median(times) for times in zip(*rounds, strict=True)), strict=True))
    for model in (ours.model, alone.model):
        lohan_fx.release(model)
    overlapped_s = medians.pop("overlapped")
    busiest = max(medians, key=lambda lane: medians[lane])
    ratio = statistics.median(times[0] / max(times[1:]) for times in rounds)
    prediction = ours.plan.prediction
    assert prediction is not None
    finish(
        "overlap",
        [(f"{lane} alone", f"{seconds:.3f} s") for lane, seconds in medians.items()]
        + [
            ("one after the other", f"{sum(medians.values()):.3f} s"),
            ("overlapped", f"{overlapped_s:.3f} s, predicted {prediction.step_s:.3f}"),
            (f"over the busiest lane ({busiest})", f"{ratio:.3f}x"),
        ],
        {
            "serial_s": sum(medians.values()), "overlapped_s": overlapped_s, "busiest_lane_s": medians[busiest],
            "lanes": medians, "busiest_lane": busiest, "ratio": ratio, "rounds": rounds,
            "predicted_s": prediction.step_s, "size": args.size, "batch": args.batch, "seq": args.seq,
        },
        [] if ratio <= MOST_RATIO else [f"{ratio:.3f}x the busiest lane, at most {MOST_RATIO} allowed"],
        save=args.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
