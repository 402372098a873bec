"""The optimizer's chunks do not show in the numbers: parameters of awkward sizes, every option of Adam, any chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.runtime import adam
from tests.end_to_end.models import PERCEPTRON, Batch, Case, Output
from tests.end_to_end.recipes import assert_same_weights, train, weights_of
from tests.exhaustive import combinations

pytestmark = pytest.mark.usefixtures("leak_check")

SIZES = (1, 3, 511, 513, 4095, 4097, 12289)
CHUNKS = (4096, 8192, 1 << 20)
STEPS = 3

Groups = Callable[[nn.Module], Any]


class Odd(nn.Module):
    """Parameters of sizes that no chunk, page or vector divides, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in SIZES)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> Output:
        # The mean of each piece on its own: a gradient of the same size whatever the piece's.
        parts = torch.stack([(piece * x[: piece.numel()]).tanh().mean() for piece in self.pieces])
        prediction = self.scale * parts
        return Output(prediction.square().sum(), prediction)


def _batch() -> Batch:
    return {"x": torch.randn(max(SIZES))}


ODD = Case("odd", Odd, _batch)


def _no_decay_on_small(model: nn.Module) -> list[dict[str, Any]]:
    small = [p for p in model.parameters() if p.numel() < 512]
    large = [p for p in model.parameters() if p.numel() >= 512]
    return [{"params": large, "weight_decay": 0.3}, {"params": small, "weight_decay": 0.0, "lr": 3e-3}]


VARIANTS: dict[str, tuple[str, Groups, dict[str, Any]]] = {
    "adamw": ("AdamW", nn.Module.parameters, {"weight_decay": 0.1}),
    "adamw-fused": ("AdamW", nn.Module.parameters, {"weight_decay": 0.1, "fused": True}),
    "adam-l2": ("Adam", nn.Module.parameters, {"weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
    "adam-l2-fused": ("Adam", nn.Module.parameters, {"weight_decay": 0.1, "fused": True}),
    "groups": ("AdamW", _no_decay_on_small, {"weight_decay": 0.05}),
    "maximize": ("AdamW", nn.Module.parameters, {"maximize": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk_elements", CHUNKS)
def test_chunks_do_not_change_the_update(
    chunk_elements: int, variant: str, hw: HardwareProfile, tmp_path: Path
) -> None:
    name, groups, options = VARIANTS[variant]
    expected = ODD.build()
    expected_losses = train(expected, getattr(torch.optim, name)(groups(expected), lr=1e-2, **options), ODD, STEPS)
    model = ODD.build()
    plan = _chunked(hw, tmp_path, chunk_elements)
    with lohan_fx.releasing(_compile(model, hw, tmp_path, plan=plan)):
        losses = train(model, getattr(lohan_fx, name)(groups(model), lr=1e-2, **options), ODD, STEPS)
        _assert_cut(model, chunk_elements)
    assert losses == expected_losses
    assert_same_weights(weights_of(model), weights_of(expected))


@pytest.mark.parametrize(("variant", "accumulated", "max_norm"), combinations(list(VARIANTS), [1, 2], [None, 1e-3]))
def test_parts_of_a_chunk_do_not_change_the_update(
    max_norm: float | None,
    accumulated: int,
    variant: str,
    hw: HardwareProfile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 64 elements by each thread: the casts, the sums and the factors of one part leave the others alone."""
    name, groups, options = VARIANTS[variant]

    def trained(loop_elements: int) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(adam, "LOOP_ELEMENTS", loop_elements)
        model = ODD.build()
        lohan_fx.compile(
            model, hw, nvme=tmp_path, host_memory="2GiB", policy="keep", compute_dtype=torch.bfloat16,
            hold_gradients=max_norm is not None,
        )  # fmt: skip
        with lohan_fx.releasing(model):
            optimizer = getattr(lohan_fx, name)(groups(model), lr=1e-2, accumulation_steps=accumulated, **options)
            torch.manual_seed(1)
            for number in range(2 * accumulated):
                model(**ODD.batch()).loss.backward()
                if number % accumulated == accumulated - 1:
                    if max_norm is not None:
                        lohan_fx.clip_grad_norm_(model, max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
        return weights_of(model)

    assert_same_weights(trained(64), trained(1 << 18))


def test_every_variant_gives_other_numbers() -> None:
    """Or the test above could not tell them apart."""
    ends = []
    for name, groups, options in VARIANTS.values():
        model = ODD.build()
        train(model, getattr(torch.optim, name)(groups(model), lr=1e-2, **options), ODD, STEPS)
        ends.append(torch.cat([p.flatten() for p in weights_of(model).values()]))
    for index, end in enumerate(ends):
        assert not any(torch.equal(end, other) for other in ends[:index])


def test_a_scheduler_changes_the_rate_of_every_step(hw: HardwareProfile, tmp_path: Path) -> None:
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    expected_losses = _scheduled(expected, torch.optim.AdamW(expected.parameters(), lr=1e-2))
    with lohan_fx.releasing(_compile(model, hw, tmp_path)):
        losses = _scheduled(model, lohan_fx.AdamW(model.parameters(), lr=1e-2))
    assert losses == expected_losses
    assert_same_weights(weights_of(model), weights_of(expected))


def _scheduled(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(1)
    losses = []
    for _ in range(4):
        losses += train(model, optimizer, PERCEPTRON, 1, seed=None)
        scheduler.step()
    return losses


def _compile(model: nn.Module, hw: HardwareProfile, nvme: Path, **options: Any) -> nn.Module:
    return lohan_fx.compile(
        model, hw, nvme=nvme, compute_dtype=torch.float32, host_memory="2GiB", **({"policy": "keep"} | options)
    )


def _chunked(hw: HardwareProfile, nvme: Path, chunk_elements: int) -> Plan:
    """A plan with everything on NVMe and the smallest transfers."""
    model = ODD.build()
    with lohan_fx.releasing(_compile(model, hw, nvme)):
        plan = lohan_fx.prepare(model, **ODD.batch())
    windows = dataclasses.replace(plan.windows, chunk_elements=chunk_elements, io_bytes=4096)
    return dataclasses.replace(plan, windows=windows)


def _assert_cut(model: nn.Module, chunk_elements: int) -> None:
    largest = max(compiled(model).engine.slots.values(), key=lambda slot: slot.numel)
    assert len(largest.chunks(compiled(model).engine.states.chunk_elements)) == -(-max(SIZES) // chunk_elements)
