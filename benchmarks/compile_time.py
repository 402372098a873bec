"""Seconds until the first step can run: lohan_fx's capture, planning, passes and linking against
``torch.compile(backend="aot_eager")``, on a Llama of many layers that are too narrow to take any time themselves.

    python benchmarks/compile_time.py [--layers 24 --rounds 3] [--profile] [--save]

Of both the first training step counts, less a second one, because AOTAutograd compiles a backward when it is first needed.
Both are compiled anew each round, in turn, segments left as they are (their compilation is benchmarks/segments.py's
subject). Bar: at most 1.5x. A process also times each distinct op, once; what that takes is told beside it. ``--profile``
says where our seconds go.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from typing import Any

import torch
import workload as workloads
from report import arguments, at_least_one, finish, own_folder, profile
from workload import Workload, alternating

import lohan_fx
from lohan_fx.capture import prepare_dynamo
from lohan_fx.measuring import op_times

MOST_RATIO = 1.5
NARROW = Workload("narrow", 1, 16)


def plain_s() -> float:
    """The first forward and backward under ``aot_eager``, less a second one."""
    torch._dynamo.reset()
    model, tokens = NARROW.build(), NARROW.tokens()
    model.compile(backend="aot_eager")

    def step() -> float:
        start_s = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        return time.perf_counter() - start_s

    first_s = step()
    return first_s - step()


def ours_s(hw: lohan_fx.HardwareProfile, nvme: Any) -> float:
    """The first step of the same model, less a second one."""
    torch._dynamo.reset()
    model, tokens = NARROW.build(), NARROW.tokens()
    lohan_fx.compile(model, hw, nvme=[nvme], segments="boxed", revise=False)
    optimizer = lohan_fx.AdamW(model.parameters())

    def step() -> float:
        start_s = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        return time.perf_counter() - start_s

    first_s = step()
    seconds = first_s - step()
    lohan_fx.release(model)
    return seconds


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    workloads.SIZES["narrow"] = (args.layers, 64, 4, 2, 128, 256)
    with own_folder(args):
        hw = profile(args)
        prepare_dynamo()
        plain_s(), ours_s(hw, args.nvme)  # imports, and the ops' times, which are measured once per process
        rounds = list(alternating(args.rounds, plain_s, lambda: ours_s(hw, args.nvme)))
        plain, ours = (statistics.median(taken) for taken in zip(*rounds, strict=True))
        op_times.forget()
        timing_s = ours_s(hw, args.nvme) - ours
        if args.profile:
            watch = cProfile.Profile()
            watch.runcall(ours_s, hw, args.nvme)
            pstats.Stats(watch).sort_stats("cumulative").print_stats(70)
    ratio = statistics.median(taken[1] / taken[0] for taken in rounds)
    finish(
        "compile_time",
        [
            ("aot_eager", f"{plain:.2f} s"),
            ("lohan_fx", f"{ours:.2f} s, and {timing_s:.2f} s of timing ops, once a process"),
            ("ratio", f"{ratio:.2f}x, at most {MOST_RATIO} allowed"),
        ],
        {
            "layers": args.layers, "aot_eager_s": plain, "ours_s": ours, "op_timing_s": timing_s, "ratio": ratio,
            "rounds": rounds,
        },
        [] if ratio <= MOST_RATIO else [f"{ratio:.2f}x aot_eager, at most {MOST_RATIO} allowed"],
        save=args.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
