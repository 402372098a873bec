"""Training with compiled segments gives the numbers of training without, dropout's included, in bf16 and fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lohan_fx import inductor
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.halves import Halves
from tests.end_to_end.models import LLAMA, Case, Output
from tests.end_to_end.recipes import assert_same, streamed

SLOW = pytest.mark.slow


class Residual(nn.Module):
    """Equal blocks with dropout, which a compiler handles in seconds. ``forward(x (B, 64))``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Output:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = F.dropout(torch.relu(layer(x)) * 0.5 + x, 0.1)
        return Output(x.square().mean(), x)


RESIDUAL = Case("residual", Residual, lambda: {"x": torch.randn(32, 64)})


@pytest.mark.parametrize(
    ("case", "dtype", "policy"),
    [
        (RESIDUAL, torch.float32, "recompute"),
        pytest.param(LLAMA, torch.bfloat16, "swap-nvme", marks=SLOW),
    ],
    ids=str,
)
def test_compiled_segments_change_no_bit(
    case: Case, dtype: torch.dtype, policy: str, hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    original = inductor.compile_segments

    def watching(halves: Halves, *args: object) -> None:
        original(halves, *args)  # type: ignore[arg-type]
        used.append(sum(map(len, halves.compiled.values())))

    monkeypatch.setattr(inductor, "compile_segments", watching)
    boxed = streamed(case, hw, tmp_path, 3, dtype=dtype, policy=policy)
    assert not used
    found = streamed(case, hw, tmp_path, 3, dtype=dtype, policy=policy, segments="inductor")
    assert used and used[0] > 0
    assert_same(found, boxed)
