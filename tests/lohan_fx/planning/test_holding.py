"""holding: all gradients wait, in the memory that the plan leaves, and the plan still fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import OptimizerTiming, ParameterPlan, Plan, Tier, Use
from lohan_fx.planning import holding
from lohan_fx.planning.joint_search import joint_search
from lohan_fx.planning.planner import make_plan
from lohan_fx.planning.problem import Problem
from lohan_fx.planning.step_time import step_seconds
from lohan_fx.policies import POLICIES
from tests.lohan_fx.planning.test_planner import FIXED, MEMORY, MIB, PEAK, PROBLEMS, blocks, fits, hardware, problem


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
    """Of a plan for updates on arrival that are put off."""
    asked = make(host, device)
    try:
        plan = holding._put_off(asked, hardware(asked.budgets.shared), joint_search)
    except InfeasiblePlan:
        return
    assert fits(asked, plan)
    ends = asked.ends.last_gradients
    order = sorted((p for p in plan.parameters if p.trainable), key=lambda p: (p.name not in ends, p.numel))
    for earlier, later in itertools.pairwise(order):
        if later.gradient_home is Tier.HOST and earlier.numel <= later.numel:
            assert earlier.gradient_home is Tier.HOST


@given(PROBLEMS, MEMORY, MEMORY)
def test_a_search_that_knows_of_it_is_never_worse_and_fits(
    make: Callable[[int, int], Problem], host: int, device: int
) -> None:
    asked = _in_bf16(replace(make(host, device), holds=True))
    hw = hardware(asked.budgets.shared)
    found: list[Plan] = []
    for plans in (
        lambda: make_plan(asked, hw),
        lambda: joint_search(asked, hw),
        lambda: holding._put_off(replace(asked, holds=False), hw, joint_search),
    ):
        with suppress(InfeasiblePlan):
            found.append(plans())
            assert fits(asked, found[-1])
            assert {p.optimizer_runs for p in found[-1].parameters if p.trainable} == {OptimizerTiming.NEXT_FORWARD}
            assert all(p.gradient_home is not None for p in found[-1].parameters if p.trainable)
    assert not found or step_seconds(asked, hw, found[0]) == min(step_seconds(asked, hw, plan) for plan in found)


def test_a_search_that_knows_of_it_finds_what_putting_off_does_not() -> None:
    """Drives bind the forward: memory for gradients and states, and which updates are made twice, are one decision."""
    hw = hardware(False)
    asked = _in_bf16(problem(FIXED + 80 * MIB, PEAK + 60 * MIB, shared=False, forward_s=0.001, holds=True))
    asked = replace(asked, activations=blocks(seconds=0.0005))
    put_off = holding._put_off(replace(asked, holds=False), hw, joint_search)
    assert step_seconds(asked, hw, joint_search(asked, hw)) < 0.9 * step_seconds(asked, hw, put_off)


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


@pytest.mark.parametrize("fits_with", range(holding.ATTEMPTS + 2))
def test_what_was_decided_last_is_looked_at_too(fits_with: int) -> None:
    """Gradients on their way need 5 MiB more with each plan, until ``decide`` has been asked ``fits_with`` times again."""
    plain = problem(FIXED + 60 * MIB, FIXED + 60 * MIB)
    decided: list[Plan] = []

    def decide(asked: Problem, hw: HardwareProfile) -> Plan:
        decided.append(replace(joint_search(asked, hw), notes=(str(len(decided)),)))
        return decided[-1]

    def device_peak(plan: Plan) -> int:
        again = int(plan.notes[0]) if plan.notes else 0
        on_their_way = 5 * MIB * min(again + 1, fits_with) * any(p.gradient_home is Tier.NVME for p in plan.parameters)
        return plain.device_peak(plan) + on_their_way

    asked = replace(plain, device_peak=device_peak)
    if fits_with <= holding.ATTEMPTS:
        assert holding._put_off(asked, hardware(True), decide).notes == (str(fits_with),)
    else:
        with pytest.raises(InfeasiblePlan):
            holding._put_off(asked, hardware(True), decide)
    assert len(decided) == 1 + min(fits_with, holding.ATTEMPTS)


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


SPREAD = (0.0, 0.125, 0.5, 0.875, 1.0)


@given(PROBLEMS, MEMORY, MEMORY)
def test_updates_are_made_twice_where_that_is_faster_by_the_formula(
    make: Callable[[int, int], Problem], host: int, device: int
) -> None:
    asked = replace(make(host, device), holds=True)
    hw = hardware(asked.budgets.shared)
    try:
        plan = make_plan(asked, hw)
    except InfeasiblePlan:
        return
    assert all(p.states_home is Tier.NVME and p.optimizer_runs is OptimizerTiming.NEXT_FORWARD for p in _twice(plan))
    assert all(p.bytes != 4 * p.numel for p in _twice(plan))
    others = [step_seconds(asked, hw, holding.updated_twice(plan, share)) for share in SPREAD]
    assert step_seconds(asked, hw, plan) * (1 - holding.WORTH_IT) <= min(others) + 1e-12


def _twice(plan: Plan) -> list[ParameterPlan]:
    return [p for p in plan.parameters if p.updated_twice]


def test_where_drives_bind_the_forward_some_are_and_where_they_bind_all_none() -> None:
    """8 bytes a parameter of bf16 and states move in the forward; the backward has compute to hide them beside, or not."""
    asked = _in_bf16(problem(FIXED + 20 * MIB, PEAK + 300 * MIB, shared=False, holds=True))
    hw = hardware(False)
    slow = replace(asked, forward_s=0.0, backward_s=1.0)
    once = holding.updated_twice(make_plan(slow, hw), 0.0)
    assert any(p.may_be_updated_twice for p in once.parameters)
    bound_s = step_seconds(replace(slow, backward_s=0.0), hw, once)
    hiding = make_plan(replace(asked, forward_s=0.0, backward_s=bound_s), hw)
    assert _twice(hiding)
    assert not _twice(make_plan(replace(asked, forward_s=0.0, backward_s=0.0), hw))
    assert not _twice(make_plan(replace(asked, forward_s=10 * bound_s, backward_s=10 * bound_s), hw))


def _in_bf16(asked: Problem) -> Problem:
    return replace(asked, parameters=tuple(replace(p, bytes=2 * p.numel) for p in asked.parameters))


@pytest.mark.parametrize("share", SPREAD)
def test_those_updated_twice_are_spread_over_the_layers(share: float) -> None:
    asked = _in_bf16(problem(10_000 * MIB, 10_000 * MIB, shared=False, policy="keep", holds=True))
    plan = make_plan(asked, hardware(False))
    many = tuple(replace(p, name=f"{p.name}.{n}") for n in range(40) for p in plan.parameters)
    found = holding.updated_twice(replace(plan, parameters=many), share)
    can = [p for p in found.parameters if p.may_be_updated_twice]
    for begin in (0, len(can) // 2):
        part = can[begin : begin + len(can) // 2]
        made = sum(p.numel for p in part if p.updated_twice) / sum(p.numel for p in part)
        assert made == pytest.approx(share, abs=0.05)
