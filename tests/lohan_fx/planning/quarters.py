"""The division of memory by quarters, which the joint search replaced: what it must never be worse than."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from dataclasses import dataclass

from lohan_fx import cost
from lohan_fx.cost import STATE_BYTES
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import closure
from lohan_fx.passes.search import search, useful
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from lohan_fx.planning import problem as problems
from lohan_fx.planning.memory_model import check, host_bytes, missing, resident_bytes
from lohan_fx.planning.plan_builder import build_plan, default_homes, saving
from lohan_fx.planning.problem import SMALL_ACTIVATION_BYTES, Problem

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
ATTEMPTS = 8
"""How often a division that turns out not to fit is made again with less room."""


@dataclass(frozen=True)
class _Room:
    """Bytes that a division gives to each use: to kept activations in all, to the others above the minimum."""

    keep: int
    swap_host: int
    parameters: int
    states: int


def by_quarters(problem: Problem, hw: HardwareProfile) -> Plan:
    """The plan of the fastest division. Raises ``InfeasiblePlan`` where the budgets are too small for any."""
    decisions = saving(problem, useful(problem.activations), Keep())
    everything = build_plan(problem, decisions, default_homes(problem, Tier.DEVICE), Tier.HOST)
    if not missing(problem, everything, problem.device_peak(everything)):
        return everything
    least = _least(problem)
    rooms = [(_kept_bytes(plan), *_room(problem, plan, peak)) for plan, peak in least]
    device_slack = host_slack = 0
    for _ in range(ATTEMPTS):
        found = [
            _divide(problem, hw, division)
            for kept, device, host in rooms
            for division in _divisions(problem, kept, max(device - device_slack, 0), max(host - host_slack, 0))
        ]
        plan = min(found, key=lambda pair: pair[0])[1]
        excess = missing(problem, plan, problem.device_peak(plan))
        if not excess:
            return plan
        device_slack += max(excess.values()) if problem.budgets.shared else excess.get("device", 0)
        host_slack += excess.get("host", 0)
    return least[0][0]


def _least(problem: Problem) -> list[tuple[Plan, int]]:
    """The plans that need the least memory, and their peaks on the device: what must be saved is kept in one and swapped
    to NVMe in the other; without the one that does not fit."""
    found: list[tuple[Plan, int]] = []
    for decision in (Keep(), Swap(Tier.NVME)):
        decisions = saving(problem, problem.activations.mandatory, decision)
        plan = build_plan(problem, decisions, default_homes(problem, Tier.NVME), Tier.NVME)
        found.append((plan, problem.device_peak(plan)))
    check(problem, *min(found, key=lambda pair: pair[1]))
    return [(plan, peak) for plan, peak in found if not missing(problem, plan, peak)]


def _kept_bytes(plan: Plan) -> int:
    return sum(a.bytes for a in plan.activations if isinstance(a.decision, Keep))


def _room(problem: Problem, least: Plan, peak: int) -> tuple[int, int]:
    """(device, host) bytes that are left above a least plan; on a CPU all of it is counted as device."""
    budgets = problem.budgets
    device = budgets.device_memory_bytes - peak - resident_bytes(least)[0]
    host = budgets.host_memory_bytes - host_bytes(budgets.fixed_bytes, least)
    return (min(device, host - peak - resident_bytes(least)[0]), 0) if budgets.shared else (device, host)


def _divisions(problem: Problem, kept: int, device: int, host: int) -> list[_Room]:
    """The ways to divide ``device`` and ``host`` bytes, where ``kept`` bytes of activations stay anyway."""
    if problem.budgets.shared:
        shares = [(p, s) for p, s in itertools.product(QUARTERS, QUARTERS) if p + s <= 1]
        return [_Room(kept + int(device * (1 - p - s)), 0, int(device * p), int(device * s)) for p, s in shares]
    return [
        _Room(kept + int(device * (1 - p)), int(host * (1 - s)), int(device * p), int(host * s))
        for p, s in itertools.product(QUARTERS, QUARTERS)
    ]


def _divide(problem: Problem, hw: HardwareProfile, room: _Room) -> tuple[tuple[float, int], Plan]:
    """The best plan under one division, with (seconds, resident bytes) to compare it by."""
    homes = default_homes(problem, Tier.NVME)
    large = [p for p in problem.parameters if homes[p.name] is Tier.NVME]
    homes.update(dict.fromkeys(_fill(room.parameters, {p.name: p.bytes for p in large}), Tier.DEVICE))
    resident = {p.name for p in problem.parameters if p.numel <= problems.SMALL_PARAMETER_ELEMENTS}
    resident.update(_fill(room.states, {p.name: STATE_BYTES * p.numel for p in large if p.trainable}))

    fixed_work = _work(problem, homes, resident)

    def step_s(saved_bytes: int, recompute_s: float) -> float:
        swapped = max(0, saved_bytes - room.keep)
        work = dataclasses.replace(
            fixed_work,
            recompute_s=recompute_s,
            swapped_bytes=swapped,
            swapped_nvme_bytes=max(0, swapped - room.swap_host),
        )
        return cost.forward_stage(work, hw).seconds + cost.backward_stage(work, hw).seconds

    plans = [
        build_plan(problem, _place(problem, saved, room), homes, Tier.NVME, resident)
        for saved in (search(problem.activations, step_s).saved, problem.activations.mandatory)
    ]
    priced = [((_step_s(problem, hw, plan), room.parameters + room.states), plan) for plan in plans]
    return min(priced, key=lambda pair: pair[0])


def _step_s(problem: Problem, hw: HardwareProfile, plan: Plan) -> float:
    """Seconds of a step by ``plan``: the search divides bytes, but whole tensors were placed."""
    found, decisions = problem.activations, {a.node: a.decision for a in plan.activations}
    saved = [name for name, decision in decisions.items() if not isinstance(decision, Recompute)]
    sizes = {name: found.activations[name].bytes for name in saved}
    work = dataclasses.replace(
        _work(problem, {p.name: p.home for p in plan.parameters}, _states_in_memory(plan)),
        recompute_s=sum(found.seconds[name] for name in closure(found, set(saved))),
        swapped_bytes=sum(nbytes for name, nbytes in sizes.items() if isinstance(decisions[name], Swap)),
        swapped_nvme_bytes=sum(nbytes for name, nbytes in sizes.items() if decisions[name] == Swap(Tier.NVME)),
    )
    return cost.forward_stage(work, hw).seconds + cost.backward_stage(work, hw).seconds


def _states_in_memory(plan: Plan) -> set[str]:
    return {p.name for p in plan.parameters if p.states_home is Tier.HOST}


def _fill(room_bytes: int, sizes: dict[str, int]) -> list[str]:
    """Names that fit, in order. Of the states this keeps the first layers': their gradients come last, when no
    backward is left to hide their traffic."""
    chosen, used = [], 0
    for name, nbytes in sizes.items():
        if used + nbytes <= room_bytes:
            chosen.append(name)
            used += nbytes
    return chosen


def _place(problem: Problem, saved: Collection[str], room: _Room) -> dict[str, Decision]:
    """Where each saved activation goes: the last produced stay (they are needed back first), the first go to NVMe
    (they are away longest; mechanisms B4 leaves this open)."""
    decisions: dict[str, Decision] = {}
    kept = swapped = 0
    for name in reversed(useful(problem.activations)):
        nbytes = problem.activations.activations[name].bytes
        if name not in saved:
            decisions[name] = Recompute()
        elif kept + nbytes <= room.keep or nbytes < SMALL_ACTIVATION_BYTES:
            decisions[name] = Keep()
            kept += nbytes
        elif swapped + nbytes <= room.swap_host:
            decisions[name] = Swap(Tier.HOST)
            swapped += nbytes
        else:
            decisions[name] = Swap(Tier.NVME)
    return decisions


def _work(problem: Problem, homes: dict[str, Tier], resident: Collection[str]) -> cost.Work:
    """The step's work before there are rewritten graphs, activations aside: each parameter is fetched once per stage."""
    fetched = sum(p.bytes for p in problem.parameters if homes[p.name] is not Tier.DEVICE)
    trained = [p for p in problem.parameters if p.trainable]
    away = sum(p.numel for p in trained if p.name not in resident)
    own_copies = (p for p in trained if p.bytes != 4 * p.numel or p.name in resident)
    copied = sum(p.bytes for p in own_copies if homes[p.name] is Tier.NVME)
    return cost.Work(
        forward_s=problem.forward_s,
        backward_s=problem.backward_s,
        recompute_s=0.0,
        fetched_forward_bytes=fetched,
        fetched_forward_nvme_bytes=fetched,
        fetched_backward_bytes=fetched,
        fetched_backward_nvme_bytes=fetched,
        swapped_bytes=0,
        swapped_nvme_bytes=0,
        gradient_bytes=sum(p.bytes for p in trained),
        state_read_bytes=STATE_BYTES * away,
        state_write_bytes=STATE_BYTES * away + copied,
        adam_parameters=sum(p.numel for p in trained),
        fetches_read_bytes=fetched,
        updates_read_bytes=STATE_BYTES * away,
        updates_written_bytes=STATE_BYTES * away + copied,
        by_lane=sum(p.numel for p in trained),  # all are fetched from NVMe
    )
