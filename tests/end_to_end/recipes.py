"""Ways to train a case: plain PyTorch in fp32, plain PyTorch by the bf16 recipe, and lohan_fx.

The bf16 recipe is the one that lohan_fx follows: weights and activations in bf16; fp32 masters on the CPU that start as the
original fp32 values; gradients cast to fp32 as each arrives and summed there; AdamW on the masters, which are then
cast back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lohan_fx
from lohan_fx.capture import prepare_dynamo
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile
from lohan_fx.measuring import machine
from lohan_fx.plan import Plan
from tests.end_to_end.models import Case

STEPS = 5
LR = 1e-3


@dataclass(frozen=True)
class Run:
    """What training left: each step's loss, the final fp32 weights, and the plan if there was one."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    plan: Plan | None = None


class MasterAdamW:
    """AdamW on fp32 masters of ``model`` on the CPU; its parameters, wherever they are, become ``dtype``."""

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
        self._model = model
        self.masters = {
            name: nn.Parameter(p.detach().to("cpu", torch.float32, copy=True)) for name, p in model.named_parameters()
        }
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._collect)
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self._adam = torch.optim.AdamW(self.masters.values(), **options)

    def _collect(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        master = self.masters[self._names[parameter]]
        gradient = parameter.grad.to("cpu", torch.float32)
        master.grad = gradient if master.grad is None else master.grad + gradient
        parameter.grad = None

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the masters, as ``torch.amp.GradScaler`` wants them."""
        return self._adam.param_groups

    def step(self) -> None:
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self.masters[name])

    def zero_grad(self) -> None:
        self._adam.zero_grad()


def cpu_profile() -> HardwareProfile:
    """The paper's machine with a CPU for a device: plans are for it, and depend on nothing that this machine has."""
    return profile_of("cpu")


def profile_of(device: str) -> HardwareProfile:
    """The same with any device."""
    profile = HardwareProfile.preset("rtx4090-12xP5510")
    return dataclasses.replace(profile, device=device, host_memory_bytes=16 << 30)


def usual_dtype() -> torch.dtype:
    """For models of some size: bfloat16, or float32 on processors without kernels for it, which take a hundred times as long."""
    return torch.bfloat16 if machine.computes_bfloat16() else torch.float32


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def train(
    model: Callable[..., Any], optimizer: Any, case: Case, steps: int = STEPS, *, seed: int | None = 1
) -> list[float]:
    """``steps`` steps of one batch each; the losses. ``seed`` None goes on with torch's generator as it is."""
    if seed is not None:
        torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(**case.batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain(case: Case, steps: int = STEPS) -> Run:
    """Eager, fp32, ``torch.optim.AdamW``."""
    model = case.build()
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=LR), case, steps)
    return Run(losses, weights_of(model))


def plain_bf16(case: Case, steps: int = STEPS, *, backend: str | None = None) -> Run:
    """The bf16 recipe: eager, or traced by ``torch.compile(backend=...)``, which rounds in other places than eager."""
    torch._dynamo.reset()
    prepare_dynamo()
    model = case.build()
    optimizer = MasterAdamW(model, lr=LR)
    call = torch.compile(model, backend=backend, dynamic=False) if backend else model
    losses = train(call, optimizer, case, steps)
    return Run(losses, {name: master.detach() for name, master in optimizer.masters.items()})


def streamed(
    case: Case,
    hw: HardwareProfile,
    nvme: Path,
    steps: int = STEPS,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Run:
    """lohan_fx; ``options`` go to ``lohan_fx.compile``."""
    options.setdefault("host_memory", "2GiB")
    model = case.build()
    with lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=nvme, compute_dtype=dtype, **options)):
        losses = train(model, lohan_fx.AdamW(model.parameters(), lr=LR), case, steps)
        plan = compiled(model).plans[-1]
    return Run(losses, weights_of(model), plan)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the parameters of an ordinary model, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(found: Run, expected: Run) -> None:
    """Bit for bit."""
    assert found.losses == expected.losses
    assert_same_weights(found.weights, expected.weights)


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    detail = f"{wrong[0]} is {found[wrong[0]]}, not {expected[wrong[0]]}" if wrong else ""
    assert not wrong, f"{len(wrong)} of {len(expected)} differ: {detail}"
