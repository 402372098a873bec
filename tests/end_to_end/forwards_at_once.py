"""A process of its own for ``test_several_forwards``: each loss is of several calls of one model. It prints one JSON line: its
losses, the peak of each step's resident memory and what it may be, and how many forwards the plan in force counts. Internal."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import transformers

import lohan_fx
from lohan_fx.compile import compiled
from tests.end_to_end.recipes import LR, profile_of

STEPS = 3
BATCH, TOKENS = 8, 512
LLAMA = {
    "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
"""Narrow: few operations per byte of activations. The logits take 16 MiB, which a heap has holes for."""


def main(nvme: Path, host_memory: str, calls: str, said: str, dtype: str) -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    batches = torch.randint(0, LLAMA["vocab_size"], (int(calls), BATCH, TOKENS))
    options = {"nvme": nvme, "host_memory": host_memory, "revise": False, "forwards": int(said)}
    lohan_fx.compile(model, profile_of("cpu"), compute_dtype=getattr(torch, dtype), **options)
    losses, peaks = [], []
    with lohan_fx.releasing(model), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, fused=True)
        for _ in range(STEPS):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            loss = sum((model(input_ids=ids, labels=ids).loss for ids in batches), torch.zeros(()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            peaks.append(_peak_bytes())
        promised_bytes = lohan_fx.Monitor(model).memory().promised_bytes
        plan = compiled(model).plans[-1]
    told = [str(one.message) for one in warned if "wait for their backwards" in str(one.message)]
    found = {
        "losses": losses,
        "peaks": peaks,
        "promised_bytes": promised_bytes,
        "forwards": plan.forwards,
        "warned": told,
    }
    print(json.dumps(found))


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
