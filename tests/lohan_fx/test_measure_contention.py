"""What compute loses to requests: measured on a real directory, by size, with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lohan_fx import measure_contention
from lohan_fx.hardware import HardwareProfile
from lohan_fx.measure_contention import LEAST_S, lost_to_requests
from lohan_fx.runtime.room import LEAST_BYTES


def test_both_are_positive_and_the_directory_is_empty_after(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    per_request, per_byte, handover_s = lost_to_requests([str(tmp_path)], torch.float32, 0.6)
    assert LEAST_S <= per_request < 0.1 and 0 < per_byte < 1e-6 and LEAST_S <= handover_s < 0.1
    assert not list(tmp_path.iterdir()) and torch.get_num_threads() == threads


def test_without_a_drive_the_profile_keeps_its_defaults() -> None:
    assert lost_to_requests([], torch.float32, 1.0) == (
        HardwareProfile.io_core_s_per_request,
        HardwareProfile.io_core_s_per_byte,
        HardwareProfile.handover_s,
    )


def test_a_requests_cost_is_split_by_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """10 ms a request and 2 ns a byte; 50 ms for one that compute asks for, of which the rest is handing over."""
    costs = {nbytes: 0.01 + 2e-9 * nbytes for nbytes in measure_contention.SIZES}
    monkeypatch.setattr(measure_contention, "_lost_s", lambda directory, nbytes, dtype, seconds: costs[nbytes])
    monkeypatch.setattr(measure_contention, "_lost_to_asking_s", lambda directory, dtype, seconds: 0.05)
    per_request, per_byte, handover_s = lost_to_requests([str(tmp_path)], torch.float32, 1.0)
    assert abs(per_request - 0.01) < 1e-9 and abs(per_byte - 2e-9) < 1e-15
    assert abs(handover_s - (0.04 - 2e-9 * LEAST_BYTES)) < 1e-9
