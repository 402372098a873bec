"""Every storage in host memory counts once, whoever holds it."""

from __future__ import annotations

import torch

from lohan_fx.runtime.memory_use import held_use, resident_use, storage_bytes
from lohan_fx.runtime.slots import Held, Residency

NUMEL = 100
FP32, BF16 = 4 * NUMEL, 2 * NUMEL


def flat(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(NUMEL, dtype=dtype)


def test_a_master_that_is_the_parameter_counts_with_the_parameters() -> None:
    master = flat()
    apart = Residency(compute=flat(torch.bfloat16), master=flat(), exp_avg=flat(), exp_avg_sq=flat())
    one = Residency(compute=master, master=master, exp_avg=flat(), exp_avg_sq=flat())
    assert resident_use({0: apart}) == (BF16, 3 * FP32)
    assert resident_use({0: one}) == (FP32, 2 * FP32)
    assert resident_use({0: apart, 1: one, 2: Residency()}) == (BF16 + FP32, 5 * FP32)


def test_gradients_count_where_they_are_held_and_where_they_leave() -> None:
    held = Held(torch.float32, memory=flat())
    away = Residency(held=Held(torch.float32))
    residency = {0: Residency(held=held), 1: away, 2: Residency()}
    nowhere = (0, 0)
    assert held_use(residency, [], nowhere) == (FP32, 0)
    assert held_use(residency, [held.memory, None], nowhere) == (FP32, 0)
    leaving = flat(torch.bfloat16)
    assert held_use(residency, [leaving], nowhere) == (FP32 + BF16, 0)
    assert held_use(residency, [leaving], (leaving.data_ptr(), BF16)) == (FP32 + BF16, BF16)


def test_only_host_memory_counts_and_views_count_as_what_they_show() -> None:
    whole = flat()
    assert storage_bytes([whole, whole[:1], whole[50:]]) == FP32
    assert storage_bytes([None, torch.empty(NUMEL, device="meta")]) == 0
