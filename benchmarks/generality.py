"""Cost of being general: the demo model planned to stay in memory, against plain PyTorch, in alternating steps.

    python benchmarks/generality.py [--size demo --batch 4 --seq 128 --rounds 8] [--save]

Bar: at most 1.1x the step of plain PyTorch (medians). The losses must be those of the same graph without our passes,
``torch.compile(backend="aot_eager")``, to the last bit; how far those drift from eager bf16 is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

from report import arguments, at_least_one, finish, own_folder, profile
from workload import SIZES, Step, Workload, alternating, plain_step, streamed

import lohan_fx
from lohan_fx.plan import Tier

MOST_RATIO = 1.1


def timed(step: Step, losses: list[float]) -> float:
    start_s = time.perf_counter()
    losses.append(step())
    return time.perf_counter() - start_s


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=at_least_one, default=8)
    args = parser.parse_args()
    with own_folder(args):
        measure(args)


def measure(args: argparse.Namespace) -> None:
    """Both, in alternating rounds."""
    hw = profile(args, seconds=6.0)
    workload = Workload(args.size, args.batch, args.seq)
    plain = plain_step(workload)
    ours = streamed(workload, hw, args.nvme)
    in_memory = all(p.home is Tier.DEVICE for p in ours.plan.parameters)
    plain_losses: list[float] = []
    our_losses: list[float] = []
    for _ in range(2):
        timed(plain, plain_losses), timed(ours.step, our_losses)
    rounds = list(alternating(args.rounds, lambda: timed(plain, plain_losses), lambda: timed(ours.step, our_losses)))
    lohan_fx.release(ours.model)
    graph = plain_step(workload, backend="aot_eager")
    graph_losses = [graph() for _ in our_losses]
    plain_s, ours_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratio = statistics.median(ours / plain for plain, ours in rounds)
    apart = max(abs(a - b) for a, b in zip(graph_losses, our_losses, strict=True))
    drift = max(abs(a - b) for a, b in zip(graph_losses, plain_losses, strict=True))
    missed = [] if ratio <= MOST_RATIO else [f"{ratio:.3f}x plain PyTorch, at most {MOST_RATIO} allowed"]
    missed += [] if apart == 0 else [f"losses differ from aot_eager by {apart}"]
    missed += [] if in_memory else ["the plan does not keep everything in memory: free some and run again"]
    prediction = ours.plan.prediction
    assert prediction is not None
    finish(
        "generality",
        [
            ("plain PyTorch", f"{plain_s:.3f} s/step"),
            ("lohan_fx, all in memory", f"{ours_s:.3f} s/step, predicted {prediction.step_s:.3f}"),
            ("ratio, median of pairs", f"{ratio:.3f}"),
            ("largest difference of losses from aot_eager", f"{apart:.2g}"),
            ("aot_eager's from eager", f"{drift:.2g}"),
        ],
        {
            "plain_s": plain_s, "lohan_fx_s": ours_s, "ratio": ratio, "predicted_s": prediction.step_s,
            "rounds": rounds, "losses": our_losses, "plain_losses": plain_losses,
            "loss_difference": apart,
            "size": args.size, "batch": args.batch, "seq": args.seq,
        },
        missed,
        save=args.save,
    )  # fmt: skip


if __name__ == "__main__":
    main()
