"""holding: all gradients wait, in the memory that the plan leaves, and the plan still fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.plan import OptimizerTiming, Plan, Tier, Use
from lohan_fx.planner import make_plan
from lohan_fx.policies import POLICIES
from lohan_fx.problem import Problem
from tests.lohan_fx.test_planner import FIXED, MEMORY, MIB, PEAK, PROBLEMS, fits, hardware, problem


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_with_every_policy_all_updates_wait_for_the_end_of_the_backward(policy: str, shared: bool) -> None:
    plan = make_plan(problem(10_000 * MIB, 10_000 * MIB, shared=shared, policy=policy, holds=True), hardware(shared))
    for p in plan.parameters:
        waits = OptimizerTiming.NEXT_FORWARD if p.trainable else OptimizerTiming.NONE
        assert (p.optimizer_runs, p.gradient_home is not None) == (waits, p.trainable)


@given(PROBLEMS, MEMORY, MEMORY)
def test_gradients_wait_in_memory_as_far_as_it_goes(
    make: Callable[[int, int], Problem], host: int, device: int
) -> None:
    asked = replace(make(host, device), holds=True)
    try:
        plan = make_plan(asked, hardware(asked.budgets.shared))
    except InfeasiblePlan:
        return
    assert fits(asked, plan)
    ends = asked.ends.last_gradients
    order = sorted((p for p in plan.parameters if p.trainable), key=lambda p: (p.name not in ends, p.numel))
    for earlier, later in itertools.pairwise(order):
        if later.gradient_home is Tier.HOST and earlier.numel <= later.numel:
            assert earlier.gradient_home is Tier.HOST


def test_without_a_drive_they_wait_in_memory_or_do_not_fit() -> None:
    hw = replace(hardware(False), nvme=())
    roomy = make_plan(problem(2000 * MIB, PEAK + 300 * MIB, shared=False, holds=True), hw)
    assert {p.gradient_home for p in roomy.parameters} == {Tier.HOST, None}
    states = 12 * (3 * 4 * MIB + 4 * 512)
    with pytest.raises(InfeasiblePlan, match="host_memory"):
        make_plan(problem(FIXED + states, PEAK + 300 * MIB, shared=False, holds=True), hw)


def _with_gradients_on_their_way(asked: Problem, nbytes: int) -> Problem:
    """``asked``, whose graphs need ``nbytes`` more where gradients leave for the drives."""

    def device_peak(plan: Plan) -> int:
        return asked.device_peak(plan) + nbytes * any(p.gradient_home is Tier.NVME for p in plan.parameters)

    return replace(asked, device_peak=device_peak)


@pytest.mark.parametrize("host", range(120 * MIB, 180 * MIB, 7 * MIB))
def test_a_plan_that_fills_the_memory_is_made_again_with_room_for_gradients_on_their_way(host: int) -> None:
    plain = problem(host, host, shared=True)
    asked = _with_gradients_on_their_way(replace(plain, holds=True), 5 * MIB)
    filled = make_plan(plain, hardware(True))
    plan = make_plan(asked, hardware(True))
    assert fits(asked, plan)
    assert (plan.host_memory_bytes, plan.device_memory_bytes) == (filled.host_memory_bytes, filled.device_memory_bytes)


def test_where_they_fit_nowhere_the_error_speaks_of_the_promise() -> None:
    asked = _with_gradients_on_their_way(problem(120 * MIB, 120 * MIB, shared=True, holds=True), 120 * MIB)
    with pytest.raises(InfeasiblePlan, match=f"host_memory={120 * MIB:,} bytes"):
        make_plan(asked, hardware(True))


@pytest.mark.parametrize("shared", [True, False])
def test_the_division_counts_gradients_that_wait(shared: bool) -> None:
    plan = make_plan(problem(400 * MIB, 400 * MIB, shared=shared, holds=True), hardware(shared))
    assert plan.division is not None
    host = [share for share in plan.division.shares if share.tier is Tier.HOST]
    held = sum(p.held_bytes for p in plan.parameters if p.gradient_home is Tier.HOST)
    assert held > 0
    assert sum(share.bytes for share in host if share.use is Use.GRADIENTS) == held
    assert sum(share.bytes for share in host) == 400 * MIB
