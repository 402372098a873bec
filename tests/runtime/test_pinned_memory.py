"""Pinned memory outside the pool: as long as a tensor lies in it, in whole pages, and ordinary where the driver refuses."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings

import pytest
import torch

from lohan_fx.runtime.pinned_memory import pinned
from tests.runtime.rig import FakeCudart


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> FakeCudart:
    fake = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@pytest.mark.parametrize("numel", [0, 1, 2048, 2049, 3 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_pages_are_pinned_until_the_last_view_is_gone(numel: int, dtype: torch.dtype, cudart: FakeCudart) -> None:
    value = pinned(numel, dtype)
    assert value.shape == (numel,) and value.dtype == dtype and not value.any()
    pages = -(-max(1, numel * dtype.itemsize) // 4096) * 4096
    assert list(cudart.registered.values()) == [pages]
    if numel:
        assert cudart.registered == {value.data_ptr(): pages}
    value.fill_(3)
    view = value.view(-1, 1)
    del value
    gc.collect()
    assert cudart.registered and view.eq(3).all()
    del view
    gc.collect()
    assert not cudart.registered


def test_a_refusal_is_said_and_the_memory_is_there_all_the_same(cudart: FakeCudart) -> None:
    cudart.status = 2
    with pytest.warns(
        RuntimeWarning, match="cudaHostRegister of 4096 bytes failed with CUDA error 2.*slower than planned"
    ):
        value = pinned(5, torch.float32)
    assert value.fill_(1).sum() == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del value  # and nothing is unpinned
        gc.collect()


def test_what_is_pinned_when_the_process_ends_is_left_to_the_driver() -> None:
    """Its library may be gone by then."""
    program = """
import torch
from lohan_fx.runtime import pinned_memory

class Gone:
    def cudaHostRegister(self, *args): return 0
    def cudaHostUnregister(self, *args): raise SystemExit("called")

torch.cuda.cudart = Gone
kept = pinned_memory.pinned(10, torch.float32)
kept.myself = [kept]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.cuda
def test_a_gpu_has_it_for_pinned_and_copies_from_it() -> None:
    value = pinned(1 << 20, torch.float32).fill_(3)
    assert value.is_pinned()
    on_device = value.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert on_device.eq(3).all().item()
