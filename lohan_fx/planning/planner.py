"""planner: from numbers to a Plan. Pure, and it never sees torch.fx: each policy decides in a file of its own."""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.planning.holding import plan_holding
from lohan_fx.planning.problem import Problem
from lohan_fx.policies import named


def make_plan(problem: Problem, hw: HardwareProfile) -> Plan:
    """The plan of ``problem.policy`` for ``problem`` on ``hw``; where gradients are held, with all updates put off.

    Raises ``InfeasiblePlan`` where the budgets are too small for it.
    """
    decide = named(problem.policy).decide
    return plan_holding(problem, hw, decide) if problem.holds else decide(problem, hw)
