"""Building in files: the numbers of the CPU, bit for bit, whatever a constructor does."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lohan_fx import process_memory
from lohan_fx.parameters.build_on_disk import build_on_disk, in_file
from tests.end_to_end.models import DIT, GPT2, LLAMA, OPT, VIT

module = sys.modules[build_on_disk.__module__]  # the function hides it


class Odd(nn.Module):
    """Draws, looks, shares, converts and overwrites."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4)
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(64, 64)))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(64, 64), 0.3))
        self.drawn = nn.Parameter(torch.randn(64, 64).t() * 0.02)
        nn.init.trunc_normal_(self.drawn.data[:10])
        self.linear = nn.Linear(64, 64)
        self.linear.weight.data[3:5] += self.drawn.data[1:3]
        self.low = nn.Linear(64, 64).bfloat16()
        self.low.weight.data[0] = float(self.drawn.detach().mean())
        self.register_buffer("mask", torch.tril(torch.ones(64, 64, dtype=torch.bool)))


@pytest.mark.parametrize("make", [Odd, GPT2.make, LLAMA.make, OPT.make, VIT.make, DIT.make])
def test_the_numbers_and_the_generator_are_the_same(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = make()
    drawn = torch.rand(4)
    torch.manual_seed(1)
    with build_on_disk(tmp_path, least_bytes=4096):
        model = make()
    assert torch.equal(torch.rand(4), drawn)
    expected = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert sum(map(in_file, found.values())) >= 3
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].stride() == value.stride(), name
    assert not list(tmp_path.iterdir()), "the files have no names"


def test_pages_leave_memory_and_the_files_go_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_RESIDENT_BYTES", 32 << 20)
    before = process_memory.rss_bytes()
    with build_on_disk(tmp_path):
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
        during = process_memory.rss_bytes() - before
    assert during < 128 << 20, "256 MiB were made"
    values = [float(layer.weight.detach().double().sum()) for layer in model]
    for layer in model:
        module.forget_pages(layer.weight)
    assert [float(layer.weight.detach().double().sum()) for layer in model] == values
    del model, layer
    assert not module._regions and str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_file_takes_no_descriptor_once_it_is_made(tmp_path: Path) -> None:
    """There may be 1024, and a model of experts has more parameters."""
    before = len(os.listdir("/proc/self/fd"))
    with build_on_disk(tmp_path, least_bytes=4096):
        model = nn.ModuleList(nn.Linear(64, 64) for _ in range(20))
    assert all(in_file(layer.weight) for layer in model) and len(os.listdir("/proc/self/fd")) == before


def test_another_thread_builds_while_pages_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[nn.Module] = []
    forget = module._forget

    def build() -> None:
        with build_on_disk(tmp_path, least_bytes=4096):
            built.append(nn.Linear(64, 64))

    def forget_beside(region: module.Region) -> None:
        monkeypatch.setattr(module, "_forget", forget)
        other = threading.Thread(target=build)
        other.start()
        other.join()
        forget(region)

    with build_on_disk(tmp_path, least_bytes=4096):
        built.extend(nn.Linear(64, 64) for _ in range(3))
        monkeypatch.setattr(module, "_forget", forget_beside)
    assert len(built) == 4 and all(in_file(layer.weight) for layer in built)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def full(fd: int, offset: int, nbytes: int) -> None:
        asked.append(nbytes)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.posix_fallocate", full)
    reason = r"No space left on device.*4,194,304 bytes.*room for the model"
    with pytest.raises(OSError, match=reason) as caught, build_on_disk(tmp_path):
        nn.Linear(1024, 1024)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path)) and asked == [4 << 20]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a directory"), build_on_disk(tmp_path / "no"):
        pass
    with pytest.raises(ValueError, match="the folder is an empty text: name one"), build_on_disk(""):
        pass


def test_tensors_without_bytes_cannot_be_in_files(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="least_bytes is 0: expected at least 1"),
        build_on_disk(tmp_path, least_bytes=0),
    ):
        pass
    with build_on_disk(tmp_path, least_bytes=1):
        assert torch.empty(0).numel() == 0
