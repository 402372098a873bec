"""lohan-naive: LoHan's plan with the handler that it starts from: read, update and write strictly one after the other.

LoHan IV-C, mechanisms a2 and B3. One buffer for the optimizer makes the runtime do so: the read of a chunk starts when
its gradient has arrived and the write of the chunk before has ended. LoHan's unit is a tensor, ours a chunk of it.
"""

from __future__ import annotations

import dataclasses

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.planning.holding import divided
from lohan_fx.planning.joint_search import joint_search
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.lohan import LOHAN


def _decide(problem: Problem, hw: HardwareProfile) -> Plan:
    plan = joint_search(problem, hw)
    naive = dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, optimizer_buffers=1))
    return divided(naive, problem, hw, problem.device_peak(naive))


LOHAN_NAIVE = dataclasses.replace(
    LOHAN, name="lohan-naive", optimizer="CPU, in the backward, without overlap of its own", decide=_decide, formulas=()
)
