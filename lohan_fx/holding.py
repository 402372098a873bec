"""holding: plans whose gradients all wait for ``step()``: for clipping by the global norm and for loss scaling (docs/0014)."""

from __future__ import annotations

import dataclasses

from lohan_fx.hardware import HardwareProfile
from lohan_fx.memory_model import check, host_bytes, resident_bytes
from lohan_fx.plan import OptimizerTiming, ParameterPlan, Plan, Tier
from lohan_fx.problem import Problem


def holding(problem: Problem, hw: HardwareProfile, plan: Plan) -> Plan:
    """``plan`` with every update begun by ``step()``. Gradients wait in the host memory that it leaves, those at the ends
    of a step and small ones first, the others on NVMe; what waits for a stage after the backward does so where it did.

    Raises ``InfeasiblePlan`` where they fit nowhere.
    """
    otherwise = Tier.NVME if hw.nvme else Tier.HOST
    away = _waiting(plan, dict.fromkeys((p.name for p in plan.parameters), otherwise))
    peak, budgets = problem.device_peak(away), problem.budgets
    device = peak + resident_bytes(away)[0] if budgets.shared else 0
    room = budgets.host_memory_bytes - host_bytes(budgets.fixed_bytes, away) - device
    homes: dict[str, Tier] = {}
    ends = problem.ends.first_fetches | problem.ends.last_gradients
    free = {p.name for p in plan.parameters if p.trainable and not _has_home(p)}
    for p in sorted(away.parameters, key=lambda p: (p.name not in ends, p.numel)):
        homes[p.name] = otherwise
        if otherwise is Tier.NVME and p.name in free and p.held_bytes <= room:
            homes[p.name] = Tier.HOST
            room -= p.held_bytes
    found = _waiting(plan, homes)
    check(problem, found, peak)
    return found


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
