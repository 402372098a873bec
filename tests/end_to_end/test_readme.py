"""The README's example, as it is printed: a folder of Hugging Face's in, training by streaming, numbers as plain PyTorch's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import lohan_fx
from tests.end_to_end.recipes import cpu_profile

README = Path(__file__).resolve().parents[2] / "README.md"
ASKED = 'weights="folder", host_memory="16GiB"'


def test_the_first_example_trains_as_plain_pytorch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cpu_profile().save("hw.toml")
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained("folder")
    loader = [dict.fromkeys(("input_ids", "labels"), torch.randint(0, 64, (2, 16))) for _ in range(3)]
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert code.count(ASKED) == 1
    code = code.replace(ASKED, 'weights="folder", host_memory="2GiB", nvme=".", compute_dtype=torch.float32')
    names: dict[str, Any] = {"loader": loader}
    exec(code, names)
    trained = lohan_fx.release(names["model"])
    plain = LlamaForCausalLM.from_pretrained("folder", dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=True)
    for batch in loader:
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True))
