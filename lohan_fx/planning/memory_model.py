"""memory_model: the bytes that a plan needs per tier, and whether they fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from lohan_fx.cost import STATE_BYTES
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.plan import ParameterPlan, Plan, Swap, Tier
from lohan_fx.planning.budgets import MIB, least_promise, staging_bytes
from lohan_fx.planning.problem import ParameterFacts, Problem

_AHEAD = ("fetch_bytes", "swap_in_bytes", "gradient_bytes", "swap_out_bytes")
"""Windows in memory of the device."""


def resident_bytes(plan: Plan) -> tuple[int, int]:
    """(device, host) bytes of parameters, states and waiting gradients that ``plan`` keeps in memory."""
    found = [parameter_bytes(p, plan.device) for p in plan.parameters]
    return sum(device for device, _ in found), sum(host for _, host in found)


def parameter_bytes(p: ParameterPlan, device: str) -> tuple[int, int]:
    """(device, host) bytes that one parameter, its states and its waiting gradient take."""
    found = dict.fromkeys(Tier, 0)
    found[p.home] += p.bytes
    if p.states_home is not None:
        found[p.states_home] += states_bytes(p, device)
    if p.gradient_home is not None:
        found[p.gradient_home] += p.held_bytes
    return found[Tier.DEVICE], found[Tier.HOST]


def states_bytes(p: ParameterPlan, device: str) -> int:
    """Bytes that the states of one parameter take at their home, beside the parameter: an fp32 master that is also what the graph
    computes with exists once where both are in one memory, or both on the drives."""
    if p.states_home is None:
        return 0
    same = p.home is p.states_home or (device == "cpu" and Tier.NVME not in (p.home, p.states_home))
    return STATE_BYTES * p.numel - (p.bytes if same and p.bytes == 4 * p.numel else 0)


def in_memory_bytes(parameters: Iterable[ParameterFacts], *, shared: bool) -> int:
    """Bytes that parameters and their states take where none of them is on a drive; ``shared``: device and host are one
    memory, in which an fp32 master is also what the graph computes with."""
    return sum(
        (0 if shared and p.trainable and p.bytes == 4 * p.numel else p.bytes) + STATE_BYTES * p.numel * p.trainable
        for p in parameters
    )


def at_home_bytes(plan: Plan) -> tuple[int, ...]:
    """``resident_bytes`` in each memory, of which a CPU has one; the last is the host's."""
    device, host = resident_bytes(plan)
    return (device + host,) if plan.device == "cpu" else (device, host)


def with_less_at_home(plan: Plan, most_bytes: int) -> Plan:
    """``plan`` with as many states, and then parameters, on NVMe, the largest first, that it keeps no more than ``most_bytes`` of
    host memory for good; where parameters leave, with room for the largest of them, which graphs then fetch that counted on it.
    Raises ``InfeasiblePlan`` where what is not theirs takes more."""
    places = (Tier.HOST, Tier.DEVICE) if plan.device == "cpu" else (Tier.HOST,)
    parameters, over = list(plan.parameters), at_home_bytes(plan)[-1] - most_bytes
    for what in ("states_home", "home"):
        fetched = 0
        for index in sorted(range(len(parameters)), key=lambda index: -parameters[index].numel):
            if over + fetched <= 0:
                return dataclasses.replace(plan, parameters=tuple(parameters))
            p = moved = parameters[index]
            if what == "states_home" and p.states_home in places:
                moved = dataclasses.replace(p, states_home=Tier.NVME, updated_twice=False)
            elif what == "home" and p.home in places:
                moved = dataclasses.replace(p, home=Tier.NVME)
                fetched = max(fetched, p.bytes if plan.device == "cpu" else 0)
            over -= _in_host_memory(p, plan.device) - _in_host_memory(moved, plan.device)
            parameters[index] = moved
    if over + fetched > 0:
        raise InfeasiblePlan(
            f"host_memory={plan.host_memory_bytes:,} bytes is {over + fetched:,} short: the graphs of earlier shapes may run "
            "again, and there is one more capture beside them; pad batches to fewer sizes, or begin with the largest"
        )
    return dataclasses.replace(plan, parameters=tuple(parameters))


def _in_host_memory(p: ParameterPlan, device: str) -> int:
    in_device, in_host = parameter_bytes(p, device)
    return in_host + (in_device if device == "cpu" else 0)


def lowest_tier(plan: Plan) -> Tier:
    """The slowest tier that ``plan`` needs."""
    used = {home for p in plan.parameters for home in (p.home, p.states_home, p.gradient_home)}
    used |= {a.decision.tier for a in plan.activations if isinstance(a.decision, Swap)}
    return Tier.NVME if Tier.NVME in used else Tier.HOST if Tier.HOST in used else Tier.DEVICE


def host_bytes(problem_fixed_bytes: int, plan: Plan) -> int:
    """Bytes of host memory that ``plan`` uses beside the device's: staging, host-resident states and swaps."""
    return problem_fixed_bytes + resident_bytes(plan)[1] + plan.forwards * plan.bytes_of(Swap(Tier.HOST))


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
    """Raises ``InfeasiblePlan`` where ``plan`` needs more than its budgets; it names promises that hold such a plan."""
    over = missing(problem, plan, device_peak)
    if not over:
        return
    budgets = problem.budgets
    enough = _enough(problem, plan, over)
    lines = []
    for tier, nbytes in over.items():
        budget = budgets.host_memory_bytes if tier == "host" else budgets.device_memory_bytes
        lines.append(f"{tier}_memory={budget:,} bytes is {nbytes:,} short; {tier}_memory={enough[tier]:,} would fit")
    graphs = "The graphs alone need" if plan.forwards == 1 else f"The graphs of {plan.forwards} forwards alone need"
    raise InfeasiblePlan(
        f"policy {problem.policy!r} does not fit: "
        + "; ".join(lines)
        + f". {graphs} {device_peak:,} bytes at once{_for_outputs(plan)} and staging "
        f"{budgets.fixed_bytes:,}: a smaller batch or sequence helps too"
    )


def _for_outputs(plan: Plan) -> str:
    if plan.loss_only or plan.outputs_bytes < MIB:
        return ""
    return f" (with room for the {plan.outputs_bytes:,} that a call returns, if the loop holds them: not with loss_only=True)"


def _enough(problem: Problem, plan: Plan, over: Mapping[str, int]) -> dict[str, int]:
    """Tier -> the least promise that, with the other one, holds ``plan``, which exceeds its budgets by ``over``."""
    budgets = problem.budgets
    host, device = budgets.host_memory_bytes + over.get("host", 0), budgets.device_memory_bytes + over.get("device", 0)

    def needed_host(promise_bytes: int) -> int:
        ahead = _more_ahead(problem, plan, promise_bytes) if budgets.shared else 0
        return host + _more_staging(problem, promise_bytes) + ahead

    enough = least_promise(host, needed_host) if "host" in over else host
    return {"host": enough, "device": device + _more_ahead(problem, plan, enough)}


def _more_staging(problem: Problem, promise_bytes: int) -> int:
    """Host memory that staging takes more than now of a promise of so many bytes."""
    windows, shared = problem.windows_for(promise_bytes), problem.budgets.shared
    return staging_bytes(windows, shared=shared) - staging_bytes(problem.windows, shared=shared)


def _more_ahead(problem: Problem, plan: Plan, promise_bytes: int) -> int:
    """Device memory that larger windows of a larger promise may take, without those that ``plan`` does not have."""
    now, then = (problem.windows_for(nbytes) for nbytes in (problem.budgets.host_memory_bytes, promise_bytes))
    names = (name for name in _AHEAD if getattr(plan.windows, name))
    return sum(max(0, getattr(then, name) - getattr(now, name)) for name in names)
