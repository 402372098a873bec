"""joint_search: LoHan's search and the exact optimum, over everything that shares the promised memory.

What shares it: kept and swapped activations, parameters, optimizer states. A relaxed solution, with fractions allowed,
divides the memory so that the last byte of every use saves the same seconds; under that division LoHan's corrected
Algorithm 1 says which activations are saved. Integer programming then looks for something better, as long as the model
has few enough whole numbers, and says how far anything can still be from the best.

``problem.device_peak`` rewrites all graphs, so it is asked rarely: once for the plan that needs least, and once for
each plan that might be the answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lohan_fx.errors import NoDrive
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.decision_model import Adds, Quantity
from lohan_fx.passes.optimum import optimum, relaxed
from lohan_fx.passes.search import Choice, search, useful
from lohan_fx.plan import Keep, Plan, Recompute, Swap, Tier, Windows
from lohan_fx.planning.division import division_of
from lohan_fx.planning.joint_model import JointModel, joint_model, parameters_of, plan_of, plans_of
from lohan_fx.planning.memory_model import check, in_memory_bytes, missing, resident_bytes
from lohan_fx.planning.placement import placed
from lohan_fx.planning.plan_builder import build_plan, default_homes, saving
from lohan_fx.planning.prefetch import with_prefetch
from lohan_fx.planning.problem import Problem
from lohan_fx.planning.step_time import quantities_of_plan, step_seconds

ATTEMPTS = 5
"""How often decisions are made again because the graphs turned out to need more, or less, memory."""
WORTH_ASKING = 0.002
"""Share of a step that memory found free must promise to save before the graphs are rewritten once more."""
WINDOW_SHARES = (1.0, 0.25, 0.0)
"""Of the windows, tried in this order where not even the least plan fits the device."""
MOST_INTEGERS = 20_000
"""Most whole numbers for the exact optimum; with more the search's plan has to do."""
EQUAL = 1e-7
"""Share of a step that is no difference."""
VISIBLE = 0.001
"""Share of a step below which a difference between plans is not worth a note."""
LIMITED = {Tier.DEVICE.value: Quantity.DEVICE, Tier.HOST.value: Quantity.HOST}
NOT_CONVEX = 0.01
"""Share of the time by which T_iter(A) must leave its convex hull to be worth a note: less is the grain of tensors."""


@dataclass(frozen=True)
class Found:
    """A plan and what is known of it by formula. ``walk_s``: the best by Algorithm 1; ``per_byte_s``: by limit."""

    plan: Plan
    seconds: float
    walk_s: float
    bound_s: float
    per_byte_s: Adds


def joint_search(problem: Problem, hw: HardwareProfile) -> Plan:
    """The fastest plan found. Raises ``InfeasiblePlan`` where the budgets are too small for any."""
    decisions = saving(problem, useful(problem.activations), Keep())
    homes = default_homes(problem, Tier.DEVICE)
    everything = build_plan(problem, decisions, homes, Tier.HOST, waiting=_all_wait(problem, Tier.HOST))
    # A GPU's parameters that the CPU updates may be better off in host memory: they are fetched beside compute. What is kept
    # is there at once at the end of the forward: often enough to see that it does not fit.
    fastest = not any(p.returns_to(everything.device) for p in everything.parameters)
    if fastest and not missing(problem, everything, _kept_bytes(everything)):
        peak = problem.device_peak(everything)
        if not missing(problem, everything, peak):
            seconds = step_seconds(problem, hw, everything)
            return _finished(problem, hw, Found(everything, seconds, seconds, seconds, {}), peak)
    problem, least, least_peak = _least(problem)
    best = _best(problem, hw, least_peak - _kept_bytes(least), None)
    if best is not None and (unswapped := _unswapped(problem, best[0].plan)) is not None:
        graph_bytes = problem.device_peak(unswapped) - _kept_bytes(unswapped)
        best = _best(dataclasses.replace(problem, swaps=False), hw, graph_bytes, best)
    if best is None:
        _needs_drives(problem, hw, least)
        seconds = step_seconds(problem, hw, least)
        best = Found(least, seconds, seconds, 0.0, {}), least_peak
    return _finished(problem, hw, *best)


def _best(
    problem: Problem, hw: HardwareProfile, graph_bytes: int, best: tuple[Found, int] | None
) -> tuple[Found, int] | None:
    """What is faster than ``best`` and fits, with its peak on the device, where graphs are first taken to need ``graph_bytes``
    beside kept activations; ``best`` where nothing is."""
    failed = 0
    for _ in range(ATTEMPTS):
        found = decide(problem, hw, graph_bytes)
        if found is None or (best is not None and found.seconds >= best[0].seconds):
            break
        peak = problem.device_peak(found.plan)
        needed = peak - _kept_bytes(found.plan)
        if missing(problem, found.plan, peak):
            # What graphs need depends on what is decided: the second time with a margin, so that this ends.
            failed += 1
            graph_bytes = needed + (failed - 1) * (needed - graph_bytes)
            continue
        best = found, peak
        if _worth_s(problem, found) * (graph_bytes - needed) < WORTH_ASKING * found.seconds:
            break
        graph_bytes = needed
    return best


def _unswapped(problem: Problem, plan: Plan) -> Plan | None:
    """``plan`` with all kept that it swaps, where that is no more than the windows for what is on its way: graphs that swap
    nothing need none, which those that swap little do not show. None where it swaps more, or nothing."""
    away = plan.forwards * sum(a.bytes for a in plan.activations if isinstance(a.decision, Swap))
    if not 0 < away <= problem.windows.swap_in_bytes + problem.windows.swap_out_bytes:
        return None
    kept = (dataclasses.replace(a, decision=Keep()) if isinstance(a.decision, Swap) else a for a in plan.activations)
    return dataclasses.replace(plan, activations=tuple(kept))


def decide(problem: Problem, hw: HardwareProfile, graph_bytes: int) -> Found | None:
    """The fastest plan found where the graphs need ``graph_bytes`` beside kept activations; None where none fits."""
    joint = joint_model(problem, hw, graph_bytes)
    loose = relaxed(joint.model)
    if loose is None:
        return None
    walks = [_walk(joint, treated, hw) for treated in parameters_of(joint, loose)]
    integers = joint.model.integers
    exact = optimum(joint.model) if integers <= MOST_INTEGERS else None
    candidates = [plan for plan, _ in walks if _fits(joint, plan)]
    walk_s = min((step_seconds(problem, hw, plan) for plan in candidates), default=math.inf)
    if exact is not None:
        candidates += [plan for plan in plans_of(joint, exact) if _fits(joint, plan)]
    priced = [(step_seconds(problem, hw, plan), joint.traffic_s(plan), plan) for plan in candidates]
    priced = [found for found in priced if found[0] < math.inf]  # without a drive, what only fits there never arrives
    if not priced:
        return None
    fastest = min(time for time, _, _ in priced) * (1 + EQUAL)
    # Of equals the one that moves least; then the walk's before the optimum's, places in order before places by size.
    seconds, _, plan = min((found for found in priced if found[0] <= fastest), key=lambda found: found[1])
    bound_s = min(seconds, max(loose.bound_s, exact.bound_s if exact is not None else 0.0))
    plan = dataclasses.replace(plan, notes=_notes([choice for _, choice in walks], seconds, walk_s, bound_s))
    return Found(plan, seconds, walk_s, bound_s, loose.per_byte_s)


def _walk(joint: JointModel, treated: Sequence[Sequence[int]], hw: HardwareProfile) -> tuple[Plan, Choice]:
    """The plan of Algorithm 1 where ``treated`` says what parameters and states have, and activations get the rest."""
    problem = joint.problem
    bare = plan_of(joint, {}, treated)
    keep, host = _room(joint, bare)
    fixed = quantities_of_plan(problem, bare)

    def step_s(saved_bytes: int, recompute_s: float) -> float:
        swapped = max(0, saved_bytes - keep)
        to_nvme = max(0, swapped - host)
        if to_nvme and not hw.nvme:
            return math.inf
        total = {
            **fixed,
            Quantity.RECOMPUTE_S: recompute_s,
            Quantity.SWAPPED: swapped,
            Quantity.SWAPPED_NVME: to_nvme,
        }
        return joint.model.seconds(total)

    choice = search(problem.activations, step_s)
    return plan_of(joint, placed(problem, choice.saved, keep, host), treated), choice


def _worth_s(problem: Problem, found: Found) -> float:
    """Seconds that a byte saves which the graphs turn out not to need."""
    host = found.per_byte_s.get(Quantity.HOST, 0.0) if problem.budgets.shared else 0.0
    return found.per_byte_s.get(Quantity.DEVICE, 0.0) + host


def _room(joint: JointModel, bare: Plan) -> tuple[int, int]:
    """Bytes of the limits that ``bare`` leaves to the activations of one forward: to keep, and to swap to host."""
    device, host = resident_bytes(bare)
    limits = {quantity: int(limit) for quantity, limit in joint.model.limits.items()}
    keep, forwards = limits[Quantity.DEVICE] - device, bare.forwards
    if joint.problem.budgets.shared:
        return max(0, min(keep, limits[Quantity.HOST] - host - device)) // forwards, 0
    return max(0, keep) // forwards, max(0, limits[Quantity.HOST] - host) // forwards


def _fits(joint: JointModel, plan: Plan) -> bool:
    """Whether ``plan`` keeps the model's limits."""
    budgets = joint.problem.budgets
    graph_bytes = budgets.device_memory_bytes - int(joint.model.limits[Quantity.DEVICE])
    return not missing(joint.problem, plan, graph_bytes + _kept_bytes(plan))


def _notes(choices: Sequence[Choice], seconds: float, walk_s: float, bound_s: float) -> tuple[str, ...]:
    notes = []
    choice = max(choices, key=lambda found: found.bend)
    if choice.bend > NOT_CONVEX:
        notes.append(
            f"the step's time is not convex in the bytes saved (up to {choice.bend:.1%} above its hull): the search "
            + ("went on where Algorithm 1 would have stopped" if choice.went_on else "looked past the first rise")
        )
    if walk_s > seconds * (1 + VISIBLE):
        by = f"{walk_s / seconds - 1:.1%} slower" if walk_s < math.inf else "too large"
        notes.append(f"integer programming decided: the plan of Algorithm 1 would be {by}")
    if seconds > bound_s * (1 + VISIBLE):
        notes.append(f"a better plan could exist: at best {1 - bound_s / seconds:.1%} faster")
    return tuple(notes)


def _kept_bytes(plan: Plan) -> int:
    return plan.forwards * plan.kept_bytes


def _least(problem: Problem) -> tuple[Problem, Plan, int]:
    """A plan that needs little memory, and its peak on the device: what must be saved is swapped to NVMe or, where that
    does not fit, kept, if that can be less (what is in flight takes memory too); where neither fits, with smaller
    windows, which the problem that comes back then has."""
    found: list[tuple[Problem, Plan, int]] = []
    for share in WINDOW_SHARES:
        asked = dataclasses.replace(problem, windows=_narrowed(problem.windows, share))
        if found and asked.windows == found[-1][0].windows:
            continue
        for decision in (Swap(Tier.NVME), Keep()):
            decisions = saving(problem, problem.activations.mandatory, decision)
            homes = default_homes(problem, Tier.NVME)
            plan = build_plan(asked, decisions, homes, Tier.NVME, waiting=_all_wait(problem, Tier.NVME))
            if _kept_bytes(plan) > _in_flight_bytes(plan):
                continue
            found.append((asked, plan, problem.device_peak(plan)))
            if not missing(problem, *found[-1][1:]):
                return found[-1]
    # Of those that need the same, the one with the smallest windows, which a larger promise does not make larger.
    check(problem, *min(reversed(found), key=lambda tried: tried[2])[1:])
    raise AssertionError("check raises where nothing fits")


def _all_wait(problem: Problem, tier: Tier) -> dict[str, Tier]:
    """At ``tier``, where all gradients wait for the end of their step."""
    return {p.name: tier for p in problem.parameters if p.trainable and problem.holds}


def _in_flight_bytes(plan: Plan) -> int:
    """What swapping the saved activations of ``plan`` may have on the device at once beside what is in use."""
    saved = [a.bytes for a in plan.activations if not isinstance(a.decision, Recompute)]
    return plan.windows.swap_in_bytes + 2 * max(saved, default=0)


def _narrowed(windows: Windows, share: float) -> Windows:
    """``windows`` with room for less in flight; one transfer at a time always may be."""
    return dataclasses.replace(
        windows,
        fetch_bytes=int(windows.fetch_bytes * share),
        swap_in_bytes=int(windows.swap_in_bytes * share),
        gradient_bytes=int(windows.gradient_bytes * share),
        swap_out_bytes=int(windows.swap_out_bytes * share),
    )


def _needs_drives(problem: Problem, hw: HardwareProfile, least: Plan) -> None:
    if hw.nvme:
        return
    nbytes = in_memory_bytes(problem.parameters, shared=problem.budgets.shared)
    raise NoDrive(
        f"policy {problem.policy!r} needs a drive, and the hardware profile {hw.name!r} has none: parameters and states take "
        f"{nbytes:,} bytes, which {least.device} and host memory ({problem.budgets.host_memory_bytes:,} bytes) cannot hold "
        "beside the rest; promise more memory, or use a profile with a drive, or a smaller model"
    )


def _finished(problem: Problem, hw: HardwareProfile, found: Found, peak: int) -> Plan:
    division = division_of(problem, hw, found.plan, peak)
    division = dataclasses.replace(
        division,
        per_byte_s={tier: found.per_byte_s.get(quantity, 0.0) for tier, quantity in LIMITED.items()},
        walk_s=found.walk_s,
        bound_s=found.bound_s,
    )
    return with_prefetch(problem, dataclasses.replace(found.plan, division=division), peak)
