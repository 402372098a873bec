"""planner: from numbers to a Plan. Pure, and it never sees torch.fx.

The memory that the promise leaves is divided between activations, parameters and optimizer states by trying the
divisions and taking the one whose step is predicted fastest; for each, LoHan's corrected Algorithm 1 says which
activations are saved. Forced policies skip the search, for tests and comparisons.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

import networkx as nx

from lohan_fx import cost
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import ActivationGraph, closure
from lohan_fx.passes.annotate import block_of
from lohan_fx.passes.search import read, search, useful
from lohan_fx.plan import (
    ActivationPlan,
    Decision,
    Keep,
    OptimizerTiming,
    ParameterPlan,
    Plan,
    Recompute,
    Swap,
    Tier,
    Windows,
)

POLICIES = ("lohan", "in-memory", "keep", "swap-host", "swap-nvme", "recompute")
"""``lohan`` searches. The others are forced: activations as named, with parameters and states on NVMe; ``in-memory``
keeps everything."""

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
STATE_BYTES = 12
STAGING_GROWTH_BYTES = 128 << 20
"""A larger promise also gets larger staging, by at most this, and larger windows, by at most 5/16 of the difference
(``budgets.choose_windows``)."""
SMALL_PARAMETER_ELEMENTS = 1 << 15
"""Norm weights and biases: a few bytes that cost an I/O request each; they stay in memory where anything does."""
SMALL_ACTIVATION_BYTES = 4096
"""What is smaller is kept: moving it would cost an I/O request."""
ATTEMPTS = 8
"""How often a division that turns out not to fit is made again with less room."""


@dataclass(frozen=True)
class ParameterFacts:
    """What the planner knows of a parameter. ``bytes``: of its compute-dtype copy."""

    name: str
    numel: int
    bytes: int
    trainable: bool


@dataclass(frozen=True)
class Budgets:
    """What may be used. ``fixed_bytes``: host memory that is spent whatever the plan (staging, captured graphs).

    ``shared``: the device is the CPU, so that device memory is host memory and both count against one promise.
    """

    host_memory_bytes: int
    device_memory_bytes: int
    fixed_bytes: int
    shared: bool


@dataclass(frozen=True)
class Problem:
    """Everything the planner decides from.

    ``device_peak(plan)``: bytes of device memory that the graphs rewritten by ``plan`` need at once, parameters at
    home on the device aside.
    """

    policy: str
    compute_dtype: str
    parameters: tuple[ParameterFacts, ...]
    activations: ActivationGraph
    forward_s: float
    backward_s: float
    budgets: Budgets
    windows: Windows
    device_peak: Callable[[Plan], int]


@dataclass(frozen=True)
class _Room:
    """Bytes that a division gives to each use: to kept activations in all, to the others above the minimum."""

    keep: int
    swap_host: int
    parameters: int
    states: int


def make_plan(problem: Problem, hw: HardwareProfile) -> Plan:
    """The plan for ``problem`` on ``hw``. Raises ``InfeasiblePlan`` where the budgets are too small for any."""
    if problem.policy == "in-memory":
        return _forced(problem, Keep(), Tier.DEVICE, Tier.HOST)
    if problem.policy in ("keep", "recompute"):
        decision: Decision = Keep() if problem.policy == "keep" else Recompute()
        return _forced(problem, decision, Tier.NVME, Tier.NVME)
    if problem.policy in ("swap-host", "swap-nvme"):
        return _forced(problem, Swap(Tier(problem.policy.removeprefix("swap-"))), Tier.NVME, Tier.NVME)
    if problem.policy != "lohan":
        raise ValueError(f"unknown policy {problem.policy!r}: expected one of {', '.join(POLICIES)}")
    return _searched(problem, hw)


# --- forced ---------------------------------------------------------------------------------------------------


def _forced(problem: Problem, decision: Decision, home: Tier, states_home: Tier) -> Plan:
    """Everything by ``decision``; what must be saved is kept where that says recompute."""
    found = problem.activations
    recompute = isinstance(decision, Recompute)
    decisions = _saving(problem, found.mandatory, Keep()) if recompute else _saving(problem, useful(found), decision)
    plan = _plan(problem, decisions, {p.name: home for p in problem.parameters}, states_home)
    _check(problem, plan, problem.device_peak(plan))
    return plan


def _saving(problem: Problem, saved: Collection[str], decision: Decision) -> dict[str, Decision]:
    """``decision`` for those of ``saved`` that are read at all, if all of them are saved; the others are dropped."""
    kept = read(problem.activations, saved)
    return {name: decision if name in kept else Recompute() for name in useful(problem.activations)}


# --- searched -------------------------------------------------------------------------------------------------


def _searched(problem: Problem, hw: HardwareProfile) -> Plan:
    decisions = _saving(problem, useful(problem.activations), Keep())
    everything = _plan(problem, decisions, _homes(problem, Tier.DEVICE), Tier.HOST)
    if not _missing(problem, everything, problem.device_peak(everything)):
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
        excess = _missing(problem, plan, problem.device_peak(plan))
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
        decisions = _saving(problem, problem.activations.mandatory, decision)
        plan = _plan(problem, decisions, _homes(problem, Tier.NVME), Tier.NVME)
        found.append((plan, problem.device_peak(plan)))
    _check(problem, *min(found, key=lambda pair: pair[1]))
    return [(plan, peak) for plan, peak in found if not _missing(problem, plan, peak)]


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
    homes = _homes(problem, Tier.NVME)
    large = [p for p in problem.parameters if homes[p.name] is Tier.NVME]
    homes.update(dict.fromkeys(_fill(room.parameters, {p.name: p.bytes for p in large}), Tier.DEVICE))
    resident = {p.name for p in problem.parameters if p.numel <= SMALL_PARAMETER_ELEMENTS}
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
        _plan(problem, _place(problem, saved, room), homes, Tier.NVME, resident)
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
    )


# --- the plan and whether it fits -----------------------------------------------------------------------------


def _homes(problem: Problem, tier: Tier) -> dict[str, Tier]:
    small = {p.name for p in problem.parameters if p.numel <= SMALL_PARAMETER_ELEMENTS}
    return {p.name: Tier.DEVICE if p.name in small else tier for p in problem.parameters}


def _plan(
    problem: Problem,
    decisions: dict[str, Decision],
    homes: dict[str, Tier],
    states_home: Tier,
    resident: Collection[str] = (),
) -> Plan:
    found = problem.activations
    in_memory = set(resident)
    if states_home is Tier.NVME:
        here = (p for p in problem.parameters if homes[p.name] is Tier.DEVICE)
        in_memory.update(p.name for p in here if p.numel <= SMALL_PARAMETER_ELEMENTS)
    return Plan(
        policy=problem.policy,
        device="cpu" if problem.budgets.shared else "cuda",
        compute_dtype=problem.compute_dtype,
        host_memory_bytes=problem.budgets.host_memory_bytes,
        device_memory_bytes=problem.budgets.device_memory_bytes,
        activations=tuple(_activation_plan(found, name, decision) for name, decision in _in_order(found, decisions)),
        parameters=tuple(
            ParameterPlan(
                name=p.name,
                layer=layer_of_parameter(p.name),
                numel=p.numel,
                bytes=p.bytes,
                trainable=p.trainable,
                home=homes[p.name],
                states_home=(Tier.HOST if p.name in in_memory else states_home) if p.trainable else None,
                optimizer_runs=OptimizerTiming.IN_BACKWARD if p.trainable else OptimizerTiming.NONE,
            )
            for p in problem.parameters
        ),
        windows=problem.windows,
    )


def _in_order(found: ActivationGraph, decisions: dict[str, Decision]) -> list[tuple[str, Decision]]:
    return [(name, decisions[name]) for name in found.activations if name in decisions]


def _activation_plan(found: ActivationGraph, name: str, decision: Decision) -> ActivationPlan:
    activation = found.activations[name]
    return ActivationPlan(
        node=name,
        op=activation.op,
        layer=activation.layer,
        layer_kind=activation.layer_kind,
        bytes=activation.bytes,
        flops=found.flops[activation.producer],
        decision=decision,
        mandatory=name in found.mandatory,
    )


def layer_of_parameter(name: str) -> str:
    """``model.layers.3`` of ``model.layers.3.mlp.up_proj.weight``; the module's path where there is no block."""
    module = name.rpartition(".")[0]
    return block_of(module) or module


def resident_bytes(plan: Plan) -> tuple[int, int]:
    """(device, host) bytes of parameters and states that ``plan`` keeps in memory."""
    device = sum(p.bytes for p in plan.parameters if p.home is Tier.DEVICE)
    host = sum(p.bytes for p in plan.parameters if p.home is Tier.HOST)
    for p in plan.parameters:
        if p.states_home is Tier.HOST:
            # On a CPU an fp32 master that is also what the graph computes with exists once.
            shared = plan.device == "cpu" and p.home is Tier.DEVICE and p.bytes == 4 * p.numel
            host += STATE_BYTES * p.numel - (p.bytes if shared else 0)
    return device, host


def host_bytes(problem_fixed_bytes: int, plan: Plan) -> int:
    """Bytes of host memory that ``plan`` uses beside the device's: staging, host-resident states and swaps."""
    swapped = sum(a.bytes for a in plan.activations if a.decision == Swap(Tier.HOST))
    return problem_fixed_bytes + resident_bytes(plan)[1] + swapped


def _missing(problem: Problem, plan: Plan, device_peak: int) -> dict[str, int]:
    """Tier -> bytes by which ``plan`` exceeds its budget; empty where it fits."""
    budgets = problem.budgets
    device = device_peak + resident_bytes(plan)[0]
    host = host_bytes(budgets.fixed_bytes, plan) + (device if budgets.shared else 0)
    over = {"device": device - budgets.device_memory_bytes, "host": host - budgets.host_memory_bytes}
    return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}


def _check(problem: Problem, plan: Plan, device_peak: int) -> None:
    over = _missing(problem, plan, device_peak)
    if not over:
        return
    budgets = problem.budgets
    lines = []
    for tier, nbytes in over.items():
        budget = budgets.host_memory_bytes if tier == "host" else budgets.device_memory_bytes
        enough = budget + nbytes if tier == "device" else budget + nbytes * 16 // 11 + STAGING_GROWTH_BYTES
        lines.append(f"{tier}_memory={budget:,} bytes is {nbytes:,} short; {tier}_memory={enough:,} would fit")
    raise InfeasiblePlan(
        f"policy {problem.policy!r} does not fit: " + "; ".join(lines) + ". The graphs alone need "
        f"{device_peak:,} bytes at once and staging {budgets.fixed_bytes:,}: a smaller batch or sequence helps too"
    )


def homes_only(
    policy: str, compute_dtype: str, parameters: tuple[ParameterFacts, ...], budgets: Budgets, windows: Windows
) -> Plan:
    """A plan without activations, for inference: all in memory if half of the promise holds it, else on NVMe."""
    total = sum(p.bytes + (STATE_BYTES * p.numel if p.trainable else 0) for p in parameters)
    fits = policy in ("lohan", "in-memory") and 2 * total + budgets.fixed_bytes < min(
        budgets.host_memory_bytes, budgets.device_memory_bytes if budgets.shared else budgets.host_memory_bytes
    )
    home, states_home = (Tier.DEVICE, Tier.HOST) if fits else (Tier.NVME, Tier.NVME)
    nothing = ActivationGraph(nx.DiGraph(), {}, {}, {}, frozenset(), frozenset())
    problem = Problem(policy, compute_dtype, parameters, nothing, 0.0, 0.0, budgets, windows, lambda plan: 0)
    return _plan(problem, {}, _homes(problem, home), states_home)
