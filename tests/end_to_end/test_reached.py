"""Which parameters a step updates: those that autograd gives a gradient, as in plain PyTorch, and no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.errors import OffloadedParameterError, StepError
from lohan_fx.hardware import HardwareProfile
from tests.end_to_end.recipes import LR, assert_same_weights, weights_of
from tests.exhaustive import combinations

pytestmark = pytest.mark.usefixtures("leak_check")

DECAY = 0.1
POLICIES = ("keep", "swap-nvme", "recompute", "in-memory")

Use = Callable[[nn.Module, Any], list[float]]


class TwoHeads(nn.Module):
    """Two outputs that share a trunk, and a view of what the trunk makes; ``inverts``: with an op whose graph begins with a
    token."""

    def __init__(self, *, inverts: bool = False) -> None:
        super().__init__()
        self.inverts = inverts
        self.trunk, self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x).tanh()
        if self.inverts:
            hidden = hidden @ torch.linalg.inv(hidden.T @ hidden + torch.eye(16))
        return self.first(hidden), self.second(hidden), hidden.view(-1)


def inputs(seed: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def finished(optimizer: Any, loss: torch.Tensor) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def one_output_after_the_other(model: nn.Module, optimizer: Any) -> list[float]:
    return [finished(optimizer, model(inputs(step))[step % 3].square().mean()) for step in range(7)]


def two_backwards_of_one_output_each(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(4):
        model(inputs(step))[0].square().mean().backward()
        losses.append(finished(optimizer, model(inputs(10 + step))[1 + step % 2].square().mean()))
    return losses


def adversarial(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(4):
        x = inputs(step).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x)[0].square().mean(), x)
        losses += gradient.flatten().tolist()
        losses.append(finished(optimizer, model(inputs(step) + 0.1 * gradient.sign())[0].square().mean()))
    return losses


def attributions(model: nn.Module, optimizer: Any) -> list[float]:
    """After steps, before ``zero_grad``, and of an input that is not a leaf."""
    found = []
    for step in range(4):
        loss = model(inputs(step))[1].square().mean()
        loss.backward()
        optimizer.step()
        x = inputs(20 + step).requires_grad_()
        scores = model(2 * x)[0].sum()
        scores.backward(inputs=[x])
        assert x.grad is not None
        found += [loss.item(), *x.grad.flatten().tolist()]
        optimizer.zero_grad()
    return found


def a_head_alone(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(4):
        first, second, _ = model(inputs(step))
        loss = first.square().mean() + second.abs().mean()
        loss.backward(inputs=list(model.second.parameters()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


USES = (one_output_after_the_other, two_backwards_of_one_output_each, adversarial, attributions, a_head_alone)


class AddAuxiliaryLoss(torch.autograd.Function):
    """The identity; ``loss`` gets a gradient of one whatever becomes of ``x``, as losses that balance experts do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return gradient, torch.ones(())


class Balanced(nn.Module):
    """``router`` gets no gradient but that of the auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.last = nn.Linear(16, 4), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (AddAuxiliaryLoss.apply(self.last(x), self.router(x).softmax(-1).square().mean()),)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_gradient_that_is_made_of_none_counts(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: Any) -> list[float]:
        return [finished(optimizer, model(inputs(step))[0].square().mean()) for step in range(3)]

    assert_exact(Balanced(), steps, hw, tmp_path, policy=policy)


@pytest.mark.parametrize(("use", "held", "policy"), combinations(USES, [False, True], POLICIES))
def test_uses_are_exact(policy: str, held: bool, use: Use, hw: HardwareProfile, tmp_path: Path) -> None:
    assert_exact(TwoHeads(), use, hw, tmp_path, policy=policy, hold_gradients=held)


@pytest.mark.parametrize("use", [one_output_after_the_other, adversarial])
def test_uses_of_a_graph_that_begins_with_a_token(use: Use, hw: HardwareProfile, tmp_path: Path) -> None:
    assert_exact(TwoHeads(inverts=True), use, hw, tmp_path, policy="swap-nvme")


def assert_exact(expected: nn.Module, use: Use, hw: HardwareProfile, nvme: Path, **options: Any) -> None:
    """Losses, weights, moments and step counts are plain PyTorch's."""
    model = copy.deepcopy(expected)
    optimizer = torch.optim.AdamW(expected.parameters(), lr=LR, weight_decay=DECAY)
    wanted = use(expected, optimizer)
    with lohan_fx.releasing(compiled(model, hw, nvme, **options)):
        ours = lohan_fx.AdamW(model.parameters(), lr=LR, weight_decay=DECAY)
        assert use(model, ours) == wanted
        states, found = optimizer.state_dict()["state"], ours.state_dict()["state"]
    assert found.keys() == states.keys()
    for index, state in states.items():
        assert all(torch.equal(found[index][name], value) for name, value in state.items()), index
    assert_same_weights(weights_of(model), weights_of(expected))


def compiled(model: nn.Module, hw: HardwareProfile, nvme: Path, **options: Any) -> nn.Module:
    return lohan_fx.compile(model, hw, nvme=nvme, compute_dtype=torch.float32, host_memory="2GiB", **options)


def test_attributions_need_no_optimizer(hw: HardwareProfile, tmp_path: Path) -> None:
    def use(model: nn.Module) -> torch.Tensor:
        x = inputs(0).requires_grad_()
        return torch.autograd.grad(model(x)[0].sum(), x)[0]

    model = TwoHeads()
    wanted = use(model)
    with lohan_fx.releasing(compiled(model, hw, tmp_path)):
        assert torch.equal(use(model), wanted)
        with pytest.raises(StepError, match="backward was called before there is an optimizer"):
            model(inputs(0))[0].sum().backward()


def test_a_head_without_a_gradient_has_none_to_read_or_to_clip(hw: HardwareProfile, tmp_path: Path) -> None:
    with lohan_fx.releasing(compiled(TwoHeads(), hw, tmp_path, hold_gradients=True)) as model:
        lohan_fx.AdamW(model.parameters())
        model(inputs(0))[0].sum().backward()
        assert lohan_fx.grad(model, "second.weight") is None and model.second.weight.grad is None
        assert lohan_fx.grad(model, "first.weight") is not None


# --- gradients that are dropped or scaled one by one ------------------------------------------------------------


def freezing_the_head_at_first(model: nn.Module, optimizer: Any) -> list[float]:
    """As DINO cancels the gradients of its last layer."""
    losses = []
    for step in range(4):
        first, second, _ = model(inputs(step))
        loss = first.square().mean() + second.square().mean()
        loss.backward()
        if step < 2:
            for parameter in model.second.parameters():
                parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def leaving_a_batch_out(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(5):
        loss = model(inputs(step))[0].square().mean()
        loss.backward()
        if step in (0, 2):
            for parameter in model.parameters():
                parameter.grad = None
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def clearing_through_a_wrapper(model: nn.Module, optimizer: Any) -> list[float]:
    wrapper = nn.Sequential(model)
    losses = []
    for step in range(4):
        wrapper(inputs(step))[0].square().mean().backward()
        wrapper.zero_grad()
        losses.append(finished(optimizer, wrapper(inputs(step))[1].square().mean()))
    return losses


def freezing_between_forward_and_backward(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(4):
        loss = model(inputs(step))[0].square().mean()
        model.first.requires_grad_(step % 2 == 0)
        losses.append(finished(optimizer, loss))
        model.first.requires_grad_(True)
    return losses


def halving(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for step in range(3):
        loss = model(inputs(step))[0].square().mean()
        loss.backward()
        for parameter in model.first.parameters():
            assert parameter.grad is not None
            parameter.grad *= 0.5
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("held", [False, True])
def test_what_is_frozen_since_the_forward_is_left_alone(held: bool, hw: HardwareProfile, tmp_path: Path) -> None:
    use = freezing_between_forward_and_backward
    assert_exact(TwoHeads(), use, hw, tmp_path, policy="swap-nvme", hold_gradients=held)


@pytest.mark.parametrize("use", [freezing_the_head_at_first, leaving_a_batch_out, clearing_through_a_wrapper, halving])
@pytest.mark.parametrize("policy", ["keep", "swap-nvme"])
def test_single_gradients_are_dropped_and_scaled(policy: str, use: Use, hw: HardwareProfile, tmp_path: Path) -> None:
    assert_exact(TwoHeads(), use, hw, tmp_path, policy=policy, hold_gradients=True)


def test_a_gradient_that_was_applied_cannot_be_dropped(hw: HardwareProfile, tmp_path: Path) -> None:
    with lohan_fx.releasing(compiled(TwoHeads(), hw, tmp_path)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), accumulation_steps=1)
        model(inputs(0))[0].square().mean().backward()
        model.second.weight.grad = None  # it has none
        with pytest.raises(StepError, match=r"cannot be taken back.*hold_gradients=True"):
            model.first.weight.grad = None
        with pytest.raises(OffloadedParameterError, match=r"gradient of first\.weight cannot be set"):
            model.first.weight.grad = torch.zeros(8, 16)
        optimizer.step()
        model.first.weight.grad = None
