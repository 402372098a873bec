"""lohan-zero: LoHan's plan with ZeRO's optimizer, in a stage after the backward (LoHan Fig. 7 "+ZeRO"; mechanisms a2).

Gradients go to NVMe and are read back, as in ZeRO-Infinity; where memory holds those of resident states, they wait there.
"""

from __future__ import annotations

import dataclasses

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SUM_BYTES, Plan, Tier
from lohan_fx.planning import problem as problems
from lohan_fx.planning.holding import ATTEMPTS, divided
from lohan_fx.planning.joint_search import joint_search
from lohan_fx.planning.memory_model import check, missing, needed
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.layout import waiting
from lohan_fx.policies.lohan import LOHAN


def _decide(problem: Problem, hw: HardwareProfile) -> Plan:
    small = (p.numel for p in problem.parameters if p.trainable and p.numel <= problems.SMALL_PARAMETER_ELEMENTS)
    room = SUM_BYTES * sum(small)
    for _ in range(ATTEMPTS):
        at_once = joint_search(_leaving(problem, room), hw)
        plan = _waiting(problem, hw, at_once)
        if not _missing(problem, plan):
            break
        # A gradient that leaves is in memory for longer than one that is updated where it is.
        before, after = (needed(problem, found, problem.device_peak(found)) for found in (at_once, plan))
        room = max(room, *(after[tier] - before[tier] for tier in after))
    peak = problem.device_peak(plan)
    check(problem, plan, peak)
    return divided(plan, problem, hw, peak)


def _waiting(problem: Problem, hw: HardwareProfile, plan: Plan) -> Plan:
    in_memory = waiting(plan, Tier.HOST)
    all_in_memory = all(p.states_home is not Tier.NVME for p in plan.parameters)
    if not hw.nvme or (all_in_memory and not _missing(problem, in_memory)):
        return in_memory
    return waiting(plan, Tier.NVME)


def _missing(problem: Problem, plan: Plan) -> dict[str, int]:
    return missing(problem, plan, problem.device_peak(plan))


def _leaving(problem: Problem, room: int) -> Problem:
    """``problem`` without so many bytes."""
    budgets = dataclasses.replace(problem.budgets, fixed_bytes=problem.budgets.fixed_bytes + room)
    return dataclasses.replace(problem, budgets=budgets)


LOHAN_ZERO = dataclasses.replace(
    LOHAN, name="lohan-zero", gradients="NVMe", optimizer="CPU, after the backward", decide=_decide, formulas=()
)
