"""Larger than memory: a 1.3B Llama (18 GB of parameters and states), or one of 3B (42 GB), trains in a few GB of RAM.

    python benchmarks/larger_than_memory.py [--nvme DIR --host-memory 1.5GiB --steps 3] [--save]
    python benchmarks/larger_than_memory.py --size 3b --host-memory 3GiB --steps 2 [--save]

1.3B is built in bf16 in RAM (2.7 GB) and moved to the store; 3B is built on ``meta`` and initialised module by module on
its way there. Batch 1 x 512. Bar: peak RSS of the whole process, building included, under 5 GB (3B: 6 GB). Our own
counter (VmHWM) must agree with what the kernel tells the parent (ru_maxrss of a child process, which is what
``/usr/bin/time -v`` prints) within 2%.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from report import arguments, at_least_one, finish, own_folder, profile
from workload import SIZES, Workload, memory_bytes, streamed

from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planning.budgets import parse_bytes
from lohan_fx.process_memory import forget_peak_rss

MOST_BYTES = {"3b": 6_000_000_000}
MOST_BYTES_ELSE = 5_000_000_000
ON_META = ("3b",)
BYTES_PER_PARAMETER = 14
AGREEMENT = 0.02


def child(args: argparse.Namespace, hw: HardwareProfile) -> None:
    """Build, compile, train; prints its figures as one JSON line."""
    workload = Workload(args.size, args.batch, args.seq)
    before = memory_bytes("VmRSS")
    on_meta = args.size in ON_META
    start_s = time.perf_counter()
    ours = streamed(workload, hw, args.nvme, on_meta=on_meta, host_memory=args.host_memory)
    ready_s, built_rss = time.perf_counter() - start_s, memory_bytes("VmHWM")
    before_compile = compiled(ours.model).rss_before_bytes - compiled(ours.model).original_bytes
    if not on_meta and not forget_peak_rss():  # what the model took in RAM is not of the promise
        sys.exit("this kernel does not let a process forget its peak RSS (/proc/self/clear_refs)")
    engine = compiled(ours.model).engine
    model_bytes = 0 if on_meta else sum(p.bytes for p in ours.plan.parameters)
    prediction = ours.plan.prediction
    assert prediction is not None
    seconds, losses = [], []
    for _ in range(args.steps):
        read, written, start_s = engine.store.bytes_read, engine.store.bytes_written, time.perf_counter()
        losses.append(ours.step())
        seconds.append(time.perf_counter() - start_s)
        print(f"step {len(losses)}: loss {losses[-1]:.4f}, {seconds[-1]:.1f} s", file=sys.stderr, flush=True)
        read, written = engine.store.bytes_read - read, engine.store.bytes_written - written
    training_rss, peak_rss = memory_bytes("VmRSS"), memory_bytes("VmHWM")
    figures = {
        "params": sum(p.numel for p in ours.plan.parameters),
        "ready_s": ready_s,
        "peak_rss_until_ready_bytes": built_rss,
        "peak_rss_bytes": max(built_rss, peak_rss),
        "counted_peak_rss_bytes": peak_rss,
        "training_rss_bytes": training_rss,
        "growth_bytes": peak_rss - before_compile,
        "promise_bytes": parse_bytes(args.host_memory, "host_memory"),
        # Whichever is higher: the model in RAM while it is stored, or the training after it has left.
        "predicted_peak_rss_bytes": max(before + model_bytes, before + prediction.peak_bytes["host"]),
        "predicted_training_rss_bytes": before + prediction.peak_bytes["host"],
        "s_per_step": statistics.median(seconds[1:] or seconds),
        "predicted_s_per_step": prediction.step_s,
        "nvme_read_bytes": read, "predicted_nvme_read_bytes": prediction.nvme_read_bytes,
        "nvme_write_bytes": written, "predicted_nvme_write_bytes": prediction.nvme_write_bytes,
        "losses": losses, "seconds": seconds,
    }  # fmt: skip
    compiled(ours.model).detach()
    print(json.dumps(figures))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, default="1.3b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=at_least_one, default=3)
    parser.add_argument("--host-memory", default="1.5GiB")
    parser.add_argument("--child", action="store_true", help="internal: the measured process")
    args = parser.parse_args()
    if args.child:
        child(args, HardwareProfile.load(args.hw))
        return
    with own_folder(args):
        _check_disk(args)
        hw, path = profile(args), args.nvme / "profile.toml"
        hw.save(path)
        command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:], "--child"]
        command += ["--hw", str(path), "--nvme", str(args.nvme)]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    kernel_peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    figures = json.loads(run.stdout.strip().splitlines()[-1])
    peak = figures["peak_rss_bytes"]
    most = MOST_BYTES.get(args.size, MOST_BYTES_ELSE)
    missed = [] if peak < most else [f"peak RSS {peak:,} bytes, under {most:,} allowed"]
    counted = figures["counted_peak_rss_bytes"]
    if abs(kernel_peak - counted) > AGREEMENT * counted:
        missed.append(f"our counter says {counted:,} bytes, the kernel {kernel_peak:,}")
    if figures["growth_bytes"] >= figures["promise_bytes"]:
        missed.append(f"the process grew by {figures['growth_bytes']:,} bytes, {figures['promise_bytes']:,} promised")
    finish(
        "larger_than_memory" if args.size == "1.3b" else f"larger_than_memory_{args.size}",
        _rows(figures, kernel_peak),
        {**figures, "kernel_peak_rss_bytes": kernel_peak, "size": args.size, "batch": args.batch, "seq": args.seq},
        missed,
        save=args.save,
    )


def _rows(figures: dict[str, Any], kernel_peak: int) -> list[tuple[str, str]]:
    def gigabytes(key: str) -> str:
        return f"{figures[key] / 1e9:.2f}"

    state_bytes = figures["params"] * BYTES_PER_PARAMETER
    return [
        ("parameters", f"{gigabytes('params')}e9, {state_bytes / 1e9:.1f} GB with states"),
        (
            "peak RSS, whole process",
            f"{gigabytes('peak_rss_bytes')} GB, predicted {gigabytes('predicted_peak_rss_bytes')}",
        ),
        (
            "built, stored and planned",
            f"{figures['ready_s']:.0f} s, peak RSS {gigabytes('peak_rss_until_ready_bytes')} GB",
        ),
        ("grew since compile by at most", f"{gigabytes('growth_bytes')} GB, {gigabytes('promise_bytes')} promised"),
        ("peak RSS, told by the kernel", f"{kernel_peak / 1e9:.2f} GB, {gigabytes('counted_peak_rss_bytes')} counted"),
        (
            "RSS while training",
            f"{gigabytes('training_rss_bytes')} GB, predicted at most {gigabytes('predicted_training_rss_bytes')}",
        ),
        ("step", f"{figures['s_per_step']:.1f} s, predicted {figures['predicted_s_per_step']:.1f}"),
        (
            "NVMe read per step",
            f"{gigabytes('nvme_read_bytes')} GB, predicted {gigabytes('predicted_nvme_read_bytes')}",
        ),
        (
            "NVMe written per step",
            f"{gigabytes('nvme_write_bytes')} GB, predicted {gigabytes('predicted_nvme_write_bytes')}",
        ),
        ("losses", ", ".join(f"{loss:.4f}" for loss in figures["losses"])),
    ]


def _check_disk(args: argparse.Namespace) -> None:
    """Say early what ``NvmeStore`` would say after the model was built."""
    layers, hidden, _, _, ffn, vocabulary = SIZES[args.size]
    parameters = layers * (4 * hidden * hidden + 3 * hidden * ffn) + 2 * vocabulary * hidden
    free = shutil.disk_usage(args.nvme).free
    if free < 1.05 * BYTES_PER_PARAMETER * parameters:
        sys.exit(f"{args.nvme}: needs {BYTES_PER_PARAMETER * parameters:,} bytes, {free:,} are free")


if __name__ == "__main__":
    main()
