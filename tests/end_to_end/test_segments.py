"""Training with compiled segments gives the numbers of training without, dropout's included, in bf16 and fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lohan_fx import inductor
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.halves import Halves
from tests.end_to_end.models import GPT2_SHALLOW, LLAMA, PERCEPTRON, Case
from tests.end_to_end.recipes import assert_same, streamed

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "dtype", "policy"),
    [
        (PERCEPTRON, torch.bfloat16, "swap-nvme"),
        pytest.param(GPT2_SHALLOW, torch.float32, "keep", marks=SLOW),
        pytest.param(GPT2_SHALLOW, torch.bfloat16, "recompute", marks=SLOW),
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
