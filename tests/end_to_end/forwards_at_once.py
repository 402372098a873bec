"""A process of its own for ``test_several_forwards`` and ``test_held_outputs``: each loss is of several calls of one model. It
prints one JSON line: its losses, the peak of each step's resident memory and what it may be, and how many forwards the plan in
force counts. Internal."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import lohan_fx
from lohan_fx.compile import compiled
from tests.end_to_end.recipes import LR, profile_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3
BATCH_OF = {4: 8, 2: 16}
"""By the bytes of an element: what graphs keep takes as many bytes with either."""
TOKENS = 512
LLAMA = {
    "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "use_cache": False,
}  # fmt: skip
"""Narrow: few operations per byte of activations. The logits of 1024 words take 16 MiB, which a heap has holes for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nvme", type=Path)
    parser.add_argument("--host-memory", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--calls", type=int, default=1, help="forwards before each backward")
    parser.add_argument("--said", type=int, default=1, help="what compile is told of them")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--holds", action="store_true", help="the outputs of all calls, until after the next ones")
    parser.add_argument("--loss-only", action="store_true", help="what compile is told of that")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=args.vocabulary, **LLAMA))
    batches = torch.randint(0, args.vocabulary, (args.calls, BATCH_OF[dtype.itemsize], TOKENS))
    options = {"nvme": args.nvme, "host_memory": args.host_memory, "forwards": args.said, "loss_only": args.loss_only}
    lohan_fx.compile(model, profile_of("cpu"), compute_dtype=dtype, revise=False, **options)
    losses, peaks = [], []
    with lohan_fx.releasing(model), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, fused=True)
        for _ in range(STEPS):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            if args.holds:
                outputs = [model(input_ids=ids, labels=ids) for ids in batches]
                loss = sum((one.loss for one in outputs), torch.zeros(()))
            else:
                loss = sum((model(input_ids=ids, labels=ids).loss for ids in batches), torch.zeros(()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            peaks.append(_peak_bytes())
        promised_bytes = lohan_fx.Monitor(model).memory().promised_bytes
        plan = compiled(model).plans[-1]
    texts = [str(one.message) for one in warned]
    found = {
        "losses": losses,
        "peaks": peaks,
        "promised_bytes": promised_bytes,
        "forwards": plan.forwards,
        "warned_of_forwards": [text for text in texts if "wait for their backwards" in text],
        "warned_of_outputs": [text for text in texts if "loss_only=True" in text],
    }
    print(json.dumps(found))


def trained(nvme: Path, options: str) -> dict[str, Any]:
    """What it prints, run in a process of its own with ``options``."""
    command = [sys.executable, "-m", "tests.end_to_end.forwards_at_once", str(nvme), *options.split()]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
