"""Two compiled models in one process, each with its optimizer, whose graphs meet in one loss; and another thread's backward."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lohan_fx
from lohan_fx.hardware import HardwareProfile
from tests.end_to_end.recipes import LR, assert_same_weights, weights_of

pytestmark = pytest.mark.usefixtures("leak_check", "little_is_small")

Use = Callable[[nn.Module, nn.Module, Any, Any], list[float]]


class Net(nn.Module):
    """``forward(x (rows, inputs))``: (rows, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(inputs, 48), nn.LayerNorm(48), nn.Linear(48, outputs)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.dropout(F.gelu(self.norm(self.up(x)))))
        return found


def finished(loss: torch.Tensor, backward: Callable[[], Any], *optimizers: Any) -> float:
    backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def adversaries(generator: nn.Module, critic: nn.Module, of_generator: Any, of_critic: Any) -> list[float]:
    """The critic's gradients of the generator's step are dropped."""
    losses = []
    for _ in range(4):
        noise, real = torch.randn(4, 8), torch.randn(4, 16)
        fake = generator(noise).detach()
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
        losses.append(finished(loss, loss.backward, of_critic))
        loss = F.softplus(-critic(generator(noise))).mean()
        losses.append(finished(loss, loss.backward, of_generator))
        of_critic.zero_grad()
    return losses


def one_after_the_other(first: nn.Module, second: nn.Module, of_first: Any, of_second: Any) -> list[float]:
    losses = []
    for _ in range(4):
        loss = second(first(torch.randn(4, 8))).square().mean()
        losses.append(finished(loss, loss.backward, of_first, of_second))
    return losses


def on_another_thread(first: nn.Module, second: nn.Module, of_first: Any, of_second: Any) -> list[float]:
    """As autograd does on a GPU: the backward runs on another thread than the forward."""
    losses = []
    for _ in range(4):
        loss = second(first(torch.randn(4, 8))).square().mean()

        def backward(loss: torch.Tensor = loss) -> None:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()

        losses.append(finished(loss, backward, of_first, of_second))
    return losses


@pytest.mark.parametrize("use", [adversaries, one_after_the_other, on_another_thread])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("policy", ["swap-nvme", "recompute"])
def test_uses_are_exact(policy: str, held: bool, use: Use, hw: HardwareProfile, tmp_path: Path) -> None:
    expected = [Net(8, 16), Net(16, 1)]
    models = copy.deepcopy(expected)
    torch.manual_seed(1)
    wanted = use(*expected, *(torch.optim.AdamW(model.parameters(), lr=LR) for model in expected))
    with contextlib.ExitStack() as stack:
        for number, model in enumerate(models):
            nvme = tmp_path / str(number)
            nvme.mkdir()
            options = {"compute_dtype": torch.float32, "host_memory": "2GiB", "policy": policy, "hold_gradients": held}
            stack.enter_context(lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=nvme, **options)))
        torch.manual_seed(1)
        assert use(*models, *(lohan_fx.AdamW(model.parameters(), lr=LR) for model in models)) == wanted
    for model, plain in zip(models, expected, strict=True):
        assert_same_weights(weights_of(model), weights_of(plain))
