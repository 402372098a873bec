"""step_time: the lines that the optimum is sought with say what the cost model says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx import cost
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.decision_model import Quantity
from lohan_fx.plan import Tier
from lohan_fx.plan_builder import build_plan, default_homes
from lohan_fx.step_time import quantities_of_plan, stage_lanes, work_of
from tests.lohan_fx.test_planner import CPU, GPU, problem

MIB = 1 << 20
rates = st.sampled_from([1e8, 1e9, 3e9, 2e10])


@st.composite
def machines(draw: st.DrawFn) -> HardwareProfile:
    drive = replace(
        GPU.nvme[0],
        read_bytes_per_s=draw(rates),
        write_bytes_per_s=draw(rates),
        mixed_bytes_per_s=draw(rates),
    )
    base = draw(st.sampled_from([GPU, CPU]))
    return replace(base, nvme=(drive,), h2d_bytes_per_s=draw(rates), d2h_bytes_per_s=draw(rates))


moved = st.integers(0, 10**10)


@given(machines(), st.floats(0, 5), moved, moved, moved, moved, st.floats(0, 1), st.floats(0, 1))
def test_the_lines_are_the_cost_model(
    hw: HardwareProfile,
    again: float,
    swapped: int,
    fetched: int,
    states: int,
    copied: int,
    part: float,
    other: float,
) -> None:
    asked = problem(10**10, 10**10, shared=hw.device == "cpu")
    total = {
        Quantity.RECOMPUTE_S: again,
        Quantity.SWAPPED: swapped,
        Quantity.SWAPPED_NVME: int(part * swapped),
        Quantity.FETCHED_FORWARD: fetched,
        Quantity.FETCHED_FORWARD_NVME: int(other * fetched),
        Quantity.FETCHED_BACKWARD: 2 * fetched,
        Quantity.FETCHED_BACKWARD_NVME: int(part * fetched),
        Quantity.STATES: states,
        Quantity.COPIED: copied,
    }
    work = work_of(asked, total)
    for stage, lanes in zip((cost.forward_stage, cost.backward_stage), stage_lanes(asked, hw), strict=True):
        assert max(lane.at(total) for lane in lanes) == pytest.approx(stage(work, hw).seconds, rel=1e-9)


def test_without_drives_there_is_no_ssd_lane() -> None:
    forward, backward = stage_lanes(problem(10**10, 10**10), replace(CPU, nvme=()))
    assert (len(forward), len(backward)) == (len(stage_lanes(problem(1, 1), CPU)[0]) - 2, 4)


@pytest.mark.parametrize(("home", "states"), [(h, s) for h in Tier for s in (Tier.HOST, Tier.NVME)])
def test_what_a_plan_moves(home: Tier, states: Tier) -> None:
    asked = problem(10**10, 10**10, shared=False)
    plan = build_plan(asked, {}, default_homes(asked, home), states)
    asked = replace(asked, fetches={"layers.0.fc.weight": (2, 0)})
    total = quantities_of_plan(asked, plan)
    large = [p for p in asked.parameters if p.numel > 1 << 15]
    trained = [p for p in large if p.trainable]
    away, tied = sum(p.bytes for p in large), large[0].bytes
    assert total[Quantity.FETCHED_FORWARD] == (0 if home is Tier.DEVICE else away + tied)
    assert total[Quantity.FETCHED_BACKWARD] == (0 if home is Tier.DEVICE else away - tied)
    assert total[Quantity.FETCHED_FORWARD_NVME] == (away + tied if home is Tier.NVME else 0)
    assert total[Quantity.FETCHED_BACKWARD_NVME] == (away - tied if home is Tier.NVME else 0)
    assert total[Quantity.STATES] == (12 * sum(p.numel for p in trained) if states is Tier.NVME else 0)
    assert total[Quantity.COPIED] == (sum(p.bytes for p in trained) if home is Tier.NVME else 0)
