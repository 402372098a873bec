"""What clipping by the global norm costs: seconds per step with and without it, in alternating rounds.

    python benchmarks/clipping.py [--size demo --batch 4 --seq 128 --rounds 5] [--save]

Each is a process of its own. With clipping, updates run beside the next forward and may outlast the step; so a round is
several steps and then a wait until every update is in place, which counts. Bar: 1.10x the step without.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from report import arguments, finish, profile
from turns import Process, serve
from workload import LR, SIZES, Workload

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile

MAX_NORM = 1.0
MOST_RATIO = 1.10
CLIPPED, PLAIN = "with", "without"


def child(args: argparse.Namespace) -> None:
    """Train with or without clipping, several steps whenever asked."""
    clips, workload = args.child == CLIPPED, Workload(args.size, args.batch, args.seq)
    model, tokens = workload.build(), workload.tokens()
    args.nvme.mkdir(parents=True, exist_ok=True)
    hw = HardwareProfile.load(args.hw)
    lohan_fx.compile(model, hw, nvme=[args.nvme], host_memory=args.host_memory, hold_gradients=clips, revise=False)
    optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, fused=True, accumulation_steps=1)
    engine = compiled(model).engine

    def steps() -> None:
        for _ in range(args.steps):
            model(input_ids=tokens, labels=tokens).loss.backward()
            if clips:
                lohan_fx.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        engine.before_reading()

    steps()
    serve({args.child: steps})
    lohan_fx.release(model)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps per round")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--child", choices=(CLIPPED, PLAIN), help="internal: the measured process")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    hw, path = profile(args), args.nvme / "profile.toml"
    hw.save(path)
    options = ["--hw", str(path)]
    for name in ("size", "batch", "seq", "steps", "host_memory"):
        options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    processes = {
        name: Process([__file__, "--child", name, "--nvme", str(args.nvme / name), *options])
        for name in (PLAIN, CLIPPED)
    }
    rounds = [[process.run(name) / args.steps for name, process in processes.items()] for _ in range(args.rounds)]
    for process in processes.values():
        process.end()
    path.unlink()
    without_s, with_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(clipped / plain for plain, clipped in rounds)
    finish(
        "clipping",
        [
            ("without clipping", f"{without_s:.3f} s per step"),
            ("with clipping", f"{with_s:.3f} s per step"),
            ("ratio", f"{ratio:.3f}x"),
        ],
        {
            "without_s": without_s, "with_s": with_s, "ratio": ratio, "rounds": rounds, "steps": args.steps,
            "size": args.size, "batch": args.batch, "seq": args.seq, "threads": torch.get_num_threads(),
        },
        [] if ratio <= MOST_RATIO else [f"{ratio:.3f}x the step without clipping, at most {MOST_RATIO} allowed"],
        save=args.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
