"""A plan that is revised between two steps changes no number, and is made once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile
from lohan_fx.planning import self_check
from lohan_fx.planning.self_check import LEARNING_STEPS, WARM_UP_STEPS
from lohan_fx.reporting.monitor import StepReport
from tests.end_to_end.models import GPT2, Case
from tests.end_to_end.recipes import LR, cpu_profile

STEPS = 8


def this_machine() -> HardwareProfile:
    """A profile that counts as measured here, so that the first steps may correct it."""
    return dataclasses.replace(cpu_profile(), machine=HardwareProfile.fingerprint())


def losses_of(
    case: Case, nvme: Path, hw: HardwareProfile
) -> tuple[list[float], list[torch.Tensor], list[int], list[StepReport]]:
    """Losses, final weights, and of each step whether its graphs were linked anew, and what the monitor reported."""
    nvme.mkdir(exist_ok=True)
    model = case.build()
    lohan_fx.compile(model, hw, nvme=[nvme], compute_dtype=torch.float32)
    with lohan_fx.releasing(model):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=1)
        torch.manual_seed(1)
        losses, linked, reports = [], [], []
        monitor = lohan_fx.Monitor(model)
        first = None
        for _ in range(STEPS):
            loss = model(**case.batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            reports.append(monitor.step())
            first = first or compiled(model).halves[0]
            linked.append(int(compiled(model).halves[-1] is not first))
            assert len(compiled(model).training_graphs()) == 1
        weights = [value.clone() for value in model.state_dict().values()]
    return losses, weights, linked, reports


def test_a_revised_plan_trains_on_with_equal_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady, steady_weights, never, uncorrected = losses_of(GPT2, tmp_path / "steady", cpu_profile())
    assert not any(never) and not any(report.corrected for report in uncorrected)
    monkeypatch.setattr(self_check, "REVISION_GAIN", -1e9)  # any plan is good enough to replace the first
    revised, weights, linked, reports = losses_of(GPT2, tmp_path / "revised", this_machine())
    learning = WARM_UP_STEPS + LEARNING_STEPS
    assert linked == [0] * learning + [1] * (STEPS - learning)
    assert revised == steady
    assert len({id(report.predicted) for report in reports[:learning]}) == 1
    assert len({id(report.predicted) for report in reports[learning:]}) == 1
    assert reports[0].predicted is not reports[-1].predicted
    assert not any(report.corrected for report in reports), "the second plan is made at corrected rates"
    assert all(torch.equal(a, b) for a, b in zip(weights, steady_weights, strict=True))


def test_a_plan_that_would_gain_little_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "REVISION_GAIN", 1.0)
    _, _, linked, reports = losses_of(GPT2, tmp_path, this_machine())
    assert not any(linked)
    learning = WARM_UP_STEPS + LEARNING_STEPS
    assert not any(report.corrected for report in reports[:learning])
    for report in reports[learning:]:
        assert report.predicted is reports[0].predicted
        assert report.corrected is not None and report.corrected.step_s != report.predicted_s
