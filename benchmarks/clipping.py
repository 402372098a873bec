"""What clipping by the global norm costs: seconds per step with and without it, in alternating rounds.

With clipping, updates run beside the next forward and may outlast the step; so a round is several steps and then a wait
until every update is in place, which counts.
"""

from __future__ import annotations

import statistics
import time

import torch
from report import arguments, finish, profile
from workload import LR, Step, Workload, alternating

import lohan_fx
from lohan_fx.compile import compiled

MAX_NORM = 1.0
MOST_RATIO = 1.10


def training(
    workload: Workload, hw: lohan_fx.HardwareProfile, nvme: str, *, clips: bool, steps: int, memory: str
) -> Step:
    """What runs ``steps`` steps to their end, and returns the seconds of each."""
    model, tokens = workload.build(), workload.tokens()
    lohan_fx.compile(model, hw, nvme=nvme, host_memory=memory, hold_gradients=clips)
    optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, fused=True, accumulation_steps=1)
    engine = compiled(model).engine

    def run() -> float:
        start_s = time.perf_counter()
        for _ in range(steps):
            model(input_ids=tokens, labels=tokens).loss.backward()
            if clips:
                lohan_fx.clip_grad_norm_(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        engine.before_reading()
        return (time.perf_counter() - start_s) / steps

    return run


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", default="120m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps per round")
    parser.add_argument("--host-memory", default="1GiB")
    args = parser.parse_args()
    hw, workload = profile(args), Workload(args.size, args.batch, args.seq)
    runs = []
    for name, clips in (("without", False), ("with", True)):
        directory = args.nvme / name
        directory.mkdir(parents=True, exist_ok=True)
        runs.append(training(workload, hw, str(directory), clips=clips, steps=args.steps, memory=args.host_memory))
    for run in runs:
        run()
    rounds = list(alternating(args.rounds, *runs))
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
