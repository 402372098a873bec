"""holding: plans whose gradients all wait for ``step()``: for clipping by the global norm and for loss scaling (docs/0014)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from contextlib import suppress

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import OptimizerTiming, ParameterPlan, Plan, Tier
from lohan_fx.planning.division import division_of
from lohan_fx.planning.joint_search import joint_search
from lohan_fx.planning.memory_model import check, host_bytes, missing, needed, resident_bytes
from lohan_fx.planning.problem import Budgets, Problem
from lohan_fx.planning.step_time import step_seconds

Decide = Callable[[Problem, HardwareProfile], Plan]

SHARES = 8
"""Eighths of the states' elements: how finely the share is chosen whose updates are made twice."""
WORTH_IT = 0.01
"""Share of a step that updating twice must save: it is more work for drives and processor."""
ATTEMPTS = 3
"""How often a policy decides again because gradients that wait need memory which its plan has filled."""


def plan_holding(problem: Problem, hw: HardwareProfile, decide: Decide) -> Plan:
    """What ``decide`` plans, with every update begun by ``step()``: the faster, by the formula, of what it plans for
    updates on arrival, put off, and of what LoHan's search, if it is that, plans knowing it.

    Raises ``InfeasiblePlan`` where neither fits.
    """
    known = _known(problem, hw) if decide is joint_search else None
    try:
        put_off = _put_off(dataclasses.replace(problem, holds=False), hw, decide)
    except InfeasiblePlan:
        if known is None:
            raise
        return known
    if known is None or step_seconds(problem, hw, put_off) <= step_seconds(problem, hw, known):
        return put_off
    return known


def _known(problem: Problem, hw: HardwareProfile) -> Plan | None:
    """The search's plan where all gradients wait; None where it finds none that fits."""
    with suppress(InfeasiblePlan):
        return joint_search(problem, hw)
    return None


def _put_off(problem: Problem, hw: HardwareProfile, decide: Decide) -> Plan:
    """What ``decide`` plans for updates on arrival, with every update begun by ``step()``.

    A gradient that is updated where it is needs nothing; on its way to the drives it takes memory. Where the plan has filled
    that, it is made again with so much less.
    """
    first = plan = decide(problem, hw)
    budgets = problem.budgets
    more = {"device": 0, "host": 0}
    for attempt in range(ATTEMPTS + 1):
        before, away = needed(problem, plan, problem.device_peak(plan)), _away(plan, hw)
        peak = problem.device_peak(away)
        if not missing(problem, away, peak):
            return holding(problem, hw, plan)
        if attempt == ATTEMPTS:
            break
        more = {tier: max(more[tier], nbytes - before[tier]) for tier, nbytes in needed(problem, away, peak).items()}
        try:
            plan = decide(dataclasses.replace(problem, budgets=_with_less(budgets, more)), hw)
        except InfeasiblePlan:
            break
        plan = dataclasses.replace(
            plan, host_memory_bytes=budgets.host_memory_bytes, device_memory_bytes=budgets.device_memory_bytes
        )
    return holding(problem, hw, first)


def holding(problem: Problem, hw: HardwareProfile, plan: Plan) -> Plan:
    """``plan`` with every update begun by ``step()``. Gradients wait in the host memory that it leaves, those at the ends
    of a step and small ones first, the others on NVMe; what waits for a stage after the backward does so where it did.

    Raises ``InfeasiblePlan`` where they fit nowhere.
    """
    away = _away(plan, hw)
    peak, budgets = problem.device_peak(away), problem.budgets
    device = peak + resident_bytes(away)[0] if budgets.shared else 0
    room = budgets.host_memory_bytes - host_bytes(budgets.fixed_bytes, away) - device
    homes: dict[str, Tier] = {}
    ends = problem.ends.first_fetches | problem.ends.last_gradients
    free = {p.name for p in plan.parameters if p.trainable and not _has_home(p)}
    for p in sorted(away.parameters, key=lambda p: (p.name not in ends, p.numel)):
        homes[p.name] = _otherwise(hw)
        if homes[p.name] is Tier.NVME and p.name in free and p.held_bytes <= room:
            homes[p.name] = Tier.HOST
            room -= p.held_bytes
    found = _waiting(plan, homes)
    check(problem, found, peak)
    return divided(_some_updated_twice(problem, hw, found), problem, hw, peak)


def _some_updated_twice(problem: Problem, hw: HardwareProfile, plan: Plan) -> Plan:
    """``plan`` with that share of the updates made twice (docs/0036) that makes its step shortest: the forward is spared the
    writing of their states, and the backward has that and reads states and gradients once more."""
    waited_for = problem.ends.blocking
    shares = [plan, *(updated_twice(plan, number / SHARES, waited_for) for number in range(1, SHARES + 1))]
    if shares[-1] == plan or plan.windows.serial_optimizer:
        return plan
    seconds = {id(p): step_seconds(problem, hw, p) for p in shares}
    best = min(shares, key=lambda p: seconds[id(p)])
    return best if seconds[id(best)] < (1 - WORTH_IT) * seconds[id(plan)] else plan


def updated_twice(plan: Plan, share: float, but: Container[str] = ()) -> Plan:
    """``plan`` with ``share`` of the elements of states on NVMe updated twice, spread evenly over the layers, ``but`` those:
    compute waits for such a gradient's update, and their next one comes before the drives had time for their states."""
    owed = 0.0
    twice: set[str] = set()
    for p in plan.parameters:
        if p.may_be_updated_twice and p.name not in but:
            owed += share * p.numel
            if owed >= p.numel / 2:
                owed -= p.numel
                twice.add(p.name)
    parameters = (dataclasses.replace(p, updated_twice=p.name in twice) for p in plan.parameters)
    return dataclasses.replace(plan, parameters=tuple(parameters))


def _away(plan: Plan, hw: HardwareProfile) -> Plan:
    """``plan`` with no gradient in memory, as far as there are drives."""
    return _waiting(plan, dict.fromkeys((p.name for p in plan.parameters), _otherwise(hw)))


def _otherwise(hw: HardwareProfile) -> Tier:
    """Where gradients wait for which there is no memory."""
    return Tier.NVME if hw.nvme else Tier.HOST


def _with_less(budgets: Budgets, less: Mapping[str, int]) -> Budgets:
    return dataclasses.replace(
        budgets,
        host_memory_bytes=budgets.host_memory_bytes - less["host"],
        device_memory_bytes=budgets.device_memory_bytes - less["device"],
    )


def divided(plan: Plan, problem: Problem, hw: HardwareProfile, peak: int) -> Plan:
    """``plan`` with its division as it is now, if it had one; what the search said of it stays."""
    if (before := plan.division) is None:
        return plan
    now = division_of(problem, hw, plan, peak)
    # That of the search is no bound on updates made twice, which it did not know.
    bound_s = min(before.bound_s, now.step_s)
    division = dataclasses.replace(now, per_byte_s=before.per_byte_s, walk_s=before.walk_s, bound_s=bound_s)
    return dataclasses.replace(plan, division=division)


def _has_home(p: ParameterPlan) -> bool:
    """Whether its policy says where its gradient waits."""
    return p.optimizer_runs is OptimizerTiming.AFTER_BACKWARD


def _waiting(plan: Plan, homes: dict[str, Tier]) -> Plan:
    later = OptimizerTiming.NEXT_FORWARD
    parameters = tuple(
        dataclasses.replace(p, optimizer_runs=later, gradient_home=p.gradient_home if _has_home(p) else homes[p.name])
        if p.trainable
        else p
        for p in plan.parameters
    )
    return dataclasses.replace(plan, parameters=parameters)
