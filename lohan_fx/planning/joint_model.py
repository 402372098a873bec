"""joint_model: one decision about everything that shares memory, as numbers for ``passes.optimum`` and back as a plan.

What is decided: for each activation whether it is recomputed, kept, or swapped to host or NVMe; for each parameter
where its compute-dtype copy lives; for its optimizer states, host or NVMe; and whether it is updated when its gradient
arrives or beside the next forward, until when the gradient waits in host memory or on NVMe. Small parameters stay in
memory.

In a stage of their own after the backward, updates would take their turn behind what they now overlap with. Nothing
hides those whose gradients come last: their states are worth more memory than others'. Beside the next forward only what
has to move is worth updating: what a CPU has in memory it updates where it is, in the backward for the same seconds. And
what the forward fetches first is not: the forward would wait for it, as the end of the backward does.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.decision_model import Adds, Model, Quantity, Size, Solution, Thing, quantities_of
from lohan_fx.passes.independent_parts import independent_parts, saved_names
from lohan_fx.passes.search import read, useful
from lohan_fx.plan import Decision, Keep, OptimizerTiming, ParameterPlan, Plan, Recompute, Swap, Tier
from lohan_fx.planning import problem as problems
from lohan_fx.planning.memory_model import parameter_bytes
from lohan_fx.planning.placement import placed
from lohan_fx.planning.plan_builder import build_plan, layer_of_parameter
from lohan_fx.planning.problem import ParameterFacts, Problem
from lohan_fx.planning.step_time import (
    adds_of_a_read_one,
    device_of,
    fetches_of,
    is_read,
    parameter_adds,
    quantities_of_plan,
    stage_lanes,
    swap_adds,
)


class Homes(NamedTuple):
    """Where a parameter, its optimizer states and its waiting gradient live; None for the states of a frozen one, and for
    the gradient of one that is updated when it arrives. ``twice``: updated so (docs/0036)."""

    parameter: Tier
    states: Tier | None
    gradient: Tier | None = None
    twice: bool = False


_UNREAD = 1e-6
"""What a move of a parameter that this graph does not read counts, of one that it reads."""
ROUNDING = 1e-6
"""By how much HiGHS may miss a whole number."""


@dataclass(frozen=True)
class JointModel:
    """``model`` and what its options mean: ``decisions[size][option]``; ``names[thing]`` and ``homes[thing][option]``.

    The options of parameters stand in the order of the memory that they take, the least last.
    """

    problem: Problem
    model: Model
    decisions: tuple[tuple[Decision, ...], ...]
    names: tuple[tuple[str, ...], ...]
    homes: tuple[tuple[Homes, ...], ...]

    def traffic_s(self, plan: Plan) -> float:
        """Seconds that all lanes together work on a step of ``plan``."""
        return self.model.work_s(quantities_of_plan(self.problem, plan))


def joint_model(problem: Problem, hw: HardwareProfile, graph_bytes: int) -> JointModel:
    """The decisions of ``problem`` where the graphs need ``graph_bytes`` of device memory beside kept activations."""
    found, budgets = problem.activations, problem.budgets
    parts = independent_parts(found)
    mandatory = Counter(found.activations[name].bytes for name in found.mandatory)
    sizes = sorted({nbytes for part in parts for nbytes in part.bytes if nbytes is not None} | set(mandatory))
    decisions = tuple(_decisions(nbytes, problem, hw) for nbytes in sizes)
    waits_s = _waits_s(problem)
    alike: dict[tuple[object, ...], list[ParameterFacts]] = {}
    for p in problem.parameters:
        ends = (
            p.name in problem.ends.first_fetches,
            p.name in problem.ends.last_gradients,
            _blocking(problem, p),
            is_read(problem, p.name),
        )
        alike.setdefault((p.numel, p.bytes, p.trainable, fetches_of(problem, p.name), *ends), []).append(p)
    homes = tuple(_homes(members[0], problem, hw) for members in alike.values())
    host = budgets.host_memory_bytes - budgets.fixed_bytes - (graph_bytes if budgets.shared else 0)
    return JointModel(
        problem=problem,
        model=Model(
            blocks=parts,
            sizes=tuple(
                Size(nbytes, mandatory[nbytes], tuple(_moved(problem, waits_s, nbytes, d) for d in options))
                for nbytes, options in zip(sizes, decisions, strict=True)
            ),
            things=tuple(
                Thing(len(members), tuple(_used(problem, members[0], at) for at in options))
                for members, options in zip(alike.values(), homes, strict=True)
            ),
            stages=stage_lanes(problem, hw),
            limits={Quantity.DEVICE: budgets.device_memory_bytes - graph_bytes, Quantity.HOST: host},
        ),
        decisions=decisions,
        names=tuple(tuple(p.name for p in members) for members in alike.values()),
        homes=homes,
    )


def _blocking(problem: Problem, p: ParameterFacts) -> tuple[float, float] | None:
    """What decides how long compute waits for the update of ``p``: most of a long run differ only in what follows them."""
    found = problem.ends.blocking.get(p.name)
    return None if found is None else (found.hidden_s, found.written(p.numel, problem.windows))


# --- what there is to choose from -----------------------------------------------------------------------------


def _decisions(nbytes: int, problem: Problem, hw: HardwareProfile) -> tuple[Decision, ...]:
    """What may happen to a saved activation. On a CPU host memory is what it is in already."""
    if nbytes < problem.small_activation_bytes:
        return (Keep(),)
    host: tuple[Decision, ...] = () if problem.budgets.shared else (Swap(Tier.HOST),)
    return Keep(), *host, *((Swap(Tier.NVME),) if hw.nvme else ())


def _homes(p: ParameterFacts, problem: Problem, hw: HardwareProfile) -> tuple[Homes, ...]:
    """What there is to choose from; last what takes least memory. Where all gradients wait, none is updated on arrival."""
    held = problem.holds and p.trainable
    if p.numel <= problems.SMALL_PARAMETER_ELEMENTS:
        return (Homes(Tier.DEVICE, Tier.HOST if p.trainable else None, Tier.HOST if held else None),)
    nvme = (Tier.NVME,) if hw.nvme else ()
    homes = (Tier.DEVICE, *(() if problem.budgets.shared else (Tier.HOST,)), *nvme)
    states = (Tier.HOST, *nvme) if p.trainable else (None,)
    found: list[Homes] = []
    for home, states_home in itertools.product(homes, states):
        moves = not problem.budgets.shared or Tier.NVME in (home, states_home)
        if held or (p.trainable and moves and p.name not in problem.ends.first_fetches):
            for at in (Homes(home, states_home, waits) for waits in (Tier.HOST, *nvme)):
                found += [at._replace(twice=twice) for twice in _times(p, problem, at)]
        if not held:
            found.append(Homes(home, states_home))
    return tuple(found)


def _times(p: ParameterFacts, problem: Problem, at: Homes) -> tuple[bool, ...]:
    """Whether its update beside the next forward is made twice: of such as are all put off; not of those whose gradients come
    first in the backward (``holding.updated_twice``)."""
    may = problem.holds and not problem.windows.serial_optimizer and p.name not in problem.ends.blocking
    return (True, False) if may and _placed(p, at).may_be_updated_twice else (False,)


def _waits_s(problem: Problem) -> dict[tuple[int, Tier], float]:
    """What compute waits at least for an activation of a size that is swapped to a tier, and comes back."""
    found: dict[tuple[int, Tier], float] = {}
    for name, activation in problem.activations.activations.items():
        for tier in (Tier.HOST, Tier.NVME):
            wait_s = problem.coming_back_s.get((name, tier), 0.0)
            found[activation.bytes, tier] = min(wait_s, found.get((activation.bytes, tier), math.inf))
    return found


def _moved(problem: Problem, waits_s: Mapping[tuple[int, Tier], float], nbytes: int, decision: Decision) -> Adds:
    q = Quantity
    in_memory = problem.forwards * nbytes
    if isinstance(decision, Keep):
        return {q.DEVICE: in_memory, q.HOST: in_memory} if problem.budgets.shared else {q.DEVICE: in_memory}
    assert isinstance(decision, Swap)
    to = {q.HOST: in_memory} if decision.tier is Tier.HOST else {q.SWAPPED_NVME: nbytes}
    wait_s = waits_s[nbytes, decision.tier]
    return {q.SWAPPED: nbytes, **to, q.COMING_BACK_S: wait_s, **swap_adds(problem, nbytes, decision.tier)}


def _used(problem: Problem, p: ParameterFacts, at: Homes) -> Adds:
    placed = _placed(p, at)
    shared = problem.budgets.shared
    device, host = parameter_bytes(placed, device_of(problem))
    held = {Quantity.DEVICE: device, Quantity.HOST: host + (device if shared else 0)}
    if is_read(problem, p.name):
        moved = parameter_adds(problem, placed)
    else:  # it is, by another graph: it gets what memory the ones of this graph leave
        moved = {quantity: _UNREAD * added for quantity, added in adds_of_a_read_one(problem, placed).items()}
    return {quantity: added for quantity, added in {**moved, **held}.items() if added}


def _placed(p: ParameterFacts, at: Homes) -> ParameterPlan:
    runs = OptimizerTiming.IN_BACKWARD if at.gradient is None else OptimizerTiming.NEXT_FORWARD
    runs = runs if p.trainable else OptimizerTiming.NONE
    layer = layer_of_parameter(p.name)
    return ParameterPlan(
        p.name, layer, p.numel, p.bytes, p.trainable, at.parameter, at.states, runs, at.gradient, at.twice
    )


# --- back to a plan -------------------------------------------------------------------------------------------


def plans_of(joint: JointModel, solution: Solution) -> tuple[Plan, ...]:
    """Plans that decide as ``solution`` does, in whole numbers: with activations placed in the order in which they are
    needed back, if that fits as many, and size by size, unless they take turns: then all of one size might go, which is
    soon needed back, for the sake of less than anyone could measure."""
    saved = set(joint.problem.activations.mandatory)
    for block, counts in zip(joint.model.blocks, solution.saved, strict=True):
        saved |= saved_names(block, [round(count) for count in counts])
    saved = read(joint.problem.activations, saved) | joint.problem.activations.mandatory
    treated = [[round(count) for count in counts] for counts in solution.treated]
    decided = [placed(joint.problem, saved, *_activation_room(joint, solution))]
    if not joint.problem.in_turns:
        decided.append(_placed_by_size(joint, saved, solution))
    return tuple(plan_of(joint, decisions, treated) for decisions in decided)


def parameters_of(joint: JointModel, loose: Solution) -> tuple[list[list[int]], ...]:
    """Whole numbers of parameters at home in each way: as many as a relaxed solution gives memory to, or none that could
    be elsewhere, which leaves the memory to activations; and both with whatever else still fits."""
    divided = [[math.floor(count + ROUNDING) for count in counts] for counts in loose.treated]
    least = [[0] * len(counts) for counts in loose.treated]
    for names, *both in zip(joint.names, divided, least, strict=True):
        for of_thing in both:
            of_thing[-1] += len(names) - sum(of_thing)
    found: list[list[list[int]]] = []
    for counts in (divided, _filled(joint, divided), least, _filled(joint, least)):
        if counts not in found:
            found.append(counts)
    return tuple(found)


def _filled(joint: JointModel, treated: Sequence[Sequence[int]]) -> list[list[int]]:
    """``treated``, and into the memory left what saves most work per byte, one after the other."""
    counts = [list(of_thing) for of_thing in treated]
    nothing = [[0] * len(part.seconds) for part in joint.model.blocks], [[0] * len(d) for d in joint.decisions]
    used = quantities_of(joint.model, *nothing, counts)
    room = {quantity: limit - used[quantity] for quantity, limit in joint.model.limits.items()}
    work = joint.model.seconds_of_all
    moves = []
    for thing, group in enumerate(joint.model.things):
        last = group.options[-1]
        for place, option in enumerate(group.options[:-1]):
            takes = {quantity: option.get(quantity, 0.0) - last.get(quantity, 0.0) for quantity in room}
            saves_s = work.at(last) - work.at(option)
            if saves_s > 0 and sum(takes.values()) > 0:
                moves.append((saves_s / sum(takes.values()), thing, place, takes))
    for _, thing, place, takes in sorted(moves, key=lambda move: move[0], reverse=True):
        most = [int(room[quantity] // nbytes) for quantity, nbytes in takes.items() if nbytes > 0]
        moved = max(0, min(counts[thing][-1], *most))
        counts[thing][place] += moved
        counts[thing][-1] -= moved
        room = {quantity: left - moved * takes[quantity] for quantity, left in room.items()}
    return counts


def plan_of(joint: JointModel, decisions: dict[str, Decision], treated: Sequence[Sequence[int]]) -> Plan:
    """The plan of these decisions, with ``treated[thing][option]`` parameters at home in each way."""
    homes: dict[str, Tier] = {}
    resident: set[str] = set()
    waiting: dict[str, Tier] = {}
    repeated: set[str] = set()
    for names, options, counts in zip(joint.names, joint.homes, treated, strict=True):
        for name, (home, states_home, waits, twice) in zip(names, _spread(options, counts), strict=True):
            homes[name] = home
            if states_home is Tier.HOST:
                resident.add(name)
            if waits is not None:
                waiting[name] = waits
            if twice:
                repeated.add(name)
    return build_plan(joint.problem, decisions, homes, Tier.NVME, resident, waiting=waiting, twice=repeated)


def _spread(options: Sequence[Homes], counts: Sequence[int]) -> list[Homes]:
    """So many of each option, evenly over the layers: gradients whose states move in a row fill the window, and compute
    waits for the drives, which idle in the next row. The first layers get what takes most memory, because their gradients
    come late, and the last ones wait for the next forward, which comes to them late."""
    used = [(at, count) for at, count in zip(options, counts, strict=True) if count]
    used.sort(key=lambda option: option[0].gradient is not None)
    last = max(len(used) - 1, 1)
    placed = [
        ((number + rank / last) / count, rank, at) for rank, (at, count) in enumerate(used) for number in range(count)
    ]
    return [at for _, _, at in sorted(placed, key=lambda place: place[:2])]


def _activation_room(joint: JointModel, solution: Solution) -> tuple[int, int]:
    """Bytes that ``solution`` gives to activations that are kept, and to those swapped to host, which may also have what it
    leaves of a memory of their own."""
    room = {Keep(): 0.0, Swap(Tier.HOST): 0.0}
    for size, decisions, counts in zip(joint.model.sizes, joint.decisions, solution.placed, strict=True):
        for decision, count in zip(decisions, counts, strict=True):
            if decision in room:
                room[decision] += size.bytes * count
    left = 0.0
    if not joint.problem.budgets.shared:
        left = max(0.0, joint.model.limits[Quantity.HOST] - solution.quantities[Quantity.HOST])
        left /= joint.problem.forwards
    return int(room[Keep()]), int(room[Swap(Tier.HOST)] + left)


def _placed_by_size(joint: JointModel, saved: Collection[str], solution: Solution) -> dict[str, Decision]:
    """As ``placed`` in order, but of each size exactly as many to each place as ``solution`` says."""
    left: dict[int, Iterator[Decision]] = {}
    for size, decisions, counts in zip(joint.model.sizes, joint.decisions, solution.placed, strict=True):
        spread = (itertools.repeat(d, round(count)) for d, count in zip(decisions, counts, strict=True))
        left[size.bytes] = itertools.chain.from_iterable(spread)
    found = joint.problem.activations
    return {
        name: next(left[found.activations[name].bytes]) if name in saved else Recompute()
        for name in reversed(useful(found))
    }
