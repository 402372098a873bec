"""forced: everything by one decision; the ends between which a search moves, for tests and comparisons."""

from __future__ import annotations

import dataclasses

from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.search import useful
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from lohan_fx.planning.memory_model import check
from lohan_fx.planning.plan_builder import build_plan, saving
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.layout import PLACES
from lohan_fx.policies.policy import Policy


def forced(problem: Problem, decision: Decision, home: Tier, states_home: Tier) -> Plan:
    """Everything by ``decision``; what must be saved is kept where that says recompute."""
    found = problem.activations
    recompute = isinstance(decision, Recompute)
    decisions = saving(problem, found.mandatory, Keep()) if recompute else saving(problem, useful(found), decision)
    plan = build_plan(problem, decisions, {p.name: home for p in problem.parameters}, states_home)
    # Activations leave one at a time where memory is short; what the plan leaves free is theirs (``pipeline``).
    plan = dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, swap_out_bytes=0))
    check(problem, plan, problem.device_peak(plan))
    return plan


def _policy(
    name: str, decision: Decision, activations: str, home: Tier = Tier.NVME, states: Tier = Tier.NVME
) -> Policy:
    def decide(problem: Problem, hw: HardwareProfile) -> Plan:
        del hw
        return forced(problem, decision, home, states)

    return Policy(name, "ours", PLACES[home], PLACES[states], activations, "CPU, in the backward", decide)


IN_MEMORY = _policy("in-memory", Keep(), "kept", Tier.DEVICE, Tier.HOST)
KEEP = _policy("keep", Keep(), "kept")
SWAP_HOST = _policy("swap-host", Swap(Tier.HOST), "all swapped to host RAM")
SWAP_NVME = _policy("swap-nvme", Swap(Tier.NVME), "all swapped to NVMe")
RECOMPUTE = _policy("recompute", Recompute(), "all recomputed but what must be saved")
