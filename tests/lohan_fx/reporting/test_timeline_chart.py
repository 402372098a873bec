"""The picture's numbers are those of the events; the picture itself is a PNG of the promised size."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest

from lohan_fx.plan import Plan, Prediction, Stage, Windows
from lohan_fx.reporting import timeline_chart
from lohan_fx.reporting.timeline_chart import draw
from lohan_fx.runtime.timeline import Event

STEP = [
    Event("compute", "forward", 100.0, 102.0),
    Event("compute", "wait:fetch of w", 100.5, 101.0),
    Event("ssd", "read w:compute", 100.0, 101.0, 1 << 20),
    Event("ssd", "read b:compute", 100.5, 101.5, 1 << 20),
    Event("h2d", "fetch of w", 101.0, 101.1, 1 << 20),
    Event("compute", "backward", 102.0, 107.0),
    Event("compute", "wait:gradient window for w", 106.0, 106.25),
    Event("d2h", "gradient of w", 103.0, 103.1, 1 << 20),
    Event("cpu", "update of w", 104.0, 107.5, 1 << 20),
    Event("ssd", "write w:master", 107.0, 108.0, 1 << 20),
]
PREDICTION = Prediction(Stage({"compute": 1.5}), Stage({"compute": 4.0, "ssd": 3.0}), {}, 0, 0, 0, 0)
WINDOWS = Windows(
    0, 0, 0, chunk_elements=4096, io_bytes=4096, io_buffers=1, optimizer_buffers=2, gradient_buffers=2, swap_out_bytes=0
)
PLAN = Plan("lohan", "cpu", "bfloat16", 1 << 30, 1 << 30, (), (), WINDOWS, prediction=PREDICTION)


def test_what_is_predicted_of_a_lane_counts_updates_after_the_backward() -> None:
    prediction = dataclasses.replace(PREDICTION, optimizer=Stage({"ssd": 2.0, "cpu": 0.5}))
    found = timeline_chart._predicted_s(dataclasses.replace(PLAN, prediction=prediction))
    assert found == {"compute": 5.5, "h2d": 0.0, "d2h": 0.0, "ssd": 5.0, "cpu": 0.5}


def test_stages_add_up_to_the_step() -> None:
    stages = timeline_chart._stages(STEP, 8.0)
    assert (stages.forward_s, stages.backward_s, stages.stall_s, stages.rest_s) == (1.5, 4.75, 0.75, 1.0)


@pytest.mark.parametrize("begin_s", [107.0, 107.5])
def test_what_compute_waits_for_after_the_backward_is_of_no_stage(begin_s: float) -> None:
    waited = Event("compute", "wait:update of w", begin_s, 108.0)
    assert timeline_chart._stages([*STEP, waited], 8.0) == timeline_chart._stages(STEP, 8.0)


def test_a_wait_as_the_backward_begins_is_the_backwards_alone() -> None:
    waited = Event("compute", "wait:fetch of w", 102.0, 103.0)
    stages = timeline_chart._stages([*STEP, waited], 8.0)
    assert (stages.forward_s, stages.backward_s, stages.stall_s, stages.rest_s) == (1.5, 3.75, 1.75, 1.0)


ENDLESS = dataclasses.replace(PREDICTION, optimizer=Stage({"ssd": math.inf, "cpu": 0.5}))


@pytest.mark.parametrize(
    "plan",
    [None, PLAN, dataclasses.replace(PLAN, prediction=ENDLESS)],
    ids=["measured", "predicted", "by a profile without drives"],
)
@pytest.mark.parametrize("events", [STEP, STEP[:1], STEP[2:3]], ids=["all lanes", "forward alone", "ssd alone"])
def test_it_writes_a_png(events: list[Event], plan: Plan | None, tmp_path: Path) -> None:
    draw(events, tmp_path / "step.png", title="a model", plan=plan)
    content = (tmp_path / "step.png").read_bytes()
    assert content.startswith(b"\x89PNG") and content.endswith(b"IEND\xaeB`\x82")
    assert int.from_bytes(content[16:20]) > int.from_bytes(content[20:24]) > 700


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no events.*monitor\.record"):
        draw([], tmp_path / "step.png")
    assert not (tmp_path / "step.png").exists()


def test_a_missing_matplotlib_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'lohan-fx\[plot\]'"):
        draw(STEP, tmp_path / "step.png")
