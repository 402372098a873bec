"""What the end-to-end tests share: a hardware profile for the CPU, a clean Dynamo, quiet libraries."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers

from lohan_fx.hardware import HardwareProfile


@pytest.fixture
def hw() -> HardwareProfile:
    """The paper's machine with a CPU for a device: plans are for it, and nothing depends on this machine."""
    profile = HardwareProfile.preset("rtx4090-12xP5510")
    return dataclasses.replace(profile, device="cpu", host_memory_bytes=16 << 30)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the hardware profile .* was not measured on this machine")
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Graphs of earlier tests are neither reused nor kept."""
    yield
    torch._dynamo.reset()
