"""The example's tables hold the same stages of a step against each other, predicted and measured."""

from __future__ import annotations

import pytest

from examples.tables import show_predicted_and_measured
from lohan_fx.plan import Plan, Prediction, Stage, Windows
from lohan_fx.reporting.monitor import StepReport

WINDOWS = Windows(
    0, 0, 0, chunk_elements=4096, io_bytes=4096, io_buffers=1, optimizer_buffers=2, gradient_buffers=2, swap_out_bytes=0
)


def test_updates_after_the_backward_are_predicted_of_a_lane_as_they_are_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    forward, backward, after = Stage({"compute": 1.0, "ssd": 0.5}), Stage({"compute": 2.0}), Stage({"ssd": 4.0})
    prediction = Prediction(forward, backward, {}, 0, 0, 0, 0, optimizer=after)
    plan = Plan("zero-infinity", "cpu", "bfloat16", 1 << 30, 1 << 30, (), (), WINDOWS, prediction=prediction)
    report = StepReport(7.0, {"compute": 3.0, "ssd": 4.5}, 0.0, 0, 0, 1 << 20, 1 << 20, 1 << 30)
    found = show_predicted_and_measured(plan, [report], 1 << 20)
    assert found["ssd"] == {"predicted": 4.5, "measured": 4.5}
    assert found["compute"] == {"predicted": 3.0, "measured": 3.0}
    assert found["step"] == {"predicted": 7.0, "measured": 7.0}
    assert "4.50 s" in capsys.readouterr().out
