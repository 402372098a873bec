"""``host_memory`` binds in every phase: compiling, planning, training, evaluating, keeping a checkpoint and resuming it.

    python benchmarks/within_promise.py [--nvme DIR --size demo --layers 17 --host-memory 512MiB --accumulation 1 --clip] [--save]

The model is built on ``meta``. One process trains and makes a checkpoint, a second one resumes it and must go on with the
same losses. Each joins a control group before ``compile`` in which the kernel gives it the promise and nothing more. Where
this user may not make one, each runs under RLIMIT_DATA: what it had mapped before ``compile``, the promise, and
``UNTOUCHED_BYTES``. Bar: what the process grows by after ``compile`` began stays below the promise.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from memory_group import join, memory_group, peak_bytes
from report import arguments, at_least_one, finish, own_folder, profile
from workload import LR, SIZES, Workload, dtype_argument

import lohan_fx
from lohan_fx import process_memory
from lohan_fx.compile import compiled
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planning.budgets import parse_bytes

UNTOUCHED_BYTES = 128 << 20
"""Address space that RLIMIT_DATA counts and nobody touches: 8 MiB for the stack of each thread, holes in the heap."""
BYTES_PER_PARAMETER = 14
STEPS = 2


def built(args: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    """The model on ``meta``, and its tokens."""
    workload = Workload(args.size, args.batch, args.seq, layers=args.layers, dtype=args.dtype)
    return workload.build_on_meta(), workload.tokens()


def compile_options(args: argparse.Namespace) -> dict[str, Any]:
    dtype = getattr(torch, args.dtype)
    return {"nvme": [args.nvme], "compute_dtype": dtype, "revise": False, "hold_gradients": args.clip or None}


class Phases:
    """What the process grew by at the peak of each phase, since this was made."""

    def __init__(self) -> None:
        self.before_bytes = process_memory.rss_bytes()
        self.growth: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if not process_memory.forget_peak_rss():
            sys.exit("this kernel does not let a process forget its peak RSS (/proc/self/clear_refs)")
        yield
        self.growth[name] = process_memory.peak_rss_bytes() - self.before_bytes


def limit_data(more_bytes: int) -> None:
    """From here on the kernel refuses this process more than ``more_bytes`` beside what it has mapped."""
    status = Path("/proc/self/status").read_text().splitlines()
    mapped = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (mapped + more_bytes, resource.RLIM_INFINITY))


def child(args: argparse.Namespace, *, resumes: bool) -> None:
    """Train, or resume and train; prints its figures as one JSON line."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model, tokens = built(args)
    hw, losses = HardwareProfile.load(args.hw), []
    refused: dict[str, str] = {}
    phase = Phases()
    promise = parse_bytes(args.host_memory, "host_memory")
    if args.group is None:
        limit_data(promise + UNTOUCHED_BYTES)
    else:
        join(args.group, promise)
    with phase("compile"):
        keeps: dict[str, Any] = {"resume_from_checkpoint": True} if resumes else {"checkpoints": 1}
        lohan_fx.compile(model, hw, host_memory=args.host_memory, **compile_options(args), **keeps)
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, fused=True)
        if resumes:
            lohan_fx.resume(model, optimizer)
    with phase("prepare"):
        plan = lohan_fx.prepare(model, input_ids=tokens, labels=tokens)

    def steps() -> None:
        for _ in range(STEPS):
            for _ in range(args.accumulation):
                outputs = model(input_ids=tokens, labels=tokens)  # held until the next ones are there
                loss = outputs.loss / args.accumulation
                loss.backward()
            if args.clip:
                lohan_fx.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    if not resumes:
        with phase("steps"):
            steps()
        with phase("evaluation"), torch.no_grad():
            try:
                model(input_ids=tokens)
            except InfeasiblePlan as error:  # a second graph's capture; training goes on
                refused["evaluation"] = str(error)
        with phase("checkpoint"):
            lohan_fx.checkpoint(model, optimizer)
    with phase("steps after the checkpoint"):
        steps()
    states = BYTES_PER_PARAMETER * sum(p.numel for p in plan.parameters)
    compiled(model).detach()
    group_bytes = peak_bytes(args.group) if args.group is not None else None
    found = {
        "growth_bytes": phase.growth,
        "group_bytes": group_bytes,
        "grouped": args.group is not None,
        "losses": losses,
        "refused": refused,
        "state_bytes": states,
    }
    print(json.dumps(found))


def parser_of(text: str) -> argparse.ArgumentParser:
    """The options of a training; ``text`` describes the command."""
    parser = arguments(text)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--layers", type=int, help="as many layers instead of those of --size")
    dtype_argument(parser)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--accumulation", type=at_least_one, default=1, help="backwards of a step")
    parser.add_argument("--clip", action="store_true", help="by the gradients' norm")
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--child", choices=("train", "resume"), help="internal: the measured process")
    parser.add_argument("--group", type=Path, help="internal: the folder of its control group")
    return parser


def main() -> None:
    args = parser_of(__doc__ or "").parse_args()
    if args.child:
        child(args, resumes=args.child == "resume")
        return
    with own_folder(args):
        hw, path = profile(args), args.nvme / "profile.toml"
        hw.save(path)
        rows, figures, missed = measured(args, path, sys.argv[1:])
        missed += [f"{name}: {error}" for name, error in figures["refused"].items()]
    finish("within_promise", rows, figures, missed, save=args.save)


def measured(
    args: argparse.Namespace, hw: Path, options: list[str]
) -> tuple[list[tuple[str, str]], dict[str, Any], list[str]]:
    """(lines to print, figures, what is missed) of a training and its resume by ``options``, which ``args`` are."""
    trained, resumed = (_run(what, args.nvme, hw, options) for what in ("train", "resume"))
    promise = parse_bytes(args.host_memory, "host_memory")
    growth = trained["growth_bytes"] | {f"{name}, resumed": n for name, n in resumed["growth_bytes"].items()}
    most = max(growth.values())
    missed = [f"{name}: {n:,} bytes, {promise:,} promised" for name, n in growth.items() if n >= promise]
    if resumed["losses"] != trained["losses"][-STEPS:]:
        missed.append("the resumed training has other losses")
    grouped = trained["grouped"] and resumed["grouped"]
    bound_by = "a control group of the promise" if grouped else "RLIMIT_DATA"
    rows = [("promise", f"{promise / 1e6:,.0f} MB, states {trained['state_bytes'] / 1e6:,.0f} MB; by {bound_by}")]
    refused: dict[str, str] = trained["refused"]
    rows += [(name, f"{n / 1e6:,.0f} MB{', refused' * (name in refused)}") for name, n in growth.items()]
    figures: dict[str, Any] = {"promise_bytes": promise, "most_bytes": most, "state_bytes": trained["state_bytes"]}
    figures |= {
        "untouched_bytes": 0 if grouped else UNTOUCHED_BYTES,
        "growth_bytes": growth,
        "losses": trained["losses"],
        "refused": refused,
    }
    figures |= {"bound_by": bound_by, "group_bytes": [trained["group_bytes"], resumed["group_bytes"]]}
    return rows, figures, missed


def _run(what: str, nvme: Path, hw: Path, options: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *options, "--child", what, "--nvme", str(nvme), "--hw", str(hw)]
    with memory_group() as group:
        run = subprocess.run([*command, *(["--group", str(group)] if group else [])], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        killed = (
            " (killed: the group was to hold more than the promise)"
            if group and run.returncode == -signal.SIGKILL
            else ""
        )
        sys.exit(f"the process that was to {what} ended with {run.returncode}{killed}")
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
