"""What compute loses to requests: measured on a real directory, by size, with nothing left behind."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from lohan_fx.hardware import HardwareProfile
from lohan_fx.measuring import measure_contention
from lohan_fx.measuring.measure_contention import LEAST_S, lost_by_launching, lost_to_requests


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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_thread_that_launches_loses_something_to_the_lanes(tmp_path: Path, device: str) -> None:
    assert LEAST_S <= lost_by_launching([str(tmp_path)], device, 0.6) < 0.1
    assert not list(tmp_path.iterdir())
    assert lost_by_launching([], device, 1.0) == HardwareProfile.interpreter_s_per_job


def test_a_requests_cost_is_split_by_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """10 ms a request and 2 ns a byte."""
    costs = [0.01 + 2e-9 * nbytes for nbytes in measure_contention.SIZES]
    monkeypatch.setattr(measure_contention, "_lost_s", lambda directory, compute, seconds, sizes: costs)
    monkeypatch.setattr(measure_contention, "_handover_s", lambda directory, dtype, seconds: 0.04)
    per_request, per_byte, handover_s = lost_to_requests([str(tmp_path)], torch.float32, 1.0)
    assert abs(per_request - 0.01) < 1e-9 and abs(per_byte - 2e-9) < 1e-15 and handover_s == 0.04


def test_what_compute_does_not_do_is_lost_to_the_requests_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """100 runs a second alone, before and after, and 80 beside requests at 1 MB/s: a fifth of a second for each MB."""
    rates = itertools.cycle([100.0, 80.0])
    asked: list[int] = []

    def load(drives: object, sizes: object, access: object, nbytes: int, seconds: float) -> list[float]:
        asked.append(nbytes)
        return [1e6]

    monkeypatch.setattr(measure_contention, "runs_per_s", lambda run, seconds: next(rates))
    monkeypatch.setattr(measure_contention, "load", load)
    monkeypatch.setattr(measure_contention, "_handover_s", lambda directory, dtype, seconds: 0.04)
    per_request, per_byte, _ = lost_to_requests([str(tmp_path)], torch.float32, 0.1)
    assert per_byte == pytest.approx(0.2e-6) and per_request == measure_contention.LEAST_S
    assert asked == list(measure_contention.SIZES) * (measure_contention.ROUNDS + 1)
