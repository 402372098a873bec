"""division: what the promised memory is used for, and the seconds that each use saves."""

from __future__ import annotations

import dataclasses

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import (
    ActivationPlan,
    Decision,
    Division,
    Keep,
    OptimizerTiming,
    ParameterPlan,
    Plan,
    Share,
    Swap,
    Tier,
    Use,
)
from lohan_fx.planning import problem as problems
from lohan_fx.planning.budgets import staging_bytes
from lohan_fx.planning.memory_model import resident_bytes
from lohan_fx.planning.problem import SMALL_ACTIVATION_BYTES, Problem
from lohan_fx.planning.step_time import step_seconds


def division_of(problem: Problem, hw: HardwareProfile, plan: Plan, device_peak: int) -> Division:
    """How ``plan`` divides memory, where its graphs need ``device_peak`` bytes with kept activations.

    ``saves_s`` is what the step would take longer with the tensors of that use on NVMe (small ones stay); what staging
    saves no formula tells (``staging``). On a CPU the device's uses stand under host memory. Walk and bound are left at
    the plan's own seconds.
    """
    seconds = step_seconds(problem, hw, plan)

    def share(tier: Tier, use: Use, nbytes: int, without: Plan | None = None) -> Share:
        saves_s = step_seconds(problem, hw, without) - seconds if without is not None and nbytes else 0.0
        return Share(Tier.HOST if problem.budgets.shared else tier, use, nbytes, max(saves_s, 0.0))

    # Not all that is kept need be there at the peak.
    kept = min(plan.forwards * plan.kept_bytes, device_peak)
    swapped = plan.forwards * plan.bytes_of(Swap(Tier.HOST))
    shares = [
        share(Tier.DEVICE, Use.GRAPHS, device_peak - kept),
        share(Tier.DEVICE, Use.ACTIVATIONS, kept, _elsewhere(plan, Keep())),
    ]
    for tier in (Tier.DEVICE, Tier.HOST):
        parameters, states, gradients = _resident(plan, tier)
        shares.append(share(tier, Use.PARAMETERS, parameters, _parameters_elsewhere(plan, tier)))
        shares.append(share(tier, Use.STATES, states, _states_elsewhere(plan, tier)))
        shares.append(share(tier, Use.GRADIENTS, gradients, _updated_on_arrival(plan, tier)))
    shares.append(share(Tier.HOST, Use.ACTIVATIONS, swapped, _elsewhere(plan, Swap(Tier.HOST))))
    asked, has = (staging_bytes(windows, shared=problem.budgets.shared) for windows in (problem.windows, plan.windows))
    shares.append(share(Tier.HOST, Use.STAGING, has))
    shares.append(share(Tier.HOST, Use.CAPTURE, problem.budgets.fixed_bytes - asked))
    budgets = {Tier.DEVICE: problem.budgets.device_memory_bytes, Tier.HOST: problem.budgets.host_memory_bytes}
    for tier, nbytes in budgets.items():
        if tier is Tier.HOST or not problem.budgets.shared:
            used = sum(found.bytes for found in shares if found.tier is tier)
            shares.append(Share(tier, Use.FREE, nbytes - used, 0.0))
    order = list(Use)
    shares.sort(key=lambda found: (found.tier is Tier.HOST, order.index(found.use)))
    taken = tuple(found for found in shares if found.bytes or found.use is Use.FREE)
    return Division(taken, {}, seconds, seconds, seconds)


def _resident(plan: Plan, tier: Tier) -> tuple[int, int, int]:
    """Bytes of (parameters, states, waiting gradients) that ``plan`` holds at ``tier``."""
    parameters = sum(p.bytes for p in plan.parameters if p.home is tier)
    gradients = sum(p.held_bytes for p in plan.parameters if p.gradient_home is tier)
    device, host = resident_bytes(plan)
    return parameters, (device if tier is Tier.DEVICE else host) - parameters - gradients, gradients


def _elsewhere(plan: Plan, decision: Decision) -> Plan:
    def moved(a: ActivationPlan) -> ActivationPlan:
        if a.decision != decision or a.bytes < SMALL_ACTIVATION_BYTES:
            return a
        return dataclasses.replace(a, decision=Swap(Tier.NVME))

    return dataclasses.replace(plan, activations=tuple(moved(a) for a in plan.activations))


def _parameters_elsewhere(plan: Plan, tier: Tier) -> Plan:
    def moved(p: ParameterPlan) -> ParameterPlan:
        return dataclasses.replace(p, home=Tier.NVME) if p.home is tier and _large(p) else p

    return dataclasses.replace(plan, parameters=tuple(moved(p) for p in plan.parameters))


def _states_elsewhere(plan: Plan, tier: Tier) -> Plan:
    def moved(p: ParameterPlan) -> ParameterPlan:
        return dataclasses.replace(p, states_home=Tier.NVME) if p.states_home is tier and _large(p) else p

    return dataclasses.replace(plan, parameters=tuple(moved(p) for p in plan.parameters))


def _updated_on_arrival(plan: Plan, tier: Tier) -> Plan:
    """``plan`` in which the gradients that wait at ``tier`` do not."""

    def moved(p: ParameterPlan) -> ParameterPlan:
        if p.gradient_home is not tier:
            return p
        return dataclasses.replace(
            p, optimizer_runs=OptimizerTiming.IN_BACKWARD, gradient_home=None, updated_twice=False
        )

    return dataclasses.replace(plan, parameters=tuple(moved(p) for p in plan.parameters))


def _large(p: ParameterPlan) -> bool:
    return p.numel > problems.SMALL_PARAMETER_ELEMENTS
