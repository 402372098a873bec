"""self_check: stages told apart, lanes corrected by what they took, and when that is worth another plan."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest

from lohan_fx.hardware import HardwareProfile, RequestRate
from lohan_fx.plan import Prediction, Stage
from lohan_fx.planning import self_check
from lohan_fx.planning.self_check import (
    LEARNING_STEPS,
    MOST_CORRECTION,
    STAGES,
    WARM_UP_STEPS,
    SelfCheck,
    StepCheck,
    corrected,
    corrections,
    may_be_beaten,
    typical,
    worth_revising,
)
from lohan_fx.runtime.timeline import Timeline

GPU = HardwareProfile.preset("rtx4090-12xP5510")


def prediction(**backward_s: float) -> Prediction:
    return Prediction(
        forward=Stage({"compute": 1.0, "ssd": 0.5}),
        backward=Stage(backward_s),
        peak_bytes={"device": 1, "host": 1},
        nvme_read_bytes=0,
        nvme_write_bytes=0,
        flops=0,
        recompute_flops=0,
    )


def check(**backward_s: float) -> StepCheck:
    lanes = {"forward": {"compute": 1.0, "ssd": 0.5}, "backward": backward_s, "optimizer": {}}
    return StepCheck(lanes, {"forward": 1.0, "backward": max(backward_s.values()), "optimizer": 0.0})


def record(timeline: Timeline, lane: str, seconds: float) -> None:
    now = time.perf_counter()
    timeline.record(lane, "work", now - seconds, now)


def one_step(checks: SelfCheck, timeline: Timeline, *stages: str) -> None:
    for stage in stages:
        checks.begins(stage)
        record(timeline, "ssd", {"forward": 1.0, "backward": 2.0, "optimizer": 4.0}[stage])
    checks.begins("end")


def test_what_lanes_did_belongs_to_the_stage_in_which_they_did_it() -> None:
    timeline = Timeline()
    checks = SelfCheck(timeline)
    record(timeline, "ssd", 100.0)  # before the step: nobody's
    one_step(checks, timeline, *STAGES)
    (step,) = checks.steps
    assert {stage: lanes["ssd"] for stage, lanes in step.lanes_s.items()} == pytest.approx(
        {"forward": 1.0, "backward": 2.0, "optimizer": 4.0}
    )
    assert step.seconds == pytest.approx(sum(step.stages_s.values()))


@pytest.mark.parametrize(
    "stages", [("forward", "forward", "backward", "backward", "optimizer"), ("optimizer",), ("forward", "optimizer")]
)
def test_steps_that_are_not_one_forward_and_one_backward_are_not_judged(stages: tuple[str, ...]) -> None:
    timeline = Timeline()
    checks = SelfCheck(timeline)
    one_step(checks, timeline, *stages)
    assert not checks.steps
    one_step(checks, timeline, *STAGES)
    assert len(checks.steps) == 1


def test_what_a_long_run_leaves_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "MOST_STEPS", 10)
    timeline = Timeline()
    checks = SelfCheck(timeline)
    one_step(checks, timeline, *STAGES)
    (first,) = checks.steps
    for _ in range(20):
        one_step(checks, timeline, *STAGES)
    assert len(checks.steps) == 10 and checks.steps[0] is first
    for _ in range(100):  # an evaluation with gradients
        checks.begins("forward")
    assert len(checks._marks) < 10
    checks.begins("end")
    assert len(checks.steps) == 10 and not checks._marks


def test_it_has_learned_after_the_warm_up_and_some_steps() -> None:
    timeline = Timeline()
    checks = SelfCheck(timeline)
    for done in range(WARM_UP_STEPS + LEARNING_STEPS):
        assert not checks.has_learned, done
        one_step(checks, timeline, *STAGES)
    assert checks.has_learned
    checks.forget()
    assert not checks.has_learned


def test_the_warm_up_is_left_out_of_what_is_typical() -> None:
    steps = [check(compute=9.0), check(compute=2.0), check(compute=3.0), check(compute=4.0)]
    assert typical(steps).lanes_s["backward"]["compute"] == 3.0
    assert typical(steps[:1]).lanes_s["backward"]["compute"] == 9.0


def test_a_lane_is_corrected_by_how_much_longer_it_took_over_both_stages() -> None:
    ratios = corrections(prediction(compute=3.0, ssd=1.5, h2d=0.001), check(compute=5.0, ssd=0.5, h2d=0.05))
    assert ratios["compute"] == pytest.approx(6.0 / 4.0)
    assert ratios["ssd"] == pytest.approx(1.0 / 2.0)
    assert ratios["h2d"] == 1.0  # 0.1% of the step: noise there must not become a rate


def test_corrections_are_bounded() -> None:
    assert corrections(prediction(compute=1.0), check(compute=1e6))["compute"] == MOST_CORRECTION


def test_the_corrected_profile_has_each_rate_divided_by_its_ratio() -> None:
    ratios = {"compute": 2.0, "ssd": 4.0, "h2d": 5.0, "d2h": 8.0, "cpu": 10.0}
    hw = corrected(GPU, ratios)
    assert hw.matmul_flops_per_s["bfloat16"] == GPU.matmul_flops_per_s["bfloat16"] / 2
    assert (hw.memory_bytes_per_s, hw.op_overhead_s) == (GPU.memory_bytes_per_s / 2, GPU.op_overhead_s * 2)
    assert math.isclose(hw.ssd_read_bytes_per_s, GPU.ssd_read_bytes_per_s / 4)
    assert math.isclose(hw.ssd_mixed_bytes_per_s, GPU.ssd_mixed_bytes_per_s / 4)
    assert (hw.h2d_bytes_per_s, hw.d2h_bytes_per_s) == (GPU.h2d_bytes_per_s / 5, GPU.d2h_bytes_per_s / 8)
    assert hw.adam_parameters_per_s == GPU.adam_parameters_per_s / 10
    assert corrected(GPU, {}) == GPU


def test_rates_by_request_are_corrected_too() -> None:
    """Or a profile asked for its rates at some size would have the old ones again."""
    rate = RequestRate(request_bytes=1 << 20, read_bytes_per_s=4.0, write_bytes_per_s=8.0, mixed_bytes_per_s=6.0)
    drives = tuple(dataclasses.replace(drive, by_request=(rate,)) for drive in GPU.nvme)
    measured = dataclasses.replace(GPU, nvme=drives).at_requests(1 << 20)
    found = corrected(measured, {"ssd": 2.0})
    assert found.at_requests(1 << 20) == found
    assert [drive.read_bytes_per_s for drive in found.nvme] == [2.0] * len(drives)


def test_a_plan_is_revised_only_for_more_than_a_few_per_cent() -> None:
    assert not worth_revising(10.0, 9.6)
    assert worth_revising(10.0, 9.4)


@pytest.mark.parametrize(
    ("ratios", "now_s", "beaten"),
    [
        ({"compute": 1.0, "ssd": 2.0}, 10.0, False),  # compute binds: no other plan does less of it in less time
        ({"compute": 1.04, "ssd": 1.0}, 10.4, False),
        ({"compute": 2.0, "ssd": 1.0}, 20.0, True),  # another plan may recompute less and move more
        ({"compute": 1.0, "ssd": 0.5}, 10.0, True),
        ({"compute": 1.5, "ssd": 1.5}, 15.0, False),
        ({}, 10.0, False),
    ],
)
def test_no_plan_is_searched_for_where_none_can_be_worth_revising(
    ratios: dict[str, float], now_s: float, beaten: bool
) -> None:
    assert may_be_beaten(10.0, ratios, now_s) == beaten
