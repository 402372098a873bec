"""step_time: the lines that the optimum is sought with say what the cost model says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx import cost
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.decision_model import Quantity
from lohan_fx.passes.lane_jobs import chunks, pieces, update_requests
from lohan_fx.plan import Ends, OptimizerTiming, Tier
from lohan_fx.planning.plan_builder import build_plan, default_homes
from lohan_fx.planning.step_time import quantities_of_plan, stage_lanes, work_of
from tests.lohan_fx.planning.test_planner import CPU, GPU, problem

MIB = 1 << 20
STAGES = (cost.forward_stage, cost.backward_stage, cost.optimizer_stage)
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
    per_job = draw(st.sampled_from([1e-6, 1e-4, 1e-2]))
    links = {"h2d_bytes_per_s": draw(rates), "d2h_bytes_per_s": draw(rates)}
    return replace(base, nvme=(drive,), interpreter_s_per_job=per_job, **links)


moved = st.integers(0, 10**10)
few = st.integers(0, 10**6)


@given(
    machines(),
    st.floats(0, 5),
    moved,
    moved,
    moved,
    moved,
    st.floats(0, 1),
    st.floats(0, 1),
    moved,
    moved,
    few,
    moved,
    moved,
    few,
    moved,
)
def test_the_lines_are_the_cost_model(
    hw: HardwareProfile,
    again: float,
    swapped: int,
    fetched: int,
    states: int,
    copied: int,
    part: float,
    other: float,
    late: int,
    late_copied: int,
    late_updated: int,
    later: int,
    later_copied: int,
    later_updated: int,
    again_bytes: int,
) -> None:
    asked = replace(problem(10**10, 10**10, shared=hw.device == "cpu"), launches=(300, 500))
    total = {
        Quantity.RECOMPUTE_S: again,
        Quantity.HANDED_OVER_FORWARD_S: again / 2,
        Quantity.HANDED_OVER_BACKWARD_S: again / 3,
        Quantity.FORWARD_JOBS: late_updated if hw.device != "cpu" else 0,
        Quantity.BACKWARD_JOBS: later_updated if hw.device != "cpu" else 0,
        Quantity.SWAPPED: swapped,
        Quantity.SWAPPED_NVME: int(part * swapped),
        Quantity.FETCHED_FORWARD: fetched,
        Quantity.FETCHED_FORWARD_NVME: int(other * fetched),
        Quantity.FETCHED_BACKWARD: 2 * fetched,
        Quantity.FETCHED_BACKWARD_NVME: int(part * fetched),
        Quantity.STATES: states,
        Quantity.COPIED: copied,
        Quantity.LATE_STATES: late,
        Quantity.LATE_COPIED: late_copied,
        Quantity.RETURNED: copied,
        Quantity.LATE_UPDATED: late_updated,
        Quantity.LATE_RETURNED: late_copied if late_updated else 0,
        Quantity.LATE_HELD_NVME: int(part * late_copied),
        Quantity.LATE_SUMS_NVME: int(other * late_copied),
        Quantity.NEXT_STATES: later,
        Quantity.NEXT_COPIED: later_copied,
        Quantity.NEXT_UPDATED: later_updated,
        Quantity.NEXT_RETURNED: later_copied,
        Quantity.NEXT_HELD_NVME: int(other * later_copied),
        Quantity.LATE_STATES_READ: int(part * again_bytes) if late_updated else 0,
        Quantity.NEXT_STATES_READ: int((1 - part) * again_bytes),
        Quantity.REPEATED_STATES: 12 * (again_bytes // 12),
        Quantity.REPEATED_HELD_NVME: int(other * again_bytes),
    }
    work = work_of(asked, total)
    for stage, lanes in zip(STAGES, stage_lanes(asked, hw), strict=True):
        found = stage(work, hw)
        assert found.lanes_s or not late_updated
        if found.lanes_s:
            assert max(lane.at(total) for lane in lanes) == pytest.approx(found.seconds, rel=1e-9)


def test_a_parameter_that_the_graph_does_not_read_moves_nothing() -> None:
    asked = problem(10**10, 10**10, shared=False)
    plan = build_plan(asked, {}, default_homes(asked, Tier.NVME), Tier.NVME)
    fetches = {p.name: (1, 1) for p in asked.parameters}
    with_all = work_of(asked, quantities_of_plan(asked, plan))
    assert (
        work_of(replace(asked, fetches=fetches), quantities_of_plan(replace(asked, fetches=fetches), plan)) == with_all
    )
    unread = next(p for p in asked.parameters if p.trainable and p.numel > 1 << 15)
    del fetches[unread.name]
    asked = replace(asked, fetches=fetches)
    without = work_of(asked, quantities_of_plan(asked, plan))
    assert without.state_read_bytes == with_all.state_read_bytes - 12 * unread.numel
    assert without.adam_parameters == with_all.adam_parameters - unread.numel
    assert without.gradient_bytes == with_all.gradient_bytes - unread.bytes
    assert without.fetched_forward_bytes == with_all.fetched_forward_bytes - unread.bytes


WAITING = OptimizerTiming.NEXT_FORWARD, OptimizerTiming.AFTER_BACKWARD


@pytest.mark.parametrize("runs", [OptimizerTiming.IN_BACKWARD, *WAITING])
@pytest.mark.parametrize("ends", [Ends(), Ends(frozenset(["layers.0.fc.weight"]))], ids=["", "first"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_requests_are_as_large_as_the_elements_of_their_chunk(dtype: str, ends: Ends, runs: OptimizerTiming) -> None:
    """Of parameters of whole chunks the formula has as many beside compute as the lanes get."""
    asked = replace(problem(10**10, 10**10), ends=ends)
    facts = tuple(replace(p, bytes=getattr(torch, dtype).itemsize * p.numel) for p in asked.parameters if p.numel > 512)
    asked = replace(asked, parameters=facts, compute_dtype=dtype)
    plan = build_plan(asked, {}, default_homes(asked, Tier.NVME), Tier.NVME)
    home = Tier.NVME if runs in WAITING else None
    trained = [replace(p, optimizer_runs=runs, gradient_home=home) for p in plan.parameters if p.trainable]
    plan = replace(plan, parameters=tuple(trained))
    fetched = sum(pieces(p.bytes, asked.windows) for p in trained)
    held = sum(chunks(p, asked.windows) for p in trained if home is not None)
    beside = {when: [p for p in trained if p.runs_beside(ends, "cpu") is when] for when in OptimizerTiming}
    updated = {when: sum(update_requests(p, asked.windows) for p in found) for when, found in beside.items()}
    work = work_of(asked, quantities_of_plan(asked, plan))
    assert work.forward_requests == pytest.approx(fetched + updated[OptimizerTiming.NEXT_FORWARD])
    assert work.backward_requests == pytest.approx(fetched + held + updated[OptimizerTiming.IN_BACKWARD])


def test_without_drives_there_is_no_ssd_lane() -> None:
    forward, backward, after = stage_lanes(problem(10**10, 10**10), replace(CPU, nvme=()))
    assert (len(forward), len(backward)) == (len(stage_lanes(problem(1, 1), CPU)[0]) - 4, 4)
    assert len(after) == 1


@pytest.mark.parametrize(("home", "states"), [(h, s) for h in Tier for s in (Tier.HOST, Tier.NVME)])
def test_what_a_plan_moves(home: Tier, states: Tier) -> None:
    asked = problem(10**10, 10**10, shared=False)
    plan = build_plan(asked, {}, default_homes(asked, home), states)
    fetches = {p.name: (1, 1) for p in asked.parameters} | {"layers.0.fc.weight": (2, 0)}
    asked = replace(asked, fetches=fetches, ends=Ends(frozenset({"layers.0.fc.weight"})))
    total = quantities_of_plan(asked, plan)
    large = [p for p in asked.parameters if p.numel > 1 << 15]
    trained = [p for p in large if p.trainable]
    away, tied = sum(p.bytes for p in large), large[0].bytes
    assert total[Quantity.FETCHED_FORWARD] == (0 if home is Tier.DEVICE else away + tied)
    assert total[Quantity.FETCHED_BACKWARD] == (0 if home is Tier.DEVICE else away - tied)
    assert total[Quantity.FETCHED_FORWARD_NVME] == (away + tied if home is Tier.NVME else 0)
    assert total[Quantity.FETCHED_BACKWARD_NVME] == (away - tied if home is Tier.NVME else 0)
    assert total[Quantity.FIRST_FETCHED_NVME] == (tied if home is Tier.NVME else 0)
    assert total[Quantity.STATES] == (12 * sum(p.numel for p in trained) if states is Tier.NVME else 0)
    assert total[Quantity.COPIED] == (sum(p.bytes for p in trained) if home is Tier.NVME else 0)


@pytest.mark.parametrize("shared", [True, False])
def test_what_comes_last_is_moved_after_the_backward(shared: bool) -> None:
    """Unless nothing has to move for it: on a CPU what is in memory is updated where its gradient is made."""
    last = "layers.0.fc.weight"
    asked = problem(10**10, 10**10, shared=shared, last=frozenset({last}))
    numel, nbytes = next((p.numel, p.bytes) for p in asked.parameters if p.name == last)
    for home, states in [(h, s) for h in Tier for s in (Tier.HOST, Tier.NVME)]:
        total = quantities_of_plan(asked, build_plan(asked, {}, default_homes(asked, home), states))
        away = not shared or Tier.NVME in (home, states)
        assert total[Quantity.LATE_UPDATED] == (numel if away else 0)
        assert total[Quantity.LATE_STATES] == (12 * numel if states is Tier.NVME else 0)
        assert total[Quantity.LATE_COPIED] == (nbytes if home is Tier.NVME else 0)
        others = [p.numel for p in asked.parameters if p.trainable and p.name != last and p.numel > 1 << 15]
        assert total[Quantity.STATES] == (12 * sum(others) if states is Tier.NVME else 0)
