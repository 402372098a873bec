"""Trains one step with an installed lohan_fx; run by wheel_check.sh, outside pytest and outside the checkout."""

from __future__ import annotations

import copy
import pathlib
import sysconfig
import tempfile
from types import ModuleType

import torch

import lohan_fx
import lohan_fx.passes
import lohan_fx.runtime


def check_installed(module: ModuleType) -> None:
    installed = pathlib.Path(sysconfig.get_path("purelib")).resolve()
    found = pathlib.Path(module.__file__ or "").resolve()
    if installed not in found.parents:
        raise SystemExit(f"{module.__name__} was imported from {found}, not from {installed}")


def train_one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> None:
    for module in (lohan_fx, lohan_fx.passes, lohan_fx.runtime):
        check_installed(module)

    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    plain = copy.deepcopy(model)
    batch = torch.randn(8, 32)
    plain_loss = train_one_step(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), batch)

    with tempfile.TemporaryDirectory() as nvme:
        hw = lohan_fx.HardwareProfile.measure(nvme=[nvme], seconds=0.2)
        model = lohan_fx.compile(model, hw, nvme=[nvme], compute_dtype=torch.float32)
        loss = train_one_step(model, lohan_fx.AdamW(model.parameters(), lr=1e-3), batch)
        lohan_fx.release(model)

    # One AdamW step moves a weight by about lr = 1e-3, so 1e-6 tells a step from none and from a wrong one.
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
    print(f"wheel: one step from {lohan_fx.__file__} equals plain PyTorch, loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
