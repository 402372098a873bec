"""fio_beside: what fio is asked to move, that it moves it, and how much of it."""

from __future__ import annotations

import importlib
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SAID = """#!/bin/sh
trap 'echo "{\\"jobs\\": [{\\"read\\": {\\"bw_bytes\\": %d}, \\"write\\": {\\"bw_bytes\\": 0}}]}"; exit 0' INT
sleep 30 >/dev/null 2>&1 & wait
"""


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("fio_beside")
    monkeypatch.setattr(module, "_RAMP_S", 0.3)
    return module


def a_fio(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """``fio`` is this script."""
    (folder / "fio").write_text(script)
    (folder / "fio").chmod(0o700)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def move(beside: Any, traffic: list[Any], seconds: float, folder: Path, *, for_s: float = 0.0) -> Any:
    with beside.fio_beside(traffic, seconds, folder) as reached:
        time.sleep(for_s)
    return reached


def test_as_much_in_as_large_requests(beside: Any, tmp_path: Path) -> None:
    job = beside.Traffic("write", bytes=1 << 30, requests=500).job(2.0, tmp_path)
    assert f"--rate={1 << 29}" in job
    assert "--bs=2150400" in job, "2,147,484 bytes each, up to the next page"


def test_a_step_is_told_by_direction(beside: Any) -> None:
    overlap = importlib.import_module("overlap")
    requests = [("read", "a", 0, 100), ("read", "a", 100, 300), ("write", "b", 0, 50)]
    assert overlap.moved(requests) == [beside.Traffic("read", 400, 2), beside.Traffic("write", 50, 1)]
    assert overlap.moved(requests[:1]) == [beside.Traffic("read", 100, 1)], "what is not moved is no traffic"


def test_what_fio_reached_of_a_step(beside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_fio(tmp_path, monkeypatch, SAID % 800_000_000)
    traffic = [beside.Traffic("read", bytes=1_000_000_000, requests=1000)]
    assert move(beside, traffic, 1.0, tmp_path) == {"read": pytest.approx(0.8)}
    assert move(beside, traffic, 2.0, tmp_path) == {"read": pytest.approx(1.6)}


def test_what_fio_complains_about_is_told(beside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_fio(tmp_path, monkeypatch, "#!/bin/sh\necho 'fio: engine io_uring not loadable' >&2\nexit 1\n")
    with pytest.raises(RuntimeError, match="status 1: fio: engine io_uring not loadable"):
        move(beside, [beside.Traffic("read", 1 << 20, 1)], 1.0, tmp_path)


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_real_one_moves_what_it_was_asked(beside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_COMMAND", [*beside._COMMAND[:-1], f"--size={16 << 20}"])
    traffic = [beside.Traffic("read", 4 << 20, 16), beside.Traffic("write", 4 << 20, 16)]
    beside.lay_out(traffic, tmp_path)
    assert move(beside, traffic, 1.0, tmp_path, for_s=1.0).keys() == {"read", "write"}
    assert (tmp_path / "read.fio").stat().st_size == 16 << 20
