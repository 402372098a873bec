"""A process of its own for ``test_memory_report``: trains, and prints its memory report as one JSON line. Internal."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

import lohan_fx
from tests.end_to_end.recipes import LR, profile_of, usual_dtype

STEPS = 4
LLAMA = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "use_cache": False,
}  # fmt: skip


def main(nvme: Path, policy: str, host_memory: str, device: str = "cpu") -> None:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    tokens = torch.randint(0, LLAMA["vocab_size"], (4, 128)).to(device)
    options = {"nvme": nvme, "host_memory": host_memory, "policy": policy, "revise": False}
    lohan_fx.compile(model, profile_of(device), compute_dtype=usual_dtype(), **options)
    with lohan_fx.releasing(model):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=1)
        lohan_fx.prepare(model, input_ids=tokens, labels=tokens)
        monitor = lohan_fx.Monitor(model)
        for _ in range(STEPS):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        before_bytes = monitor.step().peak_rss_bytes
        report = monitor.memory()
        after_bytes = monitor.step().peak_rss_bytes
        gpu_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        assert monitor.plan is not None and monitor.plan.prediction is not None
        planned_bytes = monitor.plan.prediction.peak_bytes["device"]
    found = {"hwm_bytes": [before_bytes, after_bytes], "gpu_bytes": gpu_bytes, "planned_gpu_bytes": planned_bytes}
    print(json.dumps({**asdict(report), **found, "text": str(report)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
