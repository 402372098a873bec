"""A model that compiles in a moment and a profile of this machine, for tests of what is around the numbers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from lohan_fx.hardware import HardwareProfile

WIDTH = 16
LAYERS = 3


class Tiny(nn.Module):
    """``LAYERS`` linear layers; the loss of a batch of ``WIDTH`` numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch(seed: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def profile(**changes: Any) -> HardwareProfile:
    """Rates of an ordinary desktop, said to be measured here."""
    known: dict[str, Any] = {
        "name": "tiny",
        "device": "cpu",
        "device_name": "cpu",
        "cpu_name": "cpu",
        "cpu_cores": 2,
        "matmul_flops_per_s": {"float32": 1e11, "bfloat16": 2e11, "float16": 1e11},
        "memory_bytes_per_s": 1e10,
        "host_memory_bytes_per_s": 1e10,
        "h2d_bytes_per_s": 5e9,
        "d2h_bytes_per_s": 5e9,
        "adam_parameters_per_s": 4e8,
        "device_memory_bytes": 8 << 30,
        "host_memory_bytes": 8 << 30,
        "nvme": (),
        "op_overhead_s": 1e-5,
        "measured_at": "",
        "versions": {},
        "machine": HardwareProfile.fingerprint(),
    }
    return HardwareProfile(**{**known, **changes})


class Plain:
    """A copy of ``model`` trained by plain PyTorch, to compare with."""

    def __init__(self, model: nn.Module, lr: float = 0.01) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, foreach=False)

    def step(self, *batches: torch.Tensor) -> list[float]:
        """One step over ``batches``; their losses."""
        losses = [self.model(x) for x in batches]
        for loss in losses:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses]


def same_weights(model: nn.Module, plain: nn.Module) -> None:
    expected = plain.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), f"{name} differs from plain PyTorch's"
