"""The papers' machines: usable profiles, with the constants that explain the papers' claims."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lohan_fx.hardware import DTYPES, HardwareProfile, Prices
from lohan_fx.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_profile_of_its_name(name: str, tmp_path: Path) -> None:
    preset = HardwareProfile.preset(name)
    assert preset.name == name
    assert (preset.machine, preset.measured_at) == ("", "")
    assert set(preset.matmul_flops_per_s) == set(DTYPES)
    preset.save(tmp_path / "hw.toml")
    assert HardwareProfile.load(tmp_path / "hw.toml") == preset


def test_the_papers_main_server_has_the_constants_that_explain_its_claims() -> None:
    server = HardwareProfile.preset("rtx4090-12xP5510")
    assert server.matmul_rate(torch.float16) == 164e12
    assert (server.h2d_bytes_per_s, server.d2h_bytes_per_s) == (21.2e9, 21.2e9)
    assert server.ssd_read_bytes_per_s == pytest.approx(32e9)
    assert server.ssd_write_bytes_per_s == pytest.approx(25e9)
    # L-ES-06: moving 182 GB each way takes 13 s, whether as two terms or as one mixed stream.
    assert 182e9 / server.ssd_read_bytes_per_s + 182e9 / server.ssd_write_bytes_per_s == pytest.approx(13, rel=0.01)
    assert 364e9 / server.ssd_mixed_bytes_per_s == pytest.approx(13, rel=0.01)
    assert server.prices == Prices(server_usd=14098, gpu_usd=1600, ssd_usd=308)


def test_presets_differ_in_what_their_names_say() -> None:
    few = HardwareProfile.preset("rtx4090-3xP5510")
    assert len(few.nvme) == 3
    assert few.ssd_read_bytes_per_s == pytest.approx(8e9)
    assert HardwareProfile.preset("rtx4090-12xP5510-256GB").host_memory_bytes == 256 * 2**30
    assert HardwareProfile.preset("rtx4080-12xP5510").device_memory_bytes == 16 * 2**30
    assert HardwareProfile.preset("a100-80g-12xP5510").matmul_rate(torch.float16) > 202e12  # F-ME-03 reached 202


def test_an_unknown_preset_names_close_ones_and_all() -> None:
    with pytest.raises(ValueError, match=r"no hardware preset 'rtx409-12xP5510'; did you mean 'rtx4090-") as caught:
        HardwareProfile.preset("rtx409-12xP5510")
    assert all(name in str(caught.value) for name in PRESETS)
    with pytest.raises(ValueError, match=r"no hardware preset 'zzz'\. There are: rtx4090-12xP5510, "):
        HardwareProfile.preset("zzz")
