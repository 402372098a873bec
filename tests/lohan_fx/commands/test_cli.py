"""The command ``lohan-fx``: what it prints, and one line where the input is bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import lohan_fx
from lohan_fx.commands.cli import main
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Windows
from lohan_fx.store_directories import directories_for

PRESET = "rtx4090-12xP5510"

EXAMPLE = """
import torch
from torch import nn
from neighbour import WIDTH

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.mean()

class Breaks(Stack):
    def forward(self, x):
        if x.sum().item() > 0:
            torch._dynamo.graph_break()
        return super().forward(x)

def example():
    return Stack(), {"x": torch.zeros(2, WIDTH, dtype=torch.bfloat16)}

def in_float32():
    return Stack(), {"x": torch.zeros(2, WIDTH)}

def breaks():
    return Breaks(), {"x": torch.zeros(2, WIDTH, dtype=torch.bfloat16)}

def other_input():
    return Stack(), {"y": torch.zeros(2, WIDTH)}

def wrong_shape():
    return Stack(), {"x": torch.zeros(2, WIDTH + 1, dtype=torch.bfloat16)}

def raises():
    raise KeyError("no weights here")

def one():
    return Stack()

def swapped():
    return {"x": 1}, Stack()

number = 3
"""


@pytest.fixture
def example(tmp_path: Path) -> Iterator[str]:
    """The path of a file with models; it imports a neighbour."""
    path = tmp_path / "example_models.py"
    path.write_text(EXAMPLE)
    (tmp_path / "neighbour.py").write_text("WIDTH = 8\n")
    yield str(path)
    for module in ("example_models", "neighbour"):
        sys.modules.pop(module, None)
    torch._dynamo.reset()


@pytest.fixture
def plan() -> Plan:
    windows = Windows(0, 0, 0, 4096, 4096, 1, 2, 2, 0)
    return Plan("lohan", "cpu", "bfloat16", 1 << 30, 1 << 30, (), (), windows)


def dump_model(example: str, function: str, nvme: Path, *others: str) -> int:
    budget = [] if "--host-memory" in others else ["--host-memory", "2GiB"]
    return main(["dump", "--model", f"{example}:{function}", "--hw", PRESET, "--nvme", str(nvme), *budget, *others])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr; nothing is on stdout. The remark about a missing GPU does not count."""
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = [line for line in printed.err.splitlines() if "no CUDA here" not in line]
    assert len(lines) == 1, printed.err
    assert lines[0].startswith("lohan-fx: ")
    return lines[0]


# --- dump of a plan -------------------------------------------------------------------------------------------


def test_a_saved_plan_is_shown(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert main(["dump", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == lohan_fx.dump(plan)
    assert main(["dump", str(tmp_path / "plan.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"plan": json.loads(plan.to_json())}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "plan.json is no saved plan, which is JSON (Expecting value"),
        ("[]", "plan.json: this is not a plan"),
        ("{}", "is not of format 1"),
    ],
)
def test_a_file_that_is_no_plan(content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text(content)
    assert main(["dump", str(tmp_path / "plan.json")]) == 1
    assert message in one_line(capsys)


def test_bytes_that_are_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    assert main(["dump", str(tmp_path / "plan.json")]) == 1
    assert "plan.json is no saved plan" in one_line(capsys)


def test_a_missing_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(tmp_path / "none.json")]) == 1
    assert "none.json is no file: name one that Plan.to_json was written to" in one_line(capsys)


@pytest.mark.parametrize("arguments", [[], ["plan.json", "--model", "a.py:f"]])
def test_a_plan_or_a_model(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", *arguments]) == 1
    assert "either a plan file or --model" in one_line(capsys)


# --- dump of a model ------------------------------------------------------------------------------------------


def test_a_model_is_captured_and_shown(example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nvme = tmp_path / "nvme" / "deeper"
    assert dump_model(example, "example", nvme, "--policy", "recompute") == 0
    text = capsys.readouterr().out
    assert "plan: policy recompute, on " in text
    assert "forward: " in text and "backward: " in text
    assert "fetch(layers.{i" in text
    assert list(nvme.iterdir()) == []


def test_a_run_that_begins_beside_a_dump_leaves_its_directory(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both make one in the default place, where a run removes what nobody uses any more."""
    really, nvme = lohan_fx.prepare, tmp_path / "lohan_fx"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def prepare(model: torch.nn.Module, **inputs: Any) -> None:
        _, remove = directories_for(None, HardwareProfile.preset(PRESET))
        remove()
        really(model, **inputs)

    monkeypatch.setattr(lohan_fx, "prepare", prepare)
    assert dump_model(example, "example", nvme, "--policy", "zero-infinity") == 0
    assert list(nvme.iterdir()) == []


def test_a_model_as_data(example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--json", "--unfold", "--compute-dtype", "float32", "--device-memory", "1GiB"]
    assert dump_model(example, "in_float32", tmp_path / "nvme", *options) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["plan"]["compute_dtype"] == "float32"
    assert data["plan"]["device_memory_bytes"] == 1 << 30
    assert all(group["repeats"] == 1 for group in data["graphs"]["forward"]["groups"])


def test_a_profile_from_a_file(example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    HardwareProfile.preset(PRESET).save(tmp_path / "hw.toml")
    assert dump_model(example, "example", tmp_path / "nvme", "--hw", str(tmp_path / "hw.toml")) == 0
    assert "plan: policy lohan" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("nothing", [], "has no function 'nothing'"),
        ("number", [], "has no function 'number'"),
        ("raises", [], "failed: KeyError: 'no weights here'"),
        ("one", [], "returned Stack: expected a pair"),
        ("swapped", [], "returned (dict, Stack): expected (torch.nn.Module, dict)"),
        ("example", ["--hw", "rtx9999"], "no hardware preset 'rtx9999'"),
        ("example", ["--hw", "none.toml"], "no hardware profile at none.toml"),
        ("example", ["--host-memory", "4 bananas"], "host_memory is '4 bananas'"),
        ("example", ["--host-memory", "1MiB"], "too small for any plan"),
    ],
)
def test_bad_input_ends_with_one_line(
    function: str,
    options: Sequence[str],
    message: str,
    example: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvme = tmp_path / "nvme"
    assert dump_model(example, function, nvme, *options) == 1
    assert message in one_line(capsys)
    assert not nvme.exists() or list(nvme.iterdir()) == []


@pytest.mark.parametrize("spec", ["", "models.py", ":f", "models.py:", "none.py:f"])
def test_a_model_that_is_not_there(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", "--model", spec, "--hw", PRESET]) == 1
    assert "--model" in one_line(capsys)


def test_a_file_that_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken_models.py").write_text("def f(:\n")
    assert main(["dump", "--model", f"{tmp_path / 'broken_models.py'}:f"]) == 1
    assert "failed: SyntaxError" in one_line(capsys)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("breaks", ["cannot be captured as one graph", "torch._dynamo.explain"]),
        ("other_input", ["cannot be captured as one graph", "'y'"]),
        ("wrong_shape", ["size", "9"]),
    ],
)
def test_a_failed_capture_is_told_in_full(
    function: str, words: Sequence[str], example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dump_model(example, function, tmp_path / "nvme") == 1
    printed = capsys.readouterr()
    assert all(word in printed.err for word in words)
    assert "Traceback (most recent call last)" not in printed.err
    assert list((tmp_path / "nvme").iterdir()) == []


# --- the rest -------------------------------------------------------------------------------------------------


def test_measure_writes_or_prints_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, asked = HardwareProfile.preset(PRESET), []

    def measure(nvme: Sequence[str], *, device: str | None, seconds: float) -> HardwareProfile:
        asked.append((nvme, device, seconds))
        warnings.warn("others keep the processors busy", RuntimeWarning, stacklevel=2)
        return profile

    monkeypatch.setattr(HardwareProfile, "measure", measure)
    path = tmp_path / "hw.toml"
    assert main(["measure", "--nvme", "/a", "/b", "--seconds", "3", "--device", "cpu", "--output", str(path)]) == 0
    assert asked == [(["/a", "/b"], "cpu", 3.0)]
    assert HardwareProfile.load(path) == profile
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "lohan-fx: warning: others keep the processors busy\n")
    assert main(["measure"]) == 0
    assert capsys.readouterr().out == path.read_text()


def test_measure_finds_out_early_that_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HardwareProfile, "measure", lambda *_, **__: pytest.fail("measured in vain"))
    assert main(["measure", "--output", str(tmp_path / "none" / "hw.toml")]) == 1
    assert "there is no directory" in one_line(capsys)
    assert main(["measure", "--output", str(tmp_path)]) == 1
    assert f"{tmp_path} is a directory: name a file in it" in one_line(capsys)


def test_measure_of_a_missing_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--nvme", str(tmp_path / "none")]) == 1
    assert "none" in one_line(capsys)


@pytest.mark.parametrize("arguments", [[], ["fly"], ["dump", "--policy", "best"], ["measure", "--seconds", "soon"]])
def test_wrong_arguments_exit_with_2(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: lohan-fx" in capsys.readouterr().err


def run_module(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(lohan_fx.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-m", "lohan_fx", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(root)},
    )


def test_python_m_lohan_fx(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr() == (f"lohan-fx {lohan_fx.__version__}\n", "")
    done = run_module("dump", "none.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("lohan-fx: ") and "none.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_policies_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies"]) == 0
    assert capsys.readouterr().out == f"{lohan_fx.policies()}\n"
