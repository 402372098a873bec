"""peer_ours: lohan_fx as one more system of the peer harness: its model, tokens and recipe, streamed. Internal.

    python benchmarks/peer_ours.py HARNESS --hw FILE --nvme DIR (--host-memory SIZE | --peak-rss BYTES)
        [--device-memory BYTES] [--plan FILE] [--steps 3] -- the harness' own options

``peers.py`` calls it, a process per run. Measured like the others: the median of the steps after warming up, and the
peak RSS of the whole process, building included. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from peer_harness import loaded, options_of

import lohan_fx
from lohan_fx import compile_arguments
from lohan_fx.compile import compiled
from lohan_fx.cost import STATE_BYTES
from lohan_fx.plan import Tier
from lohan_fx.planning.self_check import LEARNING_STEPS, WARM_UP_STEPS

LEAST_WARM_UP = 2
REVISING = WARM_UP_STEPS + LEARNING_STEPS + 1
"""Steps after which the plan stays: the one after those that correct the profile may capture anew."""
UNPLANNED_SHARE = 0.05
"""Of a limit on the whole process, left to what no plan counts: as far as predicted peaks may be off (prediction.py)."""


def build(harness: ModuleType, options: argparse.Namespace) -> Any:
    """The harness' model with its weights, in bf16."""
    transformers.logging.set_verbosity_error()
    model = harness.build(options, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(harness.init_value(name, tuple(parameter.shape), options.seed))
    return model.train()


def train(args: argparse.Namespace, harness: ModuleType, options: argparse.Namespace) -> dict[str, Any]:
    """Build, compile, train; the figures."""
    hw = lohan_fx.HardwareProfile.load(args.hw)
    plan = None if args.plan is None else lohan_fx.Plan.from_json(args.plan.read_text())
    compile_arguments.wake(hw, torch.bfloat16)  # a GPU's libraries are none of what a plan promises
    before_bytes = harness.status_kb("VmRSS")
    host_memory = args.host_memory or int(args.peak_rss * (1 - UNPLANNED_SHARE)) - before_bytes
    model = build(harness, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        memory = {"host_memory": host_memory, "device_memory": args.device_memory}
        lohan_fx.compile(model, hw, nvme=[args.nvme], plan=plan, loss_only=True, **memory)
    optimizer = lohan_fx.AdamW(
        model.parameters(), lr=options.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=options.wd,
        fused=True, accumulation_steps=1,
    )  # fmt: skip
    gc.collect()
    tokens = harness.batches(options)
    engine, accounts = compiled(model).engine, compiled(model).memory
    if args.memory:
        accounts.watch()
    losses, seconds, peaks = [], [], [harness.status_kb("VmHWM")]
    warmup = LEAST_WARM_UP if plan or hw.device != "cpu" else REVISING + 1  # beside a GPU no plan is revised
    for step in range(warmup + args.steps):
        if step == warmup:
            read, written = engine.store.bytes_read, engine.store.bytes_written
        start_s = time.perf_counter()
        batch = next(tokens).to(hw.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(float(loss.detach()), 5))
        seconds.append(time.perf_counter() - start_s)
        peaks.append(harness.status_kb("VmHWM"))
        print(f"[lohan_fx] step {step} loss {losses[-1]:.4f} {seconds[-1]:.2f}s", file=sys.stderr, flush=True)
    found = compiled(model).plans[-1]
    check, prediction = compiled(model).checks.steps[-args.steps :], found.prediction
    assert prediction is not None
    figures = {
        "s_per_step": statistics.median(seconds[warmup:]),
        "peak_rss_bytes": peaks[-1],
        "peak_rss_after_bytes": peaks,
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if hw.device == "cuda" else 0,
        "losses": losses,
        "seconds": seconds[warmup:],
        "warm_up_s": seconds[:warmup],
        "host_memory_bytes": int(found.host_memory_bytes),
        "device_memory_bytes": int(found.device_memory_bytes),
        "before_bytes": before_bytes,
        "predicted_s": prediction.step_s,
        "predicted_peak_rss_bytes": before_bytes + prediction.peak_bytes["host"],
        "nvme_read_bytes": (engine.store.bytes_read - read) // args.steps,
        "nvme_written_bytes": (engine.store.bytes_written - written) // args.steps,
        "states_bytes": sum(STATE_BYTES * p.numel for p in found.parameters if p.trainable),
        "nvme_states_bytes": sum(STATE_BYTES * p.numel for p in found.parameters if p.states_home is Tier.NVME),
        "stages_s": {stage: statistics.median(s.stages_s[stage] for s in check) for stage in check[0].stages_s},
        "lanes_s": {
            stage: {lane: statistics.median(s.lanes_s[stage].get(lane, 0.0) for s in check) for lane in lanes}
            for stage, lanes in check[-1].lanes_s.items()
        },
        "predicted_lanes_s": {s: dict(getattr(prediction, s).lanes_s) for s in ("forward", "backward", "optimizer")},
    }
    if args.memory:
        report = accounts.report(found, args.peak_rss or 0)
        print(report, file=sys.stderr, flush=True)
        figures["memory"] = asdict(report)
    if args.save_plan is not None:
        args.save_plan.write_text(found.to_json())
    compiled(model).detach()
    return figures


def main() -> None:
    own, separator, options = _split(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("harness", type=Path)
    parser.add_argument("--hw", type=Path, required=True)
    parser.add_argument("--nvme", type=Path, required=True)
    limits = parser.add_mutually_exclusive_group(required=True)
    limits.add_argument("--host-memory", help="what the process may grow by")
    limits.add_argument("--peak-rss", type=int, help="what the whole process may have in RAM, in bytes")
    parser.add_argument("--device-memory", type=int, help="what it may take on the GPU, in bytes")
    parser.add_argument("--plan", type=Path, help="obey this plan instead of searching and revising one")
    parser.add_argument("--save-plan", type=Path, help="write the plan obeyed in the end")
    parser.add_argument("--steps", type=int, default=3, help="measured steps")
    parser.add_argument("--memory", action="store_true", help="tell where every byte of the peak went")
    args = parser.parse_args(own)
    if not separator:
        parser.error("the harness' options follow after --")
    harness = loaded(args.harness)
    torch.manual_seed(0)
    print(json.dumps(train(args, harness, options_of(harness, options))))


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], "--" in argv, argv[at + 1 :]


if __name__ == "__main__":
    main()
