"""``lohan-fx plan``: what it says, its exit codes, and one line where the input is bad."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan_fx.commands import plan_command
from lohan_fx.commands.cli import main
from lohan_fx.forecasting import forecast as forecasting
from lohan_fx.forecasting import what_if
from lohan_fx.forecasting.forecast import ENDURANCE_WRITES, YEAR_S, Asked, Subject, libraries_silenced
from lohan_fx.forecasting.meta_capture import meta_capture
from lohan_fx.hardware import HardwareProfile
from lohan_fx.hardware_file import write
from lohan_fx.models.model_source import ModelSource, source_of
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Plan, Windows
from lohan_fx.planning.budgets import staging_bytes
from lohan_fx.simulation.simulator import simulate

CONFIG = {"model_type": "gpt2", "n_embd": 128, "n_layer": 7, "n_head": 2, "vocab_size": 512, "n_positions": 128}
CAPTURED: dict[tuple[Any, ...], Subject] = {}
PRESET = "rtx4090-12xP5510"
FUNCTIONS = """
import torch
from torch import nn

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(7))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x.to(layer.weight.dtype)))
        return x.mean()

def stack(batch=4):
    return Stack(), {"x": torch.zeros(batch, 64)}

def takes_anything(**given):
    print("from the user")
    return Stack(), {"x": torch.zeros(given.get("batch", 1), 64)}

def needs(path):
    return Stack(), {}

def nothing():
    return Stack(), {"x": torch.zeros(0, 64)}

def numbered():
    return Stack(), {3: torch.zeros(1, 64)}

def gives_up():
    raise BaseException("enough")

def deeper():
    return missing

def raises(batch=1):
    return deeper()

def fussy(batch=1):
    return stack(batch) if batch < 2 else deeper()

def normalised(batch=1):
    return nn.Sequential(Stack().layers[0], nn.BatchNorm1d(64), Mean()), {"input": torch.zeros(batch, 64)}

class Mean(nn.Module):
    def forward(self, x):
        return x.mean()
"""

LLAMA = """
import torch
from lohan_fx.models.model_families import build
from lohan_fx.models.model_presets import named

def bf16():
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    return build(named("llama-3-8b")).to(torch.bfloat16), {"input_ids": tokens, "labels": tokens}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with the config of a small model, which is captured once for all tests: plans leave a capture as it is."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    capture = plan_command._captured

    def once(source: ModelSource, *shape: Any, **options: Any) -> Subject:
        if source.name != folder.name or json.loads((folder / "config.json").read_text()) != CONFIG:
            return capture(source, *shape, **options)
        key = *shape, *options.values()
        if key not in CAPTURED:
            CAPTURED[key] = capture(source, *shape, **options)
        return CAPTURED[key]

    monkeypatch.setattr(plan_command, "_captured", once)
    return str(folder)


@pytest.fixture
def functions(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "planned_stacks.py"
    path.write_text(FUNCTIONS)
    yield str(path)
    sys.modules.pop("planned_stacks", None)


@pytest.fixture
def no_drive(tmp_path: Path) -> str:
    write(dataclasses.replace(HardwareProfile.preset(PRESET), nvme=()), tmp_path / "bare.toml")
    return str(tmp_path / "bare.toml")


def plan(model: str, *others: str, hw: str = PRESET) -> int:
    torch._dynamo.reset()
    says = any(other.startswith(("--seq", "seq=")) for other in others)
    shape = ["--seq", "64"] if not says and ".py:" not in model else []
    return main(["plan", "--model", model, "--hw", hw, *shape, *others])


def answered(capsys: pytest.CaptureFixture[str], model: str, *others: str, hw: str = PRESET) -> dict[str, Any]:
    assert plan(model, "--json", *others, hw=hw) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


# --- what it says ---------------------------------------------------------------------------------------------


def test_the_answer_in_words(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--batch", "2", "--formula") == 0
    text = capsys.readouterr().out
    for words in (
        "small: ", "2 x 64 tokens per step", "fits", "by formula", "simulated", "tokens/s", "TFLOPS", "bound in forward",
        "more than", "peak on device", "peak in host memory", "disk needed", "NVMe traffic", "drive wear", "cost",
        "per million tokens", "assumed: drives", "optimizer states", "T_f = ",
    ):  # fmt: skip
        assert words in text, words


def test_a_float32_master_that_the_graph_computes_with_is_counted_once(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU with all in memory: what is where says of the states what the division of memory says."""
    write(dataclasses.replace(HardwareProfile.preset(PRESET), device="cpu"), tmp_path / "cpu.toml")
    asked = ("--compute-dtype", "float32", "--no-simulation")
    assert plan(model, *asked, hw=str(tmp_path / "cpu.toml")) == 0
    where, divided = re.findall(r"optimizer states\s+(?:-\s+)?([\d.]+ \w+)", capsys.readouterr().out)
    assert where == divided


def test_formulas_with_names_and_as_data(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--no-simulation", "--policy", "fuyou", "--formula", "names") == 0
    assert "h2d      (D_f + 2*p)/BW_GPU" in capsys.readouterr().out
    found = answered(capsys, model, "--no-simulation", "--policy", "fuyou", "--formula")
    ours, theirs = found["formulas"]
    assert ours["seconds"] == pytest.approx(found["step_s"]) and theirs["name"] == "Fuyou"
    assert theirs["binding"]["forward"] in ("compute", "h2d", "d2h", "ssd") and theirs["slopes"]


def test_the_answer_as_data_adds_up(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, model, "--batch", "2", "--policy", "swap-nvme")
    assert found["fits"] is True and found["lowest_tier"] == "nvme"
    expected_s = found["simulated_step_s"]
    assert found["tokens"] == 128 and found["tokens_per_s"] == pytest.approx(128 / expected_s)
    assert found["flops_per_s"] == pytest.approx(found["flops"] / expected_s)
    assert found["step_s"] == pytest.approx(sum(max(lanes.values()) for lanes in found["lanes_s"].values()))
    assert found["simulated_step_s"] >= 0.99 * found["step_s"]
    assert found["disk_bytes"] > 14 * found["parameters"]
    waiting = answered(capsys, model, "--batch", "2", "--policy", "zero-infinity")
    assert waiting["disk_bytes"] > 17 * waiting["parameters"]  # fp32 gradients too, small ones aside
    capacity = sum(drive.capacity_bytes for drive in HardwareProfile.preset(PRESET).nvme)
    wear_s = ENDURANCE_WRITES * capacity / found["nvme_write_bytes"] * expected_s
    assert found["wear_years"] == pytest.approx(wear_s / YEAR_S)


def test_a_function_of_a_file(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, f"{functions}:stack", "--batch", "8")
    assert (found["samples"], found["parameters"]) == (8, 7 * (64 * 64 + 64))


def test_a_picture_of_the_simulated_step(model: str, tmp_path: Path) -> None:
    assert plan(model, "--png", str(tmp_path / "step.png")) == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list"]) == 0
    assert "gpt3-175b" in capsys.readouterr().out


# --- several at once ------------------------------------------------------------------------------------------


def test_policies_side_by_side(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, model, "--compare", "recompute,lohan,zero-infinity")
    assert {row["case"] for row in found["rows"]} == {"recompute", "lohan", "zero-infinity"}
    steps = [row["step_s"] for row in found["rows"]]
    assert steps == sorted(steps) and found["best"] == "lohan"
    assert plan(model, "--compare", "recompute,lohan", "--no-simulation", "--png", str(tmp_path / "c.png")) == 0
    assert (tmp_path / "c.png").exists()
    assert "best: lohan" in capsys.readouterr().out


def test_more_drives_are_not_slower(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, model, "--vary", "ssds=1..3", "--policy", "swap-nvme", "--no-simulation")
    assert [row["case"] for row in found["rows"]] == ["1", "2", "3"]
    steps = [row["step_s"] for row in found["rows"]]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


def test_too_little_memory_in_some_cases(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, model, "--vary", "host_memory=1MiB,64GiB", "--no-simulation")
    assert [row["fits"] for row in found["rows"]] == [False, True]
    assert "too small for any plan" in found["rows"][0]["why_not"]


def test_other_gpus_and_shapes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, model, "--vary", "gpu=rtx4090,a100", "--no-simulation")
    assert ["RTX 4090" in row["hardware"] for row in found["rows"]] == [True, False]
    found = answered(capsys, model, "--vary", "batch=1,2", "--no-simulation")
    assert [row["tokens"] for row in found["rows"]] == [64, 128]


def test_another_gpu_is_planned_for_as_if_its_profile_were_given(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the profile is a CPU's, which has no fused attention with dropout; what its link is, a note says."""
    gpu = HardwareProfile.preset(PRESET)
    write(dataclasses.replace(gpu, device="cpu", device_name="a CPU"), tmp_path / "cpu.toml")
    given = ("--batch", "2", "--no-simulation")
    row = answered(capsys, model, "--vary", "gpu=rtx4090", *given, hw=str(tmp_path / "cpu.toml"))["rows"][0]
    alone = answered(capsys, model, *given)
    assert row | {"hardware": "", "notes": []} == alone | {"case": "rtx4090", "hardware": "", "notes": []}
    assert [note for note in row["notes"] if "copies within its memory" in note] and not alone["notes"]
    assert plan(model, "--vary", "gpu=rtx4090", *given, hw=str(tmp_path / "cpu.toml")) == 0
    assert capsys.readouterr().out.count("note: ") == 1
    assert plan(model, "--vary", "gpu=rtx4090", *given) == 0
    assert "note: " not in capsys.readouterr().out


def test_the_best_sequence_has_the_most_tokens_a_second(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(capsys, model, "--vary", "seq=32,128", "--no-simulation")
    short, long = found["rows"]
    assert short["samples_per_s"] > long["samples_per_s"] and short["tokens_per_s"] < long["tokens_per_s"]
    assert found["best"] == "128"


def test_what_was_simulated_counts_more_than_the_formula(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(model)
    example = source.make(1, 64)
    capture = meta_capture(example.model, example.inputs, compute_dtype=torch.bfloat16)
    subject = Subject("small", capture, example.samples, example.tokens, example.unit)
    seconds = {"swap-nvme": 0.9, "recompute": 0.2}

    def simulated(halves: Halves, plan: Plan, hw: HardwareProfile) -> Any:
        return dataclasses.replace(simulate(halves, plan, hw), step_s=seconds[plan.policy])

    monkeypatch.setattr(forecasting, "simulate", simulated)
    rows = what_if.compare(lambda *_: subject, Asked(HardwareProfile.preset(PRESET)), ",".join(seconds))
    assert [row.label for row in rows] == ["recompute", "swap-nvme"]
    chosen = what_if.best(rows)
    assert chosen is rows[0] and chosen.found is not None
    assert chosen.found.tokens_per_s == pytest.approx(64 / 0.2) and chosen.found.step_s != 0.2


def test_notes_say_what_was_asked_beyond_the_machine_and_what_a_step_is(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--host-memory", "2TiB", "--device-memory", "80GiB", "--forwards", "2", "--no-simulation")
    found = answered(capsys, model, *given)
    assert found["forwards"] == 2 and "seconds and traffic are those of a step with one" in found["notes"][-1]
    beyond = [note for note in found["notes"] if "is more than" in note]
    assert ["768 GiB" in note for note in beyond] == [True, False] and "24.0 GiB" in beyond[1]
    assert plan(model, "--compare", "keep,recompute", *given) == 0
    rows = capsys.readouterr().out
    assert all(rows.count(f"note: {note}") == 1 for note in (*beyond, found["notes"][-1]))


def test_drives_of_two_kinds_are_taken_in_order(tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    hw = HardwareProfile.preset(PRESET)
    slow = dataclasses.replace(hw.nvme[0], read_bytes_per_s=1e9)
    write(dataclasses.replace(hw, nvme=(hw.nvme[0], slow)), tmp_path / "two.toml")
    given = ("--policy", "swap-nvme", "--no-simulation")
    both = answered(capsys, model, *given, hw=str(tmp_path / "two.toml"))
    varied = answered(capsys, model, "--vary", "ssds=1..3", *given, hw=str(tmp_path / "two.toml"))
    assert varied["rows"][1] == both | {"case": "2", "hardware": varied["rows"][1]["hardware"]}
    assert varied["rows"][0]["step_s"] != both["step_s"]


def test_nothing_goes_to_a_drive_beside_memory_that_is_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of 291 gradients did, which the solver's gap left."""
    path = tmp_path / "planned_llama.py"
    path.write_text(LLAMA)
    found = answered(capsys, f"{path}:bf16", "--no-simulation")
    assert found["lowest_tier"] == "host" and not found["nvme_write_bytes"]


def test_the_best_batch_has_the_most_throughput(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answered(
        capsys,
        model,
        "--best-batch",
        "--no-simulation",
        "--device-memory",
        "4MiB",
        "--policy",
        "recompute",
        "--loss-only",
    )
    rates = {row["case"]: row["samples_per_s"] for row in found["rows"] if row["fits"]}
    assert found["best"] == max(rates, key=lambda case: rates[case])
    assert len(rates) > 2


@dataclasses.dataclass(frozen=True)
class Rated:
    """What is asked of a forecast for the best batch."""

    units_per_s: float


@pytest.mark.parametrize(
    ("most", "faster", "tried"),
    [
        (43, True, [1, 2, 4, 8, 16, 24, 32, 40, 42, 44, 48, 64]),
        (32, True, [1, 2, 4, 8, 16, 24, 32, 33, 34, 36, 40, 48, 64]),
        (43, False, [1, 2, 4, 8, 16, 24, 32, 40, 48, 64]),
        (1, True, [1, 2]),
        (0, True, [1]),
    ],
)
def test_the_best_batch_is_looked_for_up_to_the_largest_that_fits(
    most: int, faster: bool, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``faster``: beyond 32, too."""

    def attempt(label: str, make: Any) -> what_if.Row:
        batch = int(label)
        rate = float(batch if faster or batch <= 32 else 31)
        return what_if.Row(label, Rated(rate) if batch <= most else None)  # type: ignore[arg-type]

    monkeypatch.setattr(what_if, "attempt", attempt)
    rows = what_if.best_batch(lambda batch, seq: None, None)  # type: ignore[arg-type, return-value]
    assert sorted(int(row.label) for row in rows) == tried
    best = what_if.best(rows)
    best_batch = int(best.label) if best is not None else 0
    assert best_batch == (32 if not faster else max((b for b in tried if b <= most), default=0))
    assert not most or not faster or most - best_batch <= 0.05 * best_batch


def test_the_largest_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tried: list[str] = []
    real = what_if.attempt

    def attempt(label: str, make: Any) -> what_if.Row:
        tried.append(label)
        sizes = ("dit-s-2", "dit-b-2", "dit-l-2")
        return real(label, make) if label in sizes else what_if.Row(label, None, "too large")

    monkeypatch.setattr(what_if, "attempt", attempt)
    assert main(["plan", "--model", "dit-0.67b", "--max-model", "--hw", PRESET, "--no-simulation"]) == 0
    printed = capsys.readouterr().out
    assert "best: dit-l-2" in printed and "largest by LoHan itself: dit-40b" in printed
    assert len(tried) <= 4


# --- exit code 2 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--host-memory", "--device-memory"])
def test_what_does_not_fit_says_what_would(model: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, option, "100KiB") == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("does not fit: ") and len(printed.out.splitlines()) == 1
    assert "would fit" in printed.out or "pass host_memory of at least" in printed.out
    assert plan(model, option, "100KiB", "--json") == 2
    assert json.loads(capsys.readouterr().out)["fits"] is False


MASKED = {
    "model_type": "roberta",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    ("of", "given", "helps"),
    [
        ("gpt2", [], True),
        ("roberta-base", [], False),
        (CONFIG, [], True),
        (CONFIG, ["--lean-loss"], False),
        (MASKED | {"intermediate_size": 128, "max_position_embeddings": 130}, [], False),
        (None, [], False),
    ],
)
def test_a_lean_loss_is_proposed_where_there_is_one(
    of: str | dict[str, Any] | None, given: list[str], helps: bool, model: str, functions: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """``of``: a preset, a config, or None for a model of the user's own."""
    if isinstance(of, dict):
        Path(model, "config.json").write_text(json.dumps(of))
    name = of if isinstance(of, str) else f"{functions}:stack" if of is None else model
    assert plan(name, "--device-memory", "1KiB", "--no-simulation", *given) == 2
    printed = capsys.readouterr().out
    assert "device_memory" in printed and ("--lean-loss" in printed) is helps


@pytest.mark.parametrize(
    ("given", "code"),
    [([], 0), (["--json"], 0), (["--vary", "ssds=2"], 0), (["--device-memory", "1KiB"], 2)],
)
def test_a_config_of_quantized_weights_says_what_is_planned(
    given: list[str], code: int, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(model, "config.json").write_text(
        json.dumps(CONFIG | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    assert plan(model, "--no-simulation", *given) == code
    assert "the config is of quantized weights (gptq), which this plan does not count" in capsys.readouterr().out


def test_a_change_beyond_the_machine_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--policy", "in-memory", "--no-simulation")
    assert plan(model, "--batch", "4", "--device-memory", "1MiB", *given) == 2
    assert "' has " not in capsys.readouterr().out
    assert plan(model, "--batch", "65536", *given) == 2
    assert re.search(r"device_memory=[\d,]+ would fit, and 'rtx4090-12xP5510' has 24\.0 GiB", capsys.readouterr().out)


def test_nothing_fits(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--vary", "device_memory=50KiB,100KiB", "--no-simulation") == 2
    assert "none of them fits" in capsys.readouterr().out


# --- exit code 1 ----------------------------------------------------------------------------------------------


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1, printed.err
    assert printed.err.startswith("lohan-fx: ")
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt3-175"], "did you mean 'gpt3-175b'"),
        (["--model", "none/such"], "there is no folder"),
        (["--model", ""], "--model is missing"),
        ([], "--model is missing"),
        (["--model", "gpt2", "--policy", "lohann"], "did you mean 'lohan'"),
        (["--model", "gpt2", "--hw", "rtx4090-12xP551"], "did you mean 'rtx4090-12xP5510'"),
        (["--model", "gpt2", "--hw", "none.toml"], "no hardware profile at none.toml"),
        (["--model", "gpt2", "--compute-dtype", "int8"], "--compute-dtype is 'int8'"),
        (["--model", "gpt2", "--batch", "0"], "--batch is '0'"),
        (["--model", "gpt2", "--batch=-3"], "--batch is '-3'"),
        (["--model", "gpt2", "--batch", "many"], "--batch is 'many'"),
        (["--model", "gpt2", "--batch", "nan"], "--batch is 'nan'"),
        (["--model", "gpt2", "--batch", "2.5"], "--batch is '2.5'"),
        (["--model", "gpt2", "--seq", "0"], "--seq is '0'"),
        (["--model", "gpt2", "--seq", "-1"], "--seq is '-1'"),
        (["--model", "gpt2", "--seq", "99999"], "gpt2 has positions for 1024"),
        (["--model", "gpt2", "--host-memory", "0"], "host-memory is '0'"),
        (["--model", "gpt2", "--device-memory", "nan"], "device-memory is 'nan'"),
        (["--model", "gpt2", "--host-memory", "4 bananas"], "--host-memory is '4 bananas'"),
        (["--model", "gpt2", "--vary", ""], "--vary is ''"),
        (["--model", "gpt2", "--vary", "ssds"], "--vary is 'ssds'"),
        (["--model", "gpt2", "--vary", "ssds="], "over nothing"),
        (["--model", "gpt2", "--vary", "ssds=1,,2"], "ssds=1,,2 has an empty value"),
        (["--model", "gpt2", "--vary", "ssds=1..3,"], "has an empty value"),
        (["--model", "gpt2", "--vary", "ssds=5..1"], "over nothing: expected the smaller one first, 1..5"),
        (["--model", "gpt2", "--vary", "batch=5..3"], "over nothing: expected the smaller one first, 3..5"),
        (["--model", "gpt2", "--vary", "host_memory=6GiB..4GiB"], "over nothing: expected the smaller one first"),
        (["--model", "gpt2", "--vary", "ssds=0"], "--vary ssds is '0'"),
        (["--model", "gpt2", "--vary", "ssds=1..999"], "at most 64"),
        (["--model", "gpt2", "--vary", "colour=red"], "expected one of ssds"),
        (["--model", "gpt2", "--vary", "gpu=voodoo"], "no GPU 'voodoo'"),
        (["--model", "gpt2", "--compare", ""], "--compare is ''"),
        (["--model", "gpt2", "--compare", "lohan,zeroinfinity"], "did you mean 'zero-infinity'"),
        (["--model", "gpt2", "--best-batch", "--batch", "3"], "leave --batch out"),
        (["--model", "gpt2", "--best-batch", "--max-model"], "not allowed with"),
        (["--model", "gpt2", "--vary", "ssds=²"], "--vary ssds is '²'"),
        (["--model", "gpt2", "--vary", "ssds=99999999999"], "a whole number from 1 to 1,024"),
        (["--model", "gpt2", "--vary", "batch=99999999999"], "a whole number from 1 to 16,777,216"),
        (["--model", "gpt2", "--vary", "gpu=rtx409"], "no GPU 'rtx409'"),
        (["--model", "gpt2", "--vary", "seq=1025,2048"], "gpt2 has positions for 1024"),
        (["--model", "gpt2", "--png", "/none/such/a.png"], "there is no directory"),
        (["--model", "gpt2", "--png", "/proc/a.png"], "cannot be written"),
        (["--model", "gpt2", "--png", "."], "expected a file whose name ends in .png"),
        (["--model", "gpt2", "--png", "a.frob"], "expected a file whose name ends in .png"),
        (["--model", "gpt2", "--png", "a.png", "--no-simulation"], "leave --no-simulation out"),
        (["--model", "gpt2", "--max-model", "--batch", "4"], "leave --batch out"),
        (["--model", "gpt2", "--compare", "lohan", "--policy", "fuyou"], "leave --policy out"),
        (["--model", "gpt2", "--vary", "batch=1..4", "--batch", "4"], "leave --batch out"),
        (["--model", "gpt2", "--vary", "host-memory=1GiB", "--host-memory", "1GiB"], "leave --host-memory out"),
        (["--model", "gpt2", "--vary", "ssds=1..4", "--formula"], "leave --vary out"),
        (["--model", "gpt2", "--batch", "16777216"], "choose a smaller batch, sequence or model"),
        (["--model", "gpt2", "--hw", "/tmp/"], "is a directory"),
        (["--model", "gpt2", "--nvme", "/tmp"], "--nvme goes with --hw measure"),
        (["--model", "gpt2", "--frobnicate"], "unrecognized arguments"),
        (["--model", "gpt2", "--formula", "nmaes"], "--formula is 'nmaes': expected names or numbers"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: int | str | None = main(["plan", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 1
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_labels": 10**9}, '"num_labels" is 1000000000'),
        ({"attn_pdrop": -3}, '"attn_pdrop" is -3: expected a share from 0 to 1'),
        ({"model_type": "gpt22"}, "did you mean 'gpt2'"),
        ({"model_type": 3}, '"model_type" is 3'),
        ({"activation_function": 5}, "got int (value: 5)"),
        ({"activation_function": "frob"}, "KeyError: 'frob'"),
        ({"n_head": 3}, "must be divisible by num_heads"),
        ({"vocab_size": 1 << 26, "n_embd": 1 << 16}, "choose a smaller batch, sequence or model"),
    ],
)
def test_a_config_that_is_absurd(
    changed: dict[str, Any], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(model, "config.json").write_text(json.dumps(CONFIG | changed))
    assert plan(model) == 1
    assert message in one_line(capsys)


def test_a_config_whose_sizes_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    for changed, message in (
        ({"num_key_value_heads": 3}, "does not divide the 4"),
        ({"head_dim": 3}, "the model of this config does not run"),
        ({"pad_token_id": 9999}, "Padding_idx must be within"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **changed}))
        assert plan(str(tmp_path)) == 1
        assert message in one_line(capsys)


def test_a_model_that_computes_in_float32_only_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Decays of MiniMax's linear attention are buffers, whose dtype no parameter decides."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 96,
    }
    others = {"num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "minimax", **sizes, **others}))
    shape = ("--seq", "8", "--no-simulation")
    assert plan(str(tmp_path), *shape) == 1
    line = one_line(capsys)
    assert "does not run in torch.bfloat16" in line and "--compute-dtype float32" in line
    assert plan(str(tmp_path), *shape, "--compute-dtype", "float32") == 0


def test_a_config_whose_model_cannot_be_captured_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its sizes are in order: it edits a parameter."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    others = {"vocab_size": 256, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 16, "laurel_rank": 8}
    layers = {
        "layer_types": ["full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * 2,
    }
    config = {"model_type": "gemma3n_text", "num_key_value_heads": 2, **sizes, **others, **layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(str(tmp_path)) == 1
    assert one_line(capsys).startswith("lohan-fx: the model edits its parameter model.layers.0.altup.")


def test_what_is_no_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert plan(str(tmp_path)) == 1
    assert "config.json is not JSON" in one_line(capsys)
    (tmp_path / "model.bin").write_text("")
    assert plan(str(tmp_path / "model.bin")) == 1
    assert "is a file, but no .json" in one_line(capsys)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": CONFIG}))
    assert plan(str(tmp_path)) == 1
    assert 'its "text_config", as a config.json of its own, can' in one_line(capsys)


@pytest.mark.parametrize(
    ("field", "value", "unit"),
    [
        ("h2d_bytes_per_s", "21", "bytes per second"),
        ("d2h_bytes_per_s", "1e300", "bytes per second"),
        ("read_bytes_per_s", "7", "bytes per second"),
        ("host_memory_bytes", "256", "bytes (24 GiB"),
        ("capacity_bytes", "4", "bytes (24 GiB"),
        ("drive_bytes", "3840", "bytes (24 GiB"),
        ("bfloat16", "165.0", "flop per second"),
        ("adam_parameters_per_s", "1.3", "parameters per second"),
        ("op_overhead_s", "5.0", "seconds (10 us"),
        ("io_core_s_per_byte", "0.06", "seconds per byte"),
    ],
)
def test_a_profile_in_other_units(
    field: str, value: str, unit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(HardwareProfile.preset("rtx4090-1xP5510"), tmp_path / "hw.toml")
    text = (tmp_path / "hw.toml").read_text()
    changed = re.sub(rf"(?m)^{field} = \S+", f"{field} = {value}", text)
    assert changed != text
    (tmp_path / "hw.toml").write_text(changed)
    assert main(["plan", "--model", "gpt2", "--hw", str(tmp_path / "hw.toml")]) == 1
    line = one_line(capsys)
    assert field in line and unit in line


@pytest.mark.parametrize("value", ["0", "-1.0", "nan", '"fast"'])
def test_a_bandwidth_that_is_none(value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(HardwareProfile.preset(PRESET), tmp_path / "hw.toml")
    lines = (tmp_path / "hw.toml").read_text().splitlines()
    changed = [f"h2d_bytes_per_s = {value}" if line.startswith("h2d_bytes_per_s") else line for line in lines]
    (tmp_path / "hw.toml").write_text("\n".join(changed))
    assert main(["plan", "--model", "gpt2", "--hw", str(tmp_path / "hw.toml")]) == 1
    assert "h2d_bytes_per_s" in one_line(capsys)


def test_a_plan_that_cannot_run_says_so(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    notes = answered(capsys, model, "--policy", "swapadvisor")["notes"]
    assert any(note.startswith("swapadvisor is planned and simulated only: its optimizer runs") for note in notes)


def test_a_plan_that_needs_a_drive_on_a_machine_without(
    model: str, no_drive: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(model, "--policy", "swap-nvme", hw=no_drive) == 1
    assert "has no drive: choose a profile with drives" in one_line(capsys)
    assert plan("gpt2-xl", "--host-memory", "4GiB", hw=no_drive) == 1
    assert "policy 'lohan' needs a drive" in one_line(capsys)
    assert plan(model, "--device-memory", "1MB", hw=no_drive) == 2
    told = capsys.readouterr().out
    assert "would fit" in told and "has no drive: parameters and states, " in told and "have to fit beside that" in told
    assert plan(model, "--vary", "ssds=1..2", hw=no_drive) == 1
    assert "has no drive to take more of" in one_line(capsys)
    assert plan(model, "--policy", "in-memory", hw=no_drive) == 0


def test_a_model_too_large_for_the_disk(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hw = HardwareProfile.preset("rtx4090-1xP5510")
    tiny = dataclasses.replace(hw, nvme=(dataclasses.replace(hw.nvme[0], capacity_bytes=1 << 20),))
    write(tiny, tmp_path / "tiny.toml")
    assert plan(model, "--policy", "swap-nvme", hw=str(tmp_path / "tiny.toml")) == 1
    line = one_line(capsys)
    assert "bytes are missing" in line and "more drives like these would hold it" in line


def test_checkpoints_take_the_states_disk_space_once_more_each(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--policy", "zero-infinity", "--no-simulation")
    without, kept = (answered(capsys, model, *asked, "--checkpoints", count) for count in ("0", "2"))
    assert without["checkpoints"] == 0 and without == {**answered(capsys, model, *asked)}
    each = kept["bytes_per_checkpoint"]
    assert each == pytest.approx(14 * kept["parameters"], rel=0.01) and each == without["bytes_per_checkpoint"]
    assert kept["disk_bytes"] == without["disk_bytes"] + 2 * each
    assert plan(model, *asked) == 0
    assert "; each checkpoint that is kept takes " in capsys.readouterr().out
    assert plan(model, *asked, "--checkpoints", "2") == 0
    assert "more for the last 2 checkpoints" in capsys.readouterr().out
    hw = HardwareProfile.preset("rtx4090-1xP5510")
    small = dataclasses.replace(hw.nvme[0], capacity_bytes=without["disk_bytes"] + each + each // 2)
    write(dataclasses.replace(hw, nvme=(small,)), tmp_path / "small.toml")
    assert plan(model, *asked, "--checkpoints", "1", hw=str(tmp_path / "small.toml")) == 0
    capsys.readouterr()
    assert plan(model, *asked, "--checkpoints", "2", hw=str(tmp_path / "small.toml")) == 1
    assert f"({2 * each:,} of them for checkpoints=2)" in one_line(capsys)


@pytest.mark.parametrize("count", ["17", "-1", "one"])
def test_checkpoints_that_cannot_be_kept(count: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, f"--checkpoints={count}") == 1
    assert f"--checkpoints is {count!r}: expected how many to keep, 0 to 16" in one_line(capsys)


def test_checkpoints_need_a_drive(model: str, no_drive: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--policy", "in-memory", "--checkpoints", "1", hw=no_drive) == 1
    assert "checkpoints are kept on NVMe" in one_line(capsys)


def test_a_function_that_raises_shows_its_own_traceback(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{functions}:raises") == 1
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == "" and lines[0].startswith("Traceback")
    assert "in raises" in printed.err and "in deeper" in printed.err
    assert "model_source.py" not in printed.err
    assert lines[-1].startswith(f"lohan-fx: {functions}:raises failed: NameError")


@pytest.mark.parametrize("function", ["raises", "fussy"])
@pytest.mark.parametrize("options", [("--best-batch",), ("--vary", "batch=1,2")], ids=["best batch", "vary"])
def test_so_does_one_that_is_tried_with_several_batches(
    function: str, options: tuple[str, ...], functions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where only some of them raise."""
    assert plan(f"{functions}:{function}", *options, "--no-simulation") == 1
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert printed.out == "" and lines[0].startswith("Traceback")
    assert f"in {function}" in printed.err and "in deeper" in printed.err
    batch = 2 if function == "fussy" else 1
    assert lines[-1].startswith(f"lohan-fx: {functions}:{function} with batch={batch} failed: NameError")


def test_so_does_one_under_several_policies(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{functions}:raises", "--compare", "lohan,recompute") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback") and "in deeper" in printed


def test_a_function_that_knows_no_batch(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{functions}:stack", "--seq", "4") == 1
    assert "decides that itself" in one_line(capsys)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("needs", "missing a required argument: 'path'"),
        ("nothing", "expected at least one sample"),
        ("numbered", "expected the names of the forward's arguments"),
    ],
)
def test_a_function_that_gives_no_example(
    function: str, message: str, functions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(f"{functions}:{function}") == 1
    assert message in one_line(capsys)


def test_whatever_a_function_raises_is_its_own(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{functions}:gives_up") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1].endswith("gives_up failed: BaseException: enough")


def test_a_file_that_is_no_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken_syntax.py").write_text("def f(:\n")
    assert plan(f"{tmp_path / 'broken_syntax.py'}:f") == 1
    printed = capsys.readouterr().err
    assert "frozen" not in printed and "SyntaxError" in printed.splitlines()[-1]


def test_a_function_may_take_anything_and_print(functions: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{functions}:takes_anything", "--batch", "8", "--json") == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["samples"] == 8
    assert "from the user" in printed.err


def test_the_best_batch_of_a_function_that_takes_none(functions: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(f"{functions}:needs", "--best-batch") == 1
    assert "leave out --batch, --best-batch and --vary batch" in one_line(capsys)


def test_the_best_batch_of_a_model_that_takes_no_single_sample(
    functions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--best-batch", "--device-memory", "2MiB", "--no-simulation", "--compute-dtype", "float32")
    found = answered(capsys, f"{functions}:normalised", *asked)
    rows = {row["case"]: row for row in found["rows"]}
    assert not rows["1"]["fits"] and rows["1"]["why_not"]
    assert int(found["best"]) > 1 and rows[found["best"]]["fits"]


def test_a_table_as_wide_as_the_terminal(
    functions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {}
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert plan(f"{functions}:stack", "--vary", "batch=1,2", "--no-simulation") == 0
        tables[columns] = capsys.readouterr().out
    assert max(map(len, tables["80"].splitlines())) <= 80 < max(map(len, tables["200"].splitlines()))
    cells = [sorted(set(re.split(r"  +|\n", tables[columns]))) for columns in tables]
    assert cells[0] == cells[1]


def test_what_libraries_print_while_planning_is_no_part_of_the_answer(capfd: pytest.CaptureFixture[str]) -> None:
    libc = ctypes.CDLL(None)
    with libraries_silenced():
        libc.puts(b"from C")
    print("from us")
    libc.fflush(None)
    printed = capfd.readouterr()
    assert printed.out == "from us\n" and "from C" in printed.err


# --- the change that would fit really does ---------------------------------------------------------------------


LESS = 0.97
"""Of a promise said to be the least, this share must not do."""


def suggested(text: str) -> dict[str, str]:
    """The options of the smallest change that a refusal names."""
    found = re.findall(r"(host|device)_memory=([\d,]+) would fit", text)
    found += [("host", least) for least in re.findall(r"pass host_memory of at least ([\d,]+)", text)]
    return {f"--{tier}-memory": nbytes.replace(",", "") for tier, nbytes in found}


def asked_until_it_fits(
    capsys: pytest.CaptureFixture[str], model: str, policy: str, asked: dict[str, str], *others: str
) -> dict[str, str]:
    """``asked`` with the changes that refusals name, until it fits."""
    for _ in range(3):  # what takes no part of host memory at all can only be told once something fits there
        code = plan(model, *(word for pair in asked.items() for word in pair), "--policy", policy, *others)
        text = capsys.readouterr().out
        if code == 0:
            return asked
        assert code == 2 and suggested(text), text
        asked = asked | suggested(text)
    raise AssertionError(text)


@pytest.mark.parametrize(
    ("policy", "given"),
    [
        ("lohan", ("100KiB", "24GiB")),
        ("lohan", ("80MiB", "300KiB")),
        ("in-memory", ("90MiB", "24GiB")),
        ("zero-infinity", ("64GiB", "1MiB")),
        ("swapadvisor", ("700MiB", "200MiB")),
    ],
)
def test_the_smallest_change_really_fits(
    model: str, given: tuple[str, str], policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given_options = {"--host-memory": given[0], "--device-memory": given[1]}
    others = ("--no-simulation", *(("--batch", "128") if policy == "swapadvisor" else ()))
    asked = asked_until_it_fits(capsys, model, policy, given_options, *others)
    for option in (option for option in asked if asked[option] != given_options[option]):
        less = asked | {option: str(int(LESS * int(asked[option])))}
        words = [word for pair in less.items() for word in pair]
        assert plan(model, *words, "--policy", policy, *others) == 2
        assert option in suggested(capsys.readouterr().out)


def test_much_that_is_missing_beside_a_gpu_is_what_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """29 GB of optimizer states: windows are the device's, staging is capped by the size of a layer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"n_embd": 8192, "n_head": 64, "n_layer": 3}))
    model, device, mib = str(tmp_path), ("--device-memory", "80GiB", "--no-simulation"), 1 << 20
    asked = asked_until_it_fits(capsys, model, "in-memory", {"--host-memory": "4GiB"}, *device)
    enough = int(asked["--host-memory"])
    found = answered(capsys, model, "--policy", "in-memory", "--host-memory", str(enough), *device)
    assert enough - mib < found["peak_bytes"]["host"] <= enough
    assert plan(model, "--policy", "in-memory", "--host-memory", str(enough - mib), *device) == 2


def test_the_answer_shows_windows_and_the_division(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--host-memory", "520MiB", "--device-memory", "8MiB")
    assert plan(model, *options) == 0
    text = capsys.readouterr().out
    for words in (
        "memory of",
        "saves per step",
        "windows: fetch",
        "swap out",
        "per lane",
        "for gradients",
    ):
        assert words in text, words
    found = answered(capsys, model, *options)
    windows, shares = found["windows"], {(s["tier"], s["use"]): s["bytes"] for s in found["division"]}
    assert shares["host", "staging buffers"] == staging_bytes(Windows(**windows))
    assert sum(nbytes for (tier, _), nbytes in shares.items() if tier == "host") == found["budget_bytes"]["host"]
