"""What the end-to-end tests share: a hardware profile for the CPU, a clean Dynamo, no warnings of ours or about us."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lohan_fx
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planning import problem
from tests.end_to_end.recipes import cpu_profile


@pytest.fixture
def hw() -> HardwareProfile:
    return cpu_profile()


@pytest.fixture
def little_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """All matrices of these models are small enough to stay in memory whatever the plan; here only norms and biases are."""
    monkeypatch.setattr(problem, "SMALL_PARAMETER_ELEMENTS", 256)


@pytest.fixture
def on_nvme(hw: HardwareProfile, tmp_path: Path) -> Callable[..., Any]:
    """``with on_nvme(model) as model:`` streams it, with parameters and states of its matrices on NVMe."""

    def compile_it(model: nn.Module, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
        options = {"policy": "lohan-ds", "host_memory": "2GiB", **options}
        return lohan_fx.releasing(lohan_fx.compile(model, hw, nvme=tmp_path, compute_dtype=dtype, **options))

    return compile_it


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lohan")
        warnings.filterwarnings("ignore", message="the hardware profile .* was not measured on this machine")
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Graphs of earlier tests are neither reused nor kept."""
    yield
    torch._dynamo.reset()
