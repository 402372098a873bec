"""The examples run as a user runs them: as programs of their own, from anywhere, leaving nothing behind."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lohan_fx.hardware import MEASUREMENT, HardwareProfile, NvmeProfile
from lohan_fx.reporting.monitor import StepReport
from tests.exhaustive import some_of
from tests.tiny import profile

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "finetune_llama.py"
SMALL = ["--layers", "2", "--hidden", "128", "--batch", "2", "--seq", "32", "--sample", "4", "--policy", "swap-nvme"]
TIMEOUT_S = 300

pytestmark = pytest.mark.slow


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Options for a run inside ``tmp_path``, with a profile so that nothing is measured."""
    (tmp_path / "nvme").mkdir()
    drive = NvmeProfile("", 1e9, 1e9, 1e9, capacity_bytes=1 << 30)
    profile(nvme=(drive,)).save(tmp_path / "hw.toml")
    return ["--nvme", str(tmp_path / "nvme"), "--hw", str(tmp_path / "hw.toml"), "--output", str(tmp_path / "output")]


def start(options: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLE), *SMALL, *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has them ignore SIGINT, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )


def test_the_main_job_trains_as_plain_pytorch_does_and_cleans_up(folders: list[str], tmp_path: Path) -> None:
    with start([*folders, "--steps", "4", "--compare"], tmp_path) as run:
        out, err = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, err
    assert "Traceback" not in err
    assert "largest difference between the losses: 0\n" in out
    for said in (
        "hardware",
        "plan: policy swap-nvme",
        "step 4/4",
        "measured/predicted s: forward ",
        "predicted  measured",
        "4 bytes generated",
    ):
        assert said in out
    results = json.loads((tmp_path / "output" / "results.json").read_text())
    assert results["compare"]["losses"] == results["losses"]
    assert results["losses"][-1] < results["losses"][0]
    assert results["validation_loss"]["after"] < results["validation_loss"]["before"]
    assert results["per_step"]["NVMe read"]["measured"] > 0
    assert (tmp_path / "output" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "nvme").iterdir()) == []


class Revised:
    """Stands in for the monitor of a training whose plan is another one from the third step on."""

    def __init__(self) -> None:
        self.steps = -1
        self.asked_after: list[int] = []

    @property
    def plan(self) -> int:
        return int(self.steps >= 3)

    def step(self) -> StepReport:
        self.steps += 1
        return StepReport(1.0, {}, 0.0, 0, 0, 1, 1, 1)

    def expected_peak_rss_bytes(self) -> int:
        self.asked_after.append(self.steps)
        return 1000 + self.steps


def test_the_peak_under_a_revised_plan_is_foretold_before_its_further_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    example = importlib.import_module(EXAMPLE.stem)
    monkeypatch.setattr(example.lohan_fx, "AdamW", lambda parameters, **_: torch.optim.AdamW(parameters))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(loss=(self.weight * (input_ids + labels)).sum())

    monitor = Revised()
    text = SimpleNamespace(batch=lambda number: torch.ones(1, 2))
    args = SimpleNamespace(lr=1e-3, steps=6, batch=1, seq=2)
    trained = example.train(Model(), monitor, text, args, record_at=-1)
    assert len(trained.losses) == 6
    assert monitor.asked_after == [3] and trained.revised_peak_bytes == [1003]


@pytest.mark.parametrize("kind", some_of([signal.SIGINT, signal.SIGTERM], [signal.SIGINT]))
def test_interrupted_it_leaves_no_files(kind: signal.Signals, folders: list[str], tmp_path: Path) -> None:
    with start([*folders, "--steps", "100000"], tmp_path) as run:
        try:
            assert run.stdout is not None
            while not re.match(r"step 1/", line := run.stdout.readline()):
                assert line, "it ended before its first step"
            assert list((tmp_path / "nvme").iterdir())
            run.send_signal(kind)
            _, err = run.communicate(timeout=TIMEOUT_S)
        finally:
            run.kill()
    assert run.returncode == (130 if kind == signal.SIGINT else 143), err
    assert "Traceback" not in err
    assert list((tmp_path / "nvme").iterdir()) == []


def test_a_wrong_directory_is_named_without_a_traceback(folders: list[str], tmp_path: Path) -> None:
    with start([*folders, "--nvme", str(tmp_path / "missing")], tmp_path) as run:
        _, err = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1
    assert "Traceback" not in err and str(tmp_path / "missing") in err


def test_a_place_for_results_that_cannot_be_is_told_before_the_training(folders: list[str], tmp_path: Path) -> None:
    with start([*folders, "--steps", "100000", "--output", str(tmp_path / "hw.toml")], tmp_path) as run:
        out, err = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1 and not out
    assert "Traceback" not in err and str(tmp_path / "hw.toml") in err


@pytest.mark.parametrize("option", ["--steps", "--batch", "--seq", "--layers", "--hidden"])
def test_no_steps_and_the_like_are_refused_at_once(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("finetune_llama")
    with pytest.raises(SystemExit):
        example.parse_arguments([option, "0"])
    assert f"argument {option}: 0: expected at least 1" in capsys.readouterr().err


def test_a_measurement_that_others_disturbed_is_not_kept_for_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile whose Adam had waited for other processes foretold twice what steps took, all day long."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("finetune_llama")
    times = {"measured_at": datetime.now(UTC).isoformat(), "versions": {"measurement": MEASUREMENT}}
    found = profile(nvme=(NvmeProfile(str(tmp_path), 1e9, 1e9, 1e9, capacity_bytes=1 << 30),), **times)
    disturbed = [True, False]

    def measure(*_: object, **__: object) -> HardwareProfile:
        if disturbed.pop(0):
            warnings.warn("other processes kept 1.4 of 2 processors busy", RuntimeWarning, stacklevel=2)
        return found

    monkeypatch.setattr(HardwareProfile, "measure", measure)
    monkeypatch.setattr(example, "default_nvme_root", lambda: tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    args = SimpleNamespace(hw=None, nvme=[tmp_path.name], device="cpu")
    with pytest.warns(RuntimeWarning, match="1.4 of 2 processors busy; this profile is not kept"):
        assert example.hardware(args) == found
    assert not list(tmp_path.iterdir())
    for _ in range(3):
        assert example.hardware(args) == found
    assert not disturbed
