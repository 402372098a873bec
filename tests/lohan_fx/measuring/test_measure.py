"""Measuring: every number is there and usable, no file is left, and what cannot be measured is refused by name."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan_fx.hardware import DTYPES, HardwareProfile, NvmeProfile
from lohan_fx.measuring import machine, measure, measure_nvme

# Where the tests run there may be other load, and a /tmp in RAM.
pytestmark = [pytest.mark.usefixtures("leak_check"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little memory and small files: the tests check behaviour, not speed."""
    monkeypatch.setattr(measure, "_COPY_BYTES", 2**22)
    monkeypatch.setattr(measure, "_ADAM_CHUNK", 2**12)
    monkeypatch.setattr(measure_nvme, "_FILE_BYTES", 2**25)
    monkeypatch.setattr(measure_nvme, "_MIN_FILE_BYTES", 2**24)


def _numbers(item: object) -> Iterator[float]:
    for field in fields(item):  # type: ignore[arg-type]
        value = getattr(item, field.name)
        if isinstance(value, int | float):
            yield value
        elif isinstance(value, tuple):
            for element in value:
                yield from _numbers(element)


def test_measure_fills_the_whole_profile_and_leaves_no_file(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    profile = HardwareProfile.measure(directories, device="cpu", progress=False, seconds=1.0)

    assert all(0 < number < math.inf for number in _numbers(profile))
    assert set(profile.matmul_flops_per_s) == set(DTYPES)
    assert [drive.directory for drive in profile.nvme] == [str(directory) for directory in directories]
    for drive in profile.nvme:
        assert tuple(rate.request_bytes for rate in drive.by_request) == measure_nvme.REQUEST_BYTES
        assert drive.mixed_bytes_per_s in [rate.mixed_bytes_per_s for rate in drive.by_request]
        assert drive.capacity_bytes <= drive.drive_bytes
    # Both are on one drive, which they share.
    whole = os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert whole - 2 < sum(drive.drive_bytes for drive in profile.nvme) <= whole
    assert profile.is_this_machine() and not profile.is_outdated()
    assert profile.versions["torch"] == torch.__version__
    assert profile.host_memory_bytes == profile.device_memory_bytes == machine.host_memory_bytes()
    assert not any(list(directory.iterdir()) for directory in directories)

    profile.save(tmp_path / "hw.toml")
    assert HardwareProfile.load(tmp_path / "hw.toml") == profile
    (tmp_path / "hw.toml").unlink()
    for directory in directories:
        directory.rmdir()


@pytest.mark.parametrize("computes", [True, False])
def test_compute_beside_drives_is_in_a_dtype_that_the_processor_computes_in(
    computes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever rates other load left: here, as fast in bfloat16 as in float32."""
    asked: list[torch.dtype] = []

    def lost(directories: Sequence[str], dtype: torch.dtype, seconds: float) -> tuple[float, float, float]:
        asked.append(dtype)
        return 1e-6, 1e-12, 1e-6

    def drives(directories: Sequence[str], device: str, dtype: torch.dtype, *_: object) -> tuple[NvmeProfile, ...]:
        asked.append(dtype)
        return ()

    monkeypatch.setattr(machine, "computes_bfloat16", lambda: computes)
    monkeypatch.setattr(measure, "_matmul_flops_per_s", lambda *_: 1e9)
    monkeypatch.setattr(measure, "lost_to_requests", lost)
    monkeypatch.setattr(measure, "drives_beside_compute", drives)
    HardwareProfile.measure([tmp_path], device="cpu", progress=False, seconds=0.1)
    assert asked == 2 * [torch.bfloat16 if computes else torch.float32]


def test_measure_needs_no_drives_and_prints_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    profile = HardwareProfile.measure(device="cpu", seconds=0.2)
    assert profile.nvme == ()
    output, lines = capsys.readouterr()
    assert output == ""
    assert lines.splitlines()[0] == "lohan_fx: measuring matmul in float32"
    assert "\r" not in lines and "\x1b" not in lines


def test_progress_on_a_terminal_counts_every_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("rich.progress.Progress.update", lambda self, task, **change: seen.append(change))
    monkeypatch.setattr("rich.progress.Progress.add_task", lambda self, text, **task: seen.append(task))
    HardwareProfile.measure([tmp_path], device="cpu", seconds=0.2)
    task, *updates = seen
    assert task["total"] == len(updates)
    assert updates[0] == {"description": "matmul in float32", "advance": 1}


def test_a_dtype_without_fast_kernels_is_measured_on_a_small_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: shapes.append(a.shape))
    for seconds_per_run, largest in ((1.0, 256), (1e-9, 2048)):
        shapes.clear()
        monkeypatch.setattr(measure, "_seconds_of", lambda run, device, s=seconds_per_run: run() or s)
        rate = measure._matmul_flops_per_s(torch.float16, "cpu", 1e-3)
        assert rate == pytest.approx(2 * largest**3 / seconds_per_run)
        assert max(shapes) == (largest, largest)


@pytest.mark.parametrize(("seconds_of_others", "warns"), [(1e6, True), (0.0, False)])
def test_other_load_is_warned_about(monkeypatch: pytest.MonkeyPatch, seconds_of_others: float, warns: bool) -> None:
    readings = iter([0.0, seconds_of_others])
    monkeypatch.setattr(measure, "_processor_seconds_of_others", lambda: next(readings))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        HardwareProfile.measure(device="cpu", progress=False, seconds=0.1)
    assert [str(warning.message).startswith("other processes kept ") for warning in caught] == [True] * warns


def test_idling_and_own_work_are_no_other_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  300 10 200 5000 700 1 2 3 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    monkeypatch.setattr(measure, "_PROC_STAT", stat)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    monkeypatch.setattr(os, "times", lambda: os.times_result((1.0, 0.5, 0.0, 0.0, 9.0)))
    assert measure._processor_seconds_of_others() == pytest.approx(5.16 - 1.5)
    stat.unlink()


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, "20", True])
def test_seconds_must_be_a_time(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"seconds is .*: expected a finite number of seconds above zero"):
        HardwareProfile.measure(seconds=seconds)


def test_an_unknown_or_absent_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'tpu': expected 'cpu', 'cuda' or None"):
        HardwareProfile.measure(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"device is 'cuda', but torch.cuda.is_available\(\) is False"):
            HardwareProfile.measure(device="cuda")


@pytest.mark.cuda
def test_measure_cuda() -> None:
    profile = HardwareProfile.measure(progress=False, seconds=2.0)
    assert profile.device == "cuda"
    assert profile.device_name == torch.cuda.get_device_name()
    assert all(0 < number < math.inf for number in _numbers(profile))
    assert profile.matmul_rate(torch.bfloat16) > profile.matmul_rate(torch.float32)


def test_one_slow_matmul_does_not_end_the_search_for_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def seconds_of(run: partial[object], device: str) -> float:
        sizes.append(run.args[0].shape[0])
        return 1.0 if len(sizes) == 1 else 1e-9

    monkeypatch.setattr(measure, "_seconds_of", seconds_of)
    monkeypatch.setattr(measure, "_median_seconds", lambda run, device, seconds: 1.0)
    assert measure._matmul_flops_per_s(torch.float32, "cpu", 1.0) == 2 * 2048**3
    assert sizes[:2] == [256, 256] and max(sizes) <= 2048
