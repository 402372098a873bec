"""lohan-zero: LoHan's plan with ZeRO's optimizer, in a stage after the backward (LoHan Fig. 7 "+ZeRO"; mechanisms a2).

Gradients go to NVMe and are read back, as in ZeRO-Infinity; where memory holds those of resident states, they wait there.
"""

from __future__ import annotations

import dataclasses

from lohan_fx import problem as problems
from lohan_fx.hardware import HardwareProfile
from lohan_fx.joint_search import joint_search
from lohan_fx.memory_model import check, missing
from lohan_fx.plan import SUM_BYTES, Plan, Tier
from lohan_fx.policies.layout import waiting
from lohan_fx.policies.lohan import LOHAN
from lohan_fx.problem import Problem


def _decide(problem: Problem, hw: HardwareProfile) -> Plan:
    plan = joint_search(_with_room_for_small_gradients(problem), hw)
    peak = problem.device_peak(plan)
    all_in_memory = all(p.states_home is not Tier.NVME for p in plan.parameters)
    if all_in_memory and not missing(problem, waiting(plan, Tier.HOST), peak):
        return waiting(plan, Tier.HOST)
    plan = waiting(plan, Tier.NVME)
    check(problem, plan, peak)
    return plan


def _with_room_for_small_gradients(problem: Problem) -> Problem:
    trained = (p.numel for p in problem.parameters if p.trainable)
    room = SUM_BYTES * sum(numel for numel in trained if numel <= problems.SMALL_PARAMETER_ELEMENTS)
    budgets = dataclasses.replace(problem.budgets, fixed_bytes=problem.budgets.fixed_bytes + room)
    return dataclasses.replace(problem, budgets=budgets)


LOHAN_ZERO = dataclasses.replace(
    LOHAN, name="lohan-zero", gradients="NVMe", optimizer="CPU, after the backward", decide=_decide, formulas=()
)
