"""policy: what one policy is: a decision procedure, and how it differs from the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lohan_fx.cost_models.formula import CostModel
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan
from lohan_fx.planning.problem import Problem

Decide = Callable[[Problem, HardwareProfile], Plan]


@dataclass(frozen=True)
class Policy:
    """``decide(problem, hw)`` makes the plan. The texts say what goes where, for ``lohan_fx.policies()``.

    ``source``: the paper, or "ours". ``runs``: whether this runtime can execute its plans; the others are planned and
    simulated only, and ``why_not`` says why. ``formulas``: the seconds of a step as the papers have them for this
    system; empty where they give none.
    """

    name: str
    source: str
    parameters: str
    states: str
    activations: str
    optimizer: str
    decide: Decide
    runs: bool = True
    why_not: str = ""
    gradients: str = "consumed on arrival"
    formulas: tuple[CostModel, ...] = ()
