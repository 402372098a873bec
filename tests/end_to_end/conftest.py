"""What the end-to-end tests share: a hardware profile for the CPU, a clean Dynamo, no warnings of ours or about us."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import transformers

from lohan_fx.hardware import HardwareProfile
from tests.end_to_end.recipes import cpu_profile


@pytest.fixture
def hw() -> HardwareProfile:
    return cpu_profile()


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
