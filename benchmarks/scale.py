"""What a model's size costs: seconds per parameter from small to large, and memory with four times as many layers.

    python benchmarks/scale.py [--sizes 125m,350m,1.3b] [--layers 24,96] [--save]

One process per model, all parameters and states on NVMe (``--policy``), so that each parameter takes the same way
whatever the size. Bars: seconds per parameter within ``FLAT`` of the smallest model's; the peak RSS of the deepest narrow
model is that of the shallowest and what the plans say more of, to ``RSS_WITHIN`` of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import arguments, at_least_one, finish, own_folder, profile
from workload import SIZES, Workload, dtype_argument, memory_bytes, streamed

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile

FLAT = 1.25
RSS_WITHIN = 0.05
WARM_UP = 1
NARROW = (256, 4, 4, 704, 2048)
"""Hidden, heads, key-value heads, feed-forward and vocabulary of the models whose depth varies."""


def child(size: str, args: argparse.Namespace) -> None:
    """Compile and train; prints the figures as one JSON line. ``size`` is a known one, or a number of narrow layers."""
    if size.isdecimal():
        SIZES[size] = (int(size), *NARROW)
    hw = HardwareProfile.load(args.hw)
    before_bytes = memory_bytes("VmRSS")
    ours = streamed(
        Workload(size, args.batch, args.seq, dtype=args.dtype), hw, args.nvme,
        host_memory=args.host_memory, policy=args.policy, revise=False,
    )  # fmt: skip
    monitor = lohan_fx.Monitor(ours.model)  # the peak begins here: the model itself was made in RAM
    expected_bytes = monitor.expected_peak_rss_bytes()
    seconds = []
    for _ in range(WARM_UP + args.steps):
        start_s = time.perf_counter()
        ours.step()
        seconds.append(time.perf_counter() - start_s)
    prediction, store = ours.plan.prediction, compiled(ours.model).engine.store
    assert prediction is not None
    figures = {
        "parameters": sum(p.numel for p in ours.plan.parameters),
        "s_per_step": statistics.median(seconds[WARM_UP:]),
        "predicted_s": prediction.step_s,
        "peak_rss_bytes": memory_bytes("VmHWM"),
        "predicted_peak_rss_bytes": expected_bytes,
        "planned_peak_rss_bytes": before_bytes + prediction.peak_bytes["host"],
        "nvme_read_bytes": prediction.nvme_read_bytes,
        "nvme_written_bytes": prediction.nvme_write_bytes,
        "bytes_moved": [store.bytes_read, store.bytes_written],
    }
    compiled(ours.model).detach()
    print(json.dumps(figures))


def measured(size: str, args: argparse.Namespace, hw: Path) -> dict[str, Any]:
    print(f"training {size}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--child", size, "--hw", str(hw), "--nvme", str(args.nvme)]
    for name in ("host-memory", "policy", "batch", "seq", "steps", "dtype"):
        command += [f"--{name}", str(getattr(args, name.replace("-", "_")))]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return {"size": size, **found, "ns_per_parameter": found["s_per_step"] / found["parameters"] * 1e9}


def judged(sizes: Sequence[Mapping[str, Any]], depths: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The ratios of the bars, and which bars were missed."""
    figures: dict[str, Any] = {"sizes": sizes, "depths": depths}
    missed = []
    if len(sizes) > 1:
        costs = [found["ns_per_parameter"] for found in sizes]
        figures["cost_ratio"] = max(costs) / costs[0]
        if figures["cost_ratio"] > FLAT:
            missed.append(f"a parameter costs up to {figures['cost_ratio']:.2f}x that of {sizes[0]['size']}")
    if len(depths) > 1:
        first, last = depths[0], depths[-1]
        more = last["peak_rss_bytes"] - first["peak_rss_bytes"]
        named = last["planned_peak_rss_bytes"] - first["planned_peak_rss_bytes"]
        figures |= {"more_rss_bytes": more, "named_rss_bytes": named}
        if more - named > RSS_WITHIN * first["peak_rss_bytes"]:
            missed.append(f"{last['size']} layers take {(more - named) / 1e6:.0f} MB more than the plan says")
    return figures, missed


def rows(found: Mapping[str, Any], what: str) -> tuple[str, str]:
    return f"{found['size']}{what}, {found['parameters'] / 1e6:.0f}M", (
        f"{found['s_per_step']:.2f} s ({found['predicted_s']:.2f} predicted), {found['ns_per_parameter']:.2f} ns per "
        f"parameter; peak RSS {found['peak_rss_bytes'] / 1e9:.2f} GB ({found['predicted_peak_rss_bytes'] / 1e9:.2f})"
    )


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sizes", default="125m,350m", help=f"of {', '.join(SIZES)}; smallest first")
    parser.add_argument("--layers", default="24,96", help="depths of the narrow model; shallowest first")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--steps", type=at_least_one, default=3)
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("--policy", default="recompute")
    dtype_argument(parser)
    parser.add_argument("--child", help="internal: the measured process")
    args = parser.parse_args()
    if args.child:
        child(args.child, args)
        return
    sizes, depths = ([n for n in given.split(",") if n] for given in (args.sizes, args.layers))
    unknown = [size for size in sizes if size not in SIZES]
    if unknown:
        parser.error(f"--sizes names {', '.join(unknown)}: expected some of {', '.join(SIZES)}")
    with own_folder(args):
        hw, path = profile(args), args.nvme / "profile.toml"
        hw.save(path)
        by_size = [measured(size, args, path) for size in sizes]
        by_depth = [measured(depth, args, path) for depth in depths]
    figures, missed = judged(by_size, by_depth)
    table = [rows(found, "") for found in by_size] + [rows(found, " layers") for found in by_depth]
    if "more_rss_bytes" in figures:
        more, named = figures["more_rss_bytes"], figures["named_rss_bytes"]
        table.append(("more layers", f"{more / 1e6:.0f} MB more RSS; the plans say {named / 1e6:.0f} MB"))
    extra = {name: getattr(args, name) for name in ("policy", "host_memory", "batch", "seq", "dtype")}
    finish("scale", table, {**figures, **extra}, missed, save=args.save)


if __name__ == "__main__":
    main()
