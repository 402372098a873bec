"""correction: at the corrected rates the plan takes what was measured, whichever rate was wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lohan_fx import cost
from lohan_fx.forecasting.forecast import Asked, make_request
from lohan_fx.forecasting.meta_capture import meta_capture
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.halves import Halves
from lohan_fx.pipeline import plan_training
from lohan_fx.plan import Plan
from lohan_fx.planning.correction import correction
from lohan_fx.planning.predict import work_of
from lohan_fx.planning.self_check import MOST_CORRECTION, StepCheck, foretold
from lohan_fx.request import Request, settled
from tests.end_to_end.models import gpt2, tokens
from tests.end_to_end.recipes import cpu_profile

Planned = tuple[Halves, Plan, Request]


def planned(hw: HardwareProfile) -> Planned:
    capture = meta_capture(gpt2(dropout=0.0), tokens(), compute_dtype=torch.float32)
    request = make_request(
        capture, Asked(hw, host_memory_bytes=2 << 30, policy="swap-nvme", compute_dtype=torch.float32)
    )
    halves, plan = plan_training(capture.joint, request, num_outputs=capture.num_outputs, parameters=capture.parameters)
    return halves, plan, settled(request, plan.windows)


@pytest.fixture(scope="module")
def on_cpu() -> Planned:
    """Where compute, Adam and drives take about as long each."""
    return planned(replace(cpu_profile(), adam_parameters_per_s=1e6, op_overhead_s=1e-4))


def stages(found: Planned, request: Request) -> dict[str, dict[str, float]]:
    halves, plan, _ = found
    work = work_of(halves, plan, request)
    made = {"forward": cost.forward_stage, "backward": cost.backward_stage, "optimizer": cost.optimizer_stage}
    return {name: dict(stage(work, request.hw).lanes_s) for name, stage in made.items()}


def in_all(lanes_s: dict[str, dict[str, float]], lane: str) -> float:
    return sum(stage.get(lane, 0.0) for stage in lanes_s.values())


def check(lanes_s: dict[str, dict[str, float]]) -> StepCheck:
    return StepCheck(lanes_s, {name: max(lanes.values(), default=0.0) for name, lanes in lanes_s.items()})


@pytest.mark.parametrize("adam", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("compute", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("ssd", [0.7, 1.0, 2.0])
def test_each_rate_is_corrected_by_its_own_error(on_cpu: Planned, adam: float, compute: float, ssd: float) -> None:
    """What a machine with other rates would have taken is measured: these rates are found."""
    halves, plan, request = on_cpu
    hw = request.hw
    drives = tuple(
        replace(
            d,
            **{name: getattr(d, name) / ssd for name in ("read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s")},
        )
        for d in hw.nvme
    )
    true = replace(
        request,
        hw=replace(
            hw,
            adam_parameters_per_s=hw.adam_parameters_per_s / adam,
            host_memory_bytes_per_s=hw.host_memory_bytes_per_s / adam,
            memory_bytes_per_s=hw.memory_bytes_per_s / compute,
            op_overhead_s=hw.op_overhead_s * compute,
            handover_s=hw.handover_s * compute,
            nvme=drives,
        ),
        matmul_rate=request.matmul_rate / compute,
    )
    took = stages(on_cpu, true)
    found = correction(halves, plan, request, check(took))
    assert found.ratios["cpu"] == pytest.approx(adam, rel=1e-6)
    assert found.ratios["compute"] == pytest.approx(compute, rel=0.02)
    assert in_all(stages(on_cpu, found.request), "compute") == pytest.approx(in_all(took, "compute"), rel=0.01)
    assert found.step_s == pytest.approx(
        sum(max(lanes.values(), default=0.0) for lanes in stages(on_cpu, found.request).values())
    )
    assert foretold(found.prediction).lanes_s == stages(on_cpu, found.request)
    assert found.prediction.peak_bytes == plan.prediction.peak_bytes


def test_corrections_are_bounded(on_cpu: Planned) -> None:
    halves, plan, request = on_cpu
    took = stages(on_cpu, request)
    for factor, bound in ((1e6, MOST_CORRECTION), (1e-9, 1 / MOST_CORRECTION)):
        slow = {name: lanes | {"compute": factor * lanes.get("compute", 0.0)} for name, lanes in took.items()}
        assert correction(halves, plan, request, check(slow)).ratios["compute"] == bound


def test_where_nothing_was_measured_of_compute_nothing_changes(on_cpu: Planned) -> None:
    halves, plan, request = on_cpu
    found = correction(halves, plan, request, check({"forward": {}, "backward": {}, "optimizer": {}}))
    assert set(found.ratios.values()) == {1.0} and found.request == request
