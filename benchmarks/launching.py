"""What lanes take from the thread that launches: a deep model of tiny layers, whose step is all Python.

    python benchmarks/launching.py [--layers 24 --rounds 15]

The same step with nothing to move, with all in host memory and with all on NVMe, copied as beside a GPU and updated on the
cpu lane. On a CPU, with one compute thread, which stands for the one that launches a GPU's kernels: it wants the interpreter
between any two ops, and so do the lanes (docs/0043). Each case is a process of its own. No bar: what counts is before and after.
Foretold is what plans for a GPU count: so many jobs, and ``interpreter_s_per_job`` for each (docs/0044).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import resource
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from report import arguments, at_least_one, finish, in_a_process, own_folder, profile
from transformers import LlamaConfig, LlamaForCausalLM

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.lane_jobs import jobs_of_parameter
from lohan_fx.passes.traffic import fetch_counts
from lohan_fx.plan import OptimizerTiming, Plan, Tier
from lohan_fx.runtime import machine
from lohan_fx.runtime.device_link import CpuLink
from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer

WIDTH, TOKENS = 128, 16
IN_PLACE = "in place"
HOMES = {
    IN_PLACE: (Tier.DEVICE, Tier.HOST),
    "in host memory": (Tier.HOST, Tier.HOST),
    "on NVMe": (Tier.NVME, Tier.NVME),
}
"""Of parameters and of states."""


def tiny_llama(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


@contextlib.contextmanager
def as_beside_a_gpu(case: str) -> Iterator[list[str]]:
    """Parameters and gradients are copied, and updates a lane's; the lanes of the jobs, as they come."""
    jobs: list[str] = []
    submit = Lane.submit

    def noted(lane: Lane, *args: Any, **options: Any) -> Any:
        jobs.append(lane.name)
        return submit(lane, *args, **options)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(Lane, "submit", noted))
        if case != IN_PLACE:
            patches.enter_context(mock.patch.object(machine, "link_to", lambda device: CpuLink(shares_memory=False)))
            patches.enter_context(mock.patch.object(OutOfCoreOptimizer, "_in_memory", lambda *_: False))
        yield jobs


def jobs_of_a_step(halves: Halves, plan: Plan) -> int:
    """Of the lanes beside a GPU, those after the last launch too."""
    counts, early = fetch_counts(halves), OptimizerTiming.IN_BACKWARD
    each = (jobs_of_parameter(p, counts.get(p.name, (0, 0)), early, plan.windows) for p in plan.parameters)
    return sum(forward + backward for forward, backward in each)


def measured(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, processor seconds, jobs and context switches of a step."""
    torch.set_num_threads(1)
    hw, ids = profile(args), torch.randint(0, 512, (1, TOKENS))
    options: dict[str, Any] = {"host_memory": "3GiB", "compute_dtype": torch.bfloat16}
    with as_beside_a_gpu(case) as jobs:
        with lohan_fx.releasing(lohan_fx.compile(tiny_llama(args.layers), hw, policy="keep", **options)) as model:
            plan = lohan_fx.prepare(model, input_ids=ids, labels=ids)
        torch._dynamo.reset()
        plan = dataclasses.replace(plan.with_homes(*HOMES[case]), prediction=None)
        with lohan_fx.releasing(lohan_fx.compile(tiny_llama(args.layers), hw, plan=plan, **options)) as model:
            optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-4, fused=True, accumulation_steps=1)

            def step() -> float:
                begun_s = time.perf_counter()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return time.perf_counter() - begun_s

            for _ in range(3):
                step()
            (halves,) = compiled(model).halves
            jobs.clear()
            before = resource.getrusage(resource.RUSAGE_SELF)
            seconds = statistics.median(step() for _ in range(args.rounds))
            after, given = resource.getrusage(resource.RUSAGE_SELF), len(jobs)
    # In place stands for what nothing can be taken from, so that it has no lanes.
    foretold = 0 if case == IN_PLACE else jobs_of_a_step(halves, plan)
    return {
        "case": case,
        "step_s": seconds,
        "processor_s": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / args.rounds,
        "jobs": given / args.rounds,
        "foretold_jobs": foretold,
        "foretold_s": foretold * hw.interpreter_s_per_job,
        "switches": (after.ru_nvcsw - before.ru_nvcsw) / args.rounds,
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=at_least_one, default=24)
    parser.add_argument("--rounds", type=at_least_one, default=15)
    parser.add_argument("--case", choices=HOMES, help="internal: which case this process measures")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args.case, args)))
        return
    with own_folder(args):
        path = args.nvme / "profile.toml"
        profile(args).save(path)
        cases = [in_a_process(__file__, case, args, path, ("layers", "rounds")) for case in HOMES]
    in_place_s = cases[0]["step_s"]
    rows = [
        (
            found["case"],
            f"{found['step_s'] * 1e3:.0f} ms, {(found['step_s'] - in_place_s) * 1e3:+.0f} (foretold "
            f"{found['foretold_s'] * 1e3:+.0f}); processor {found['processor_s'] * 1e3:.0f} ms; {found['jobs']:,.0f} jobs "
            f"(foretold {found['foretold_jobs']:,.0f}), {found['switches']:,.0f} switches",
        )
        for found in cases
    ]
    finish("launching", rows, {"layers": args.layers, "cases": cases}, [], save=args.save)


if __name__ == "__main__":
    main()
