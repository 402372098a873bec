"""memory_model: the bytes that a plan needs per tier, and whether they fit."""

from __future__ import annotations

from lohan_fx.cost import STATE_BYTES
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.plan import ParameterPlan, Plan, Swap, Tier
from lohan_fx.problem import Problem

STAGING_GROWTH_BYTES = 128 << 20
"""A larger promise also gets larger staging, by at most this, and larger windows and more room for gradients, by at most
6/16 and 1/64 of the difference (``budgets.choose_windows``)."""
_NET_OF_GROWTH = 1 - 6 / 16 - 1 / 64
"""Of a byte more of promise so much is left."""


def resident_bytes(plan: Plan) -> tuple[int, int]:
    """(device, host) bytes of parameters, states and waiting gradients that ``plan`` keeps in memory."""
    found = [parameter_bytes(p, plan.device) for p in plan.parameters]
    return sum(device for device, _ in found), sum(host for _, host in found)


def parameter_bytes(p: ParameterPlan, device: str) -> tuple[int, int]:
    """(device, host) bytes that one parameter, its states and its waiting gradient take."""
    found = dict.fromkeys(Tier, 0)
    found[p.home] += p.bytes
    if p.states_home is not None:
        # An fp32 master that is also what the graph computes with exists once where both are in one memory.
        same = p.home is p.states_home or (device == "cpu" and Tier.NVME not in (p.home, p.states_home))
        found[p.states_home] += STATE_BYTES * p.numel - (p.bytes if same and p.bytes == 4 * p.numel else 0)
    if p.gradient_home is not None:
        found[p.gradient_home] += p.held_bytes
    return found[Tier.DEVICE], found[Tier.HOST]


def lowest_tier(plan: Plan) -> Tier:
    """The slowest tier that ``plan`` needs."""
    used = {home for p in plan.parameters for home in (p.home, p.states_home, p.gradient_home)}
    used |= {a.decision.tier for a in plan.activations if isinstance(a.decision, Swap)}
    return Tier.NVME if Tier.NVME in used else Tier.HOST if Tier.HOST in used else Tier.DEVICE


def host_bytes(problem_fixed_bytes: int, plan: Plan) -> int:
    """Bytes of host memory that ``plan`` uses beside the device's: staging, host-resident states and swaps."""
    swapped = sum(a.bytes for a in plan.activations if a.decision == Swap(Tier.HOST))
    return problem_fixed_bytes + resident_bytes(plan)[1] + swapped


def needed(problem: Problem, plan: Plan, device_peak: int) -> dict[str, int]:
    """Tier -> bytes that ``plan`` needs of its budget."""
    budgets = problem.budgets
    device = device_peak + resident_bytes(plan)[0]
    host = host_bytes(budgets.fixed_bytes, plan) + (device if budgets.shared else 0)
    return {"device": device, "host": host}


def missing(problem: Problem, plan: Plan, device_peak: int) -> dict[str, int]:
    """Tier -> bytes by which ``plan`` exceeds its budget; empty where it fits."""
    found = needed(problem, plan, device_peak)
    budgets = {"device": problem.budgets.device_memory_bytes, "host": problem.budgets.host_memory_bytes}
    return {tier: found[tier] - budget for tier, budget in budgets.items() if found[tier] > budget}


def check(problem: Problem, plan: Plan, device_peak: int) -> None:
    over = missing(problem, plan, device_peak)
    if not over:
        return
    budgets = problem.budgets
    lines = []
    for tier, nbytes in over.items():
        budget = budgets.host_memory_bytes if tier == "host" else budgets.device_memory_bytes
        enough = budget + nbytes if tier == "device" else budget + int(nbytes / _NET_OF_GROWTH) + STAGING_GROWTH_BYTES
        lines.append(f"{tier}_memory={budget:,} bytes is {nbytes:,} short; {tier}_memory={enough:,} would fit")
    raise InfeasiblePlan(
        f"policy {problem.policy!r} does not fit: " + "; ".join(lines) + ". The graphs alone need "
        f"{device_peak:,} bytes at once and staging {budgets.fixed_bytes:,}: a smaller batch or sequence helps too"
    )
