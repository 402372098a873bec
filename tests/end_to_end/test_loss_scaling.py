"""fp16 with dynamic loss scaling: the recipe of plain PyTorch, and a step that overflows changes nothing.

The recipe: weights and activations in fp16, fp32 masters, gradients cast to fp32 as they arrive, unscaled and clipped
there. It is traced by ``aot_eager``, as for bf16; with the same fp16 kernels the results are bit-equal.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import StepError
from tests.end_to_end.models import LLAMA, PERCEPTRON, Case, vectors
from tests.end_to_end.recipes import LR, MasterAdamW, assert_same_weights, weights_of

pytestmark = pytest.mark.usefixtures("leak_check", "little_is_small")

GROWTH_STEPS = 3
MAX_NORM = 0.5


def scaled_steps(
    model: Any, optimizer: Any, case: Case, steps: int, *, clips: Any = None, scaler: Any = None
) -> list[tuple[float, float, float]]:
    """(loss, scale after the step, norm) of each step."""
    torch.manual_seed(1)
    scaler = scaler or lohan_fx.GradScaler(init_scale=2.0**17, growth_interval=GROWTH_STEPS)
    found = []
    for _ in range(steps):
        loss = model(**case.batch()).loss
        scaler.scale(loss).backward()
        norm = 0.0
        if clips is not None:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(clips, MAX_NORM).nan_to_num(-1.0, -1.0, -1.0).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((loss.item(), scaler.get_scale(), norm))
    return found


@pytest.mark.parametrize(
    ("case", "clipped"), [(PERCEPTRON, False), (PERCEPTRON, True), pytest.param(LLAMA, True, marks=pytest.mark.slow)]
)
def test_fp16_is_bit_equal_to_its_recipe(case: Case, clipped: bool, on_nvme: Any) -> None:
    reference, model = case.build(), case.build()
    master = MasterAdamW(reference, torch.float16, lr=LR)
    call = torch.compile(reference, backend="aot_eager", dynamic=False)
    expected = scaled_steps(call, master, case, 8, clips=list(master.masters.values()) if clipped else None)
    torch._dynamo.reset()
    with on_nvme(model, torch.float16):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        found = scaled_steps(model, optimizer, case, 8, clips=list(model.parameters()) if clipped else None)
    assert found == expected
    if case is PERCEPTRON:
        scales = [scale for _, scale, _ in expected]
        assert min(scales) < 2.0**17 and any(later > scale for scale, later in itertools.pairwise(scales))
    assert_same_weights(weights_of(model), {name: m.detach() for name, m in master.masters.items()})


@pytest.mark.parametrize("scaler_of", [lohan_fx.GradScaler, torch.amp.GradScaler], ids=["ours", "torch's"])
def test_a_step_that_overflows_changes_nothing_and_writes_nothing(scaler_of: Any, on_nvme: Any) -> None:
    with on_nvme(PERCEPTRON.build(), torch.float16) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        scaler = scaler_of("cpu", init_scale=64.0)
        scaled_steps(model, optimizer, PERCEPTRON, 2, scaler=scaler)
        before = state(model, optimizer)
        written = compiled(model).engine.store.bytes_written
        scaler.update(2.0**30)
        scaled_steps(model, optimizer, PERCEPTRON, 1, scaler=scaler)
        assert compiled(model).engine.store.bytes_written == written
        torch.testing.assert_close(state(model, optimizer), before, rtol=0.0, atol=0.0)
        assert scaler.get_scale() == 2.0**29
        scaler.update(64.0)
        scaled_steps(model, optimizer, PERCEPTRON, 1, scaler=scaler)
        assert optimizer.state_dict()["state"][0]["step"] == 3.0


def state(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        found.update({f"{index}.{name}": value.clone() for name, value in entry.items()})
    return found


def test_several_backwards_are_summed_scaled_and_unscaled_once(on_nvme: Any) -> None:
    def run(model: Any, optimizer: Any) -> None:
        torch.manual_seed(1)
        scaler = lohan_fx.GradScaler(init_scale=256.0)
        for _ in range(3):
            for _ in range(2):
                scaler.scale(model(**vectors()).loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    reference, model = PERCEPTRON.build(), PERCEPTRON.build()
    master = MasterAdamW(reference, torch.float16, lr=LR)
    run(torch.compile(reference, backend="aot_eager", dynamic=False), master)
    torch._dynamo.reset()
    with on_nvme(model, torch.float16):
        run(model, lohan_fx.AdamW(model.parameters(), lr=LR))
    assert_same_weights(weights_of(model), {name: m.detach() for name, m in master.masters.items()})


def test_a_scaler_where_updates_run_in_the_backward(on_nvme: Any) -> None:
    with on_nvme(PERCEPTRON.build(), torch.bfloat16) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=1)
        scaler = lohan_fx.GradScaler(init_scale=2.0)
        scaler.scale(model(**vectors()).loss).backward()
        with pytest.raises(StepError, match=r"inside the backward.*hold_gradients=True"):
            scaler.step(optimizer)
        optimizer.step()
