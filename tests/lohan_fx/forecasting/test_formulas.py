"""formulas: what ``--formula`` prints is what the seconds are by, for every policy."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from lohan_fx.cost_models.formula import CostModel
from lohan_fx.forecasting.forecast import Asked, Forecast, Subject, forecast
from lohan_fx.forecasting.formulas import formula_data, formula_text, formulas, symbol_values
from lohan_fx.forecasting.meta_capture import meta_capture
from lohan_fx.hardware import HardwareProfile, RequestRate
from lohan_fx.models.model_families import model_from_config
from lohan_fx.policies import ALL, named

HW = HardwareProfile.preset("rtx4090-12xP5510")
WITH_FORMULAS = tuple({p.formulas: p.name for p in reversed(ALL) if p.formulas}.values())
"""One policy for each formula."""


@pytest.fixture(scope="module")
def subject() -> Subject:
    config = AutoConfig.for_model("gpt2", n_embd=128, n_layer=7, n_head=2, vocab_size=512, n_positions=64)
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    torch._dynamo.reset()
    capture = meta_capture(model_from_config(config), {"input_ids": ids, "labels": ids}, compute_dtype=torch.bfloat16)
    return Subject("small", capture, 2, 128, "tokens")


def found(subject: Subject, policy: str, hw: HardwareProfile = HW) -> Forecast:
    return forecast(subject, Asked(hw, policy, simulated=False))


@pytest.mark.parametrize("policy", WITH_FORMULAS)
def test_each_system_shows_its_own_formula(subject: Subject, policy: str) -> None:
    forecast_ = found(subject, policy)
    values = symbol_values(forecast_)
    ours, *theirs = formulas(forecast_)
    assert ours.seconds(values) == pytest.approx(forecast_.step_s)
    assert tuple(theirs) == named(policy).formulas
    numbers, names = formula_text(forecast_), formula_text(forecast_, names=True)
    for model in theirs:
        assert model.formula(values) in numbers and model.formula() in names
        assert model.seconds(values) > 0


def test_drives_have_their_rates_for_requests_of_the_plans_size(subject: Subject) -> None:
    rates = tuple(RequestRate(1 << size, 1e8 * size, 1e8 * size, 1e8 * size) for size in (16, 20, 26))
    hw = dataclasses.replace(HW, nvme=tuple(dataclasses.replace(drive, by_request=rates) for drive in HW.nvme))
    forecast_ = found(subject, "swap-nvme", hw)
    seconds = formulas(forecast_)[0].seconds
    assert seconds(symbol_values(forecast_)) == pytest.approx(forecast_.step_s)
    assert forecast_.step_s != pytest.approx(found(subject, "swap-nvme").step_s)


def test_a_system_without_a_formula_says_so(subject: Subject) -> None:
    text = formula_text(found(subject, "l2l"))
    assert "policy l2l has no formula of its own in the papers" in text
    assert len(formula_data(found(subject, "l2l"))) == 1


def test_lohan_has_the_printed_and_the_corrected_one(subject: Subject) -> None:
    names = [model["name"] for model in formula_data(found(subject, "lohan"))]
    assert names == ["LoHan corrected", "LoHan as printed", "LoHan corrected, in its symbols"]


def test_slopes_are_those_of_what_binds(subject: Subject) -> None:
    # The preset's mixed rate is exactly what taking turns gives: a kink, where both sides have slopes of their own.
    slower = (dataclasses.replace(HW.nvme[0], mixed_bytes_per_s=1e9),) * 12
    forecast_ = found(subject, "zero-infinity", dataclasses.replace(HW, nvme=slower))
    values = symbol_values(forecast_)
    for model, data in zip(formulas(forecast_), formula_data(forecast_), strict=True):
        assert data["slopes"]
        for symbol, slope in data["slopes"].items():
            assert slope == pytest.approx(_nearby(model, values, symbol), rel=1e-3, abs=1e-15), symbol


def _nearby(model: CostModel, values: dict[str, float], symbol: str) -> float:
    """Difference quotient, for a little more of it."""
    more = values[symbol] * 1e-6 or 1e-6
    return (model.seconds({**values, symbol: values[symbol] + more}) - model.seconds(values)) / more


def test_the_most_effective_comes_first(subject: Subject) -> None:
    text = formula_text(found(subject, "fuyou"))
    table = text.split("Fuyou's own")[1].split("what changes it")[1].splitlines()[1:]
    percents = [_seconds(line.split()[2:4]) for line in table if line.startswith("  ")]
    assert percents == sorted(percents, reverse=True) and len(percents) > 1


def _seconds(cell: list[str]) -> float:
    return abs(float(cell[0])) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[cell[1]]


class Scale(nn.Module):
    """Multiplies by ``weight`` (N,), without a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 << 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).tanh().sum()


def test_a_model_without_matmuls() -> None:
    capture = meta_capture(Scale(), {"x": torch.ones(4, 1 << 16)}, compute_dtype=torch.bfloat16)
    for policy in ("lohan", "zero-infinity"):
        forecast_ = found(Subject("scale", capture, 4, 4, "samples"), policy)
        assert forecast_.forward_flops == 0 and formula_text(forecast_)
        json.dumps(formula_data(forecast_), allow_nan=False)


def test_a_machine_without_a_drive(subject: Subject) -> None:
    forecast_ = found(subject, "zero-offload", dataclasses.replace(HW, nvme=()))
    assert "ZeRO-Offload: T = T_f + T_b + T_o" in formula_text(forecast_)
    streamed = found(subject, "lohan", dataclasses.replace(HW, nvme=()))
    text, data = formula_text(streamed), formula_data(streamed)
    assert text.endswith("LoHan's own formula needs drives, which 'rtx4090-12xP5510' has not")
    assert "inf" not in text and "nan" not in text
    json.dumps(data, allow_nan=False)
