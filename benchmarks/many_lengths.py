"""Batches of many lengths, as tokenizers make them: what graphs that hold for many sizes save, and whether the promise holds.

    python benchmarks/many_lengths.py --hw FILE --nvme DIR [--size demo --steps 32]

The same batches of random lengths, each way in a process of its own: graphs for many sizes (``dynamic=None``, the default),
graphs for each shape (``dynamic=False``), and all batches padded to the longest, which has one shape and computes more. Seconds
are those of all steps, captures included; a step without a capture is also given by itself. Bars: the first two have the same
losses, and nothing passes the promise (docs/0048).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from report import arguments, at_least_one, finish, in_a_process, own_folder, profile
from workload import LR, SIZES, Workload, dtype_argument, memory_bytes

import lohan_fx
from lohan_fx.compile import compiled

BATCH, SHORTEST, LONGEST = 8, 16, 128
MANY, EACH, PADDED = "many sizes", "each shape", "padded"
WAYS: dict[str, bool | None] = {MANY: None, EACH: False, PADDED: None}
OPTIONS = ("steps", "size", "dtype", "host_memory")


def lengths_of(steps: int) -> list[int]:
    random = torch.Generator().manual_seed(0)
    return torch.randint(SHORTEST, LONGEST + 1, (steps,), generator=random).tolist()


def measured(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, its loss, whether it captured, and the peak of memory against the promise."""
    hw, workload = profile(args), Workload(args.size, BATCH, LONGEST, dtype=args.dtype)
    model, tokens, lengths = workload.build(), workload.tokens(), lengths_of(args.steps)
    options: dict[str, Any] = {"compute_dtype": getattr(torch, args.dtype), "dynamic": WAYS[way], "revise": False}
    lohan_fx.compile(model, hw, nvme=[args.nvme], host_memory=args.host_memory, **options)
    seconds, losses, captured = [], [], []
    plan: lohan_fx.Plan | None = None
    with lohan_fx.releasing(model):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, fused=True, accumulation_steps=1)
        for length in lengths:
            begun_s = time.perf_counter()
            ids = tokens if way == PADDED else tokens[:, :length].contiguous()
            labels = ids.clone()
            labels[:, length:] = -100
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begun_s)
            before, plan = plan, compiled(model).plans[-1]
            captured.append(plan is not before)
        peak_bytes = memory_bytes("VmHWM")  # release brings the parameters into memory, on top of the promise
        promised_bytes = lohan_fx.Monitor(model).memory().promised_bytes
    # What a capture leaves is tidied up in the step after it.
    steady = [not any(captured[max(0, index - 1) : index + 1]) for index in range(args.steps)]
    alone = [s / BATCH / n for s, n, counts in zip(seconds, lengths, steady, strict=True) if counts]
    return {
        "case": way,
        "seconds": sum(seconds),
        "captures": sum(captured),
        "s_per_token": statistics.median(alone) if alone else None,
        "peak_rss_bytes": peak_bytes,
        "promised_rss_bytes": promised_bytes,
        "losses": losses,
    }


def said_of(found: dict[str, Any]) -> str:
    alone = "no step without a capture"
    if found["s_per_token"] is not None:
        alone = f"{1e3 * found['s_per_token']:.2f} ms a token without a capture"
    return (
        f"{found['seconds']:.0f} s with {found['captures']} captures; {alone}; "
        f"peak RSS {found['peak_rss_bytes'] / 2**20:,.0f} of {found['promised_rss_bytes'] / 2**20:,.0f} MiB"
    )


def missed(cases: dict[str, dict[str, Any]]) -> list[str]:
    found = [
        f"{way}: peak RSS {case['peak_rss_bytes']:,} passes the promise, {case['promised_rss_bytes']:,}"
        for way, case in cases.items()
        if case["peak_rss_bytes"] > case["promised_rss_bytes"]
    ]
    if cases[MANY]["losses"] != cases[EACH]["losses"]:
        found.append("graphs for many sizes and for each shape have other losses")
    return found


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--steps", type=at_least_one, default=32)
    parser.add_argument("--host-memory", default="1GiB")
    dtype_argument(parser)
    parser.add_argument("--case", choices=WAYS, help="internal: which way this process trains")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args.case, args)))
        return
    with own_folder(args):
        path = args.nvme / "profile.toml"
        profile(args).save(path)
        cases = {way: in_a_process(__file__, way, args, path, OPTIONS) for way in WAYS}
    saved = cases[EACH]["seconds"] / cases[MANY]["seconds"]
    rows = [(way, said_of(found)) for way, found in cases.items()]
    rows.append(("each shape / many sizes", f"{saved:.2f}x"))
    figures = {"size": args.size, "batch": BATCH, "steps": args.steps, "host_memory": args.host_memory}
    figures |= {"each_over_many": saved, "padded_over_many": cases[PADDED]["seconds"] / cases[MANY]["seconds"]}
    finish("many_lengths", rows, {**figures, "cases": list(cases.values())}, missed(cases), save=args.save)


if __name__ == "__main__":
    main()
