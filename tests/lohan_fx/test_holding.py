"""holding: all gradients wait, in the memory that the plan leaves, and the plan still fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.plan import OptimizerTiming, Tier
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
