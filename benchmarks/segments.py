"""Segments compiled by Inductor against the same graphs op by op, in alternating rounds.

    python benchmarks/segments.py [--size 350m --batch 4 --seq 512 --host-memory 4GiB --rounds 5] [--cold] [--save]

One child process per way trains the same model with the same tokens; each round lets both take one step, the other one
waiting. Losses must be equal in every bit. Peak RSS is what the process grows by from ``compile`` on. ``--cold`` gives
Inductor an empty cache, as in the first run ever; otherwise its cache is the user's. Bars: equal losses; the default
is the faster way in the geometric mean of all cases that were saved and have something to compile.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bars
from report import arguments, at_least_one, finish, own_folder, profile, with_saved
from workload import SIZES, Workload, memory_bytes, streamed

import lohan_fx
from lohan_fx.compile import compiled

WAYS = {"boxed": "boxed", "compiled": "auto"}


def trains(pipe: Connection, workload: Workload, hw: lohan_fx.HardwareProfile, nvme: Path, options: Any) -> None:
    """A child: prepares, says how, and takes a step whenever it is told to."""
    before_bytes, start_s = memory_bytes("VmRSS"), time.perf_counter()
    ours = streamed(workload, hw, nvme, revise=False, **options)
    prepared_s = time.perf_counter() - start_s
    predicted = ours.plan.prediction
    assert predicted is not None
    halves = compiled(ours.model).halves[-1]
    pipe.send(
        {
            "prepare_s": prepared_s,
            "predicted_s": predicted.step_s,
            "segments": sum(map(len, halves.compiled.values())),
            "distinct": len({id(run) for runs in halves.compiled.values() for run in runs.values()}),
        }
    )
    while pipe.recv():
        start_s = time.perf_counter()
        loss = ours.step()
        pipe.send((time.perf_counter() - start_s, loss))
    pipe.send(memory_bytes("VmHWM") - before_bytes)
    lohan_fx.release(ours.model)


class Child:
    """One way to run, in a process of its own."""

    def __init__(self, way: str, workload: Workload, hw: lohan_fx.HardwareProfile, nvme: Path, host: str) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        options = {"segments": WAYS[way], "host_memory": host}
        self._process = spawning.Process(target=trains, args=(theirs, workload, hw, nvme / way, options))
        self._process.start()
        theirs.close()
        self.prepared: dict[str, Any] = self._pipe.recv()

    def step(self) -> tuple[float, float]:
        """Seconds and loss of the next step."""
        self._pipe.send(True)
        seconds, loss = self._pipe.recv()
        return seconds, loss

    def end(self) -> int:
        """End the process; its peak RSS over what it had before."""
        self._pipe.send(False)
        peak_bytes: int = self._pipe.recv()
        self._process.join()
        return peak_bytes


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--layers", type=int, help="as many layers instead of those of --size")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--cold", action="store_true", help="begin with an empty cache of Inductor's")
    args = parser.parse_args()
    name = f"{args.size}, {args.layers or 'all'} layers, {args.batch} x {args.seq}"
    workload = Workload(args.size, args.batch, args.seq, layers=args.layers)
    with tempfile.TemporaryDirectory() as cache, own_folder(args):
        if args.cold:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        hw = profile(args)
        children = {way: Child(way, workload, hw, args.nvme / "segments", args.host_memory) for way in WAYS}
        rounds = [{way: child.step() for way, child in children.items()} for _ in range(args.rounds + 1)][1:]
        peaks = {way: child.end() for way, child in children.items()}
    seconds = {way: statistics.median(taken[way][0] for taken in rounds) for way in WAYS}
    ratio = statistics.median(taken["compiled"][0] / taken["boxed"][0] for taken in rounds)
    equal = all(taken["compiled"][1] == taken["boxed"][1] for taken in rounds)
    prepared = {way: child.prepared for way, child in children.items()}
    rows = [
        (
            way,
            f"{seconds[way]:.3f} s/step (predicted {prepared[way]['predicted_s']:.3f}), prepared in "
            f"{prepared[way]['prepare_s']:.1f} s, peak RSS +{peaks[way] / 1e6:,.0f} MB",
        )
        for way in WAYS
    ]
    found = prepared["compiled"]
    rows.append(("segments", f"{found['segments']} calls of {found['distinct']} distinct"))
    rows.append(("compiled over boxed", f"{ratio:.3f}x, losses {'equal' if equal else 'DIFFER'}"))
    case = {
            "case": name, "size": args.size, "layers": args.layers, "batch": args.batch, "seq": args.seq, "cold": args.cold,
            "host_memory": args.host_memory, "s_per_step": seconds, "ratio": ratio, "losses_equal": equal,
            "prepared": prepared, "peak_rss_bytes": peaks, "rounds": rounds,
        }  # fmt: skip
    cases = with_saved("segments", [case]) if args.save else [case]
    figures = {"cases": cases}
    finish("segments", rows, figures, bars.segments(figures), save=args.save)


if __name__ == "__main__":
    main()
