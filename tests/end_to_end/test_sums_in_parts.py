"""An update with the sum of several backwards, of a chunk worked on in parts: what graphs compute with is the master, cast."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import lohan_fx
from lohan_fx.hardware import HardwareProfile


def test_each_part_of_the_compute_copy_is_the_master_cast(hw: HardwareProfile, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1024, 1024, bias=False)
    options = {"compute_dtype": torch.bfloat16, "host_memory": "2GiB", "policy": "swap-nvme"}
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, **options)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2, accumulation_steps=2)
        inputs = torch.eye(1024, dtype=torch.bfloat16)
        for _ in range(2):
            for _ in range(2):
                model(inputs).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            computed = model(inputs)  # the weight, transposed
        master = model.state_dict()["weight"]
    assert torch.equal(computed.t(), master.to(torch.bfloat16))
