"""search: which activations to save, by LoHan's Algorithm 1 (corrected) over exact recompute closures.

Numbers in, names out: nothing here knows torch.fx.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lohan_fx.passes.activation_graph import ActivationGraph, closure

PRECISION = 1e-9


class RecomputeClosure:
    """``closure`` kept up to date while values are saved one after the other, at the cost of what changes.

    A value is recomputed iff it is not saved and the backward or a recomputed value reads it, so a count of those
    readers per value is enough.
    """

    def __init__(self, found: ActivationGraph, saved: Iterable[str]) -> None:
        self._found = found
        self.recomputed = closure(found, set(saved))
        self._readers = {
            name: (name in found.needed) + sum(user in self.recomputed for user in found.graph.successors(name))
            for name in self.recomputed
        }

    def freed_by(self, names: Collection[str]) -> set[str]:
        """What need no longer be recomputed once ``names`` are saved."""
        freed: set[str] = set()
        lost: dict[str, int] = {}
        stack = [name for name in names if name in self.recomputed]
        while stack:
            name = stack.pop()
            if name in freed:
                continue
            freed.add(name)
            for source in self._found.graph.predecessors(name):
                if source not in self.recomputed or source in freed:
                    continue
                lost[source] = lost.get(source, 0) + 1
                if lost[source] == self._readers[source]:
                    stack.append(source)
        return freed

    def save(self, names: Collection[str]) -> None:
        """Save ``names`` for good."""
        freed = self.freed_by(names)
        self.recomputed -= freed
        for name in freed:
            for source in self._found.graph.predecessors(name):
                if source in self.recomputed:
                    self._readers[source] -= 1


@dataclass(frozen=True)
class Choice:
    """What the search found: names to save (mandatory ones included), what the rest costs, the time predicted.

    ``bend``: by what share of the time T_iter(A) along the walk lies above its convex hull at worst; 0 where it is
    convex. ``went_on``: whether the best point lies behind a rise, where Algorithm 1 would have stopped.
    """

    saved: frozenset[str]
    saved_bytes: int
    recomputed: frozenset[str]
    recompute_s: float
    recompute_flops: int
    step_s: float
    bend: float = 0.0
    went_on: bool = False


@dataclass(frozen=True)
class Unit:
    """The outputs of one op: saving some of them alone would not spare the op."""

    names: tuple[str, ...]
    bytes: int
    seconds: float
    flops: int


Benefit = Callable[[Unit], float]
"""By what the units are ordered, the largest first."""


def seconds_per_byte(unit: Unit) -> float:
    """What recomputing costs, per byte saved: what the joint search goes by, and ``lohan-cpuact``, which is to differ from it
    in where activations go and in nothing else. It is LoHan's order where all matmuls have one rate. On a machine each
    has its own, and pointwise ops, which LoHan counts as free, take their memory time: seconds are what saving spares."""
    return unit.seconds / max(unit.bytes, 1)


def flops_per_byte(unit: Unit) -> float:
    """LoHan's offloading benefit OB_i = FLOP_i / A_i (mechanisms B4), as printed. No policy goes by it, for the reason above:
    tests hold the other orders against it, and ``literal_search``, which is the algorithm as printed, has it built in."""
    return unit.flops / max(unit.bytes, 1)


def flops_per_swap_second(swap_s: Callable[[int], float]) -> Benefit:
    """Fuyou's SBF = FLOP / swap time (mechanisms B4), where ``swap_s(nbytes)`` is the time of one tensor's way out and
    back: the order of the policy ``fuyou``. It differs from LoHan's only where that time is not proportional to the bytes."""
    return lambda unit: unit.flops / max(swap_s(unit.bytes), PRECISION)


def search(
    found: ActivationGraph, step_s: Callable[[int, float], float], *, benefit: Benefit = seconds_per_byte
) -> Choice:
    """Algorithm 1, corrected (mechanisms B4): save units by benefit per byte, and take the fastest state on the way.

    ``step_s(saved_bytes, recompute_s)`` prices a state of the search. Starts from the mandatory values. LoHan stops at
    the first state that is no faster, which is right where T_iter(A) is convex; here the walk goes to the end, crosses
    plateaus and rises, and says how far from convex it was. Of equally fast states the one that saves least is taken:
    the time is a bound, and traffic that spares nothing can only hurt. A unit whose closure frees nothing yet is passed
    over and tried again once its neighbours are saved. What nothing reads any more, because values after it were saved
    too, is not saved in the end.
    """
    saved = set(found.mandatory)
    saved_bytes = sum(found.activations[name].bytes for name in saved)
    exact = RecomputeClosure(found, saved)
    recompute_s = sum(found.seconds[name] for name in exact.recomputed)
    walk = [(saved_bytes, step_s(saved_bytes, recompute_s))]
    order: list[str] = []
    taken = [0]
    waiting = sorted(units(found, exact.recomputed), key=benefit, reverse=True)
    moved = True
    while moved:
        moved, passed_over = False, []
        for unit in waiting:
            names = [name for name in unit.names if name in exact.recomputed]
            freed = exact.freed_by(names)
            gain = sum(found.seconds[name] for name in freed)
            if gain <= 0:
                passed_over.append(unit)
                continue
            exact.save(names)
            order.extend(names)
            taken.append(len(order))
            saved_bytes += sum(found.activations[name].bytes for name in names)
            recompute_s, moved = recompute_s - gain, True
            walk.append((saved_bytes, step_s(saved_bytes, recompute_s)))
        waiting = passed_over
    best = _fastest(walk)
    return _choice(
        found,
        saved | set(order[: taken[best]]),
        step_s,
        bend=bend(walk),
        went_on=any(later > earlier * (1 + PRECISION) for (_, earlier), (_, later) in pairwise(walk[: best + 1])),
    )


def _fastest(walk: Sequence[tuple[int, float]]) -> int:
    """The first place whose time no later one beats by more than rounding."""
    best = 0
    for place, (_, time) in enumerate(walk):
        if time < walk[best][1] * (1 - PRECISION):
            best = place
    return best


def bend(walk: Sequence[tuple[int, float]]) -> float:
    """How far the (bytes, seconds) of ``walk`` lie above their lower convex hull, at worst, as a share of the seconds."""
    hull: list[tuple[int, float]] = []
    points = [point for point in walk if point[1] < float("inf")]
    for x, y in points:
        while hull and x == hull[-1][0] and y <= hull[-1][1]:
            hull.pop()
        while len(hull) > 1 and _above(hull[-1], hull[-2], (x, y)) >= 0:
            hull.pop()
        if not hull or x > hull[-1][0]:
            hull.append((x, y))
    worst, place = 0.0, 0
    for x, y in points:
        while place + 1 < len(hull) - 1 and hull[place + 1][0] < x:
            place += 1
        if len(hull) > 1 and y > 0:
            worst = max(worst, _above((x, y), hull[place], hull[place + 1]) / y)
    return worst if worst > PRECISION else 0.0


def _above(point: tuple[int, float], left: tuple[int, float], right: tuple[int, float]) -> float:
    """By how much ``point`` lies above the line from ``left`` to ``right``."""
    slope = (right[1] - left[1]) / (right[0] - left[0])
    return point[1] - (left[1] + slope * (point[0] - left[0]))


def read(found: ActivationGraph, saved: Collection[str]) -> set[str]:
    """Those of ``saved`` that the backward or a recomputation reads."""
    reached: set[str] = set()
    closure(found, saved, reached=reached)
    return reached


def useful(found: ActivationGraph) -> list[str]:
    """Every activation that could be worth saving, in graph order: mandatory, or recomputed otherwise."""
    recomputed = closure(found, found.mandatory)
    return [name for name in found.activations if name in recomputed or name in found.mandatory]


def units(found: ActivationGraph, recomputed: Collection[str]) -> list[Unit]:
    """What can be saved of ``recomputed``, op by op, in graph order."""
    members: dict[str, list[str]] = {}
    for name, activation in found.activations.items():
        if name in recomputed:
            members.setdefault(activation.producer, []).append(name)
    return [
        Unit(
            tuple(names),
            sum(found.activations[n].bytes for n in names),
            found.seconds[producer],
            found.flops.get(producer, 0),
        )
        for producer, names in members.items()
    ]


def _choice(
    found: ActivationGraph, saved: set[str], step_s: Callable[[int, float], float], *, bend: float, went_on: bool
) -> Choice:
    kept = read(found, saved) | found.mandatory
    recomputed = closure(found, kept)
    saved_bytes = sum(found.activations[name].bytes for name in kept)
    recompute_s = sum(found.seconds[name] for name in recomputed)
    return Choice(
        saved=frozenset(kept),
        saved_bytes=saved_bytes,
        recomputed=frozenset(recomputed),
        recompute_s=recompute_s,
        recompute_flops=sum(found.flops[name] for name in recomputed),
        step_s=step_s(saved_bytes, recompute_s),
        bend=bend,
        went_on=went_on,
    )
