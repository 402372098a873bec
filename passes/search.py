"""search: which activations to save, by LoHan's Algorithm 1 (corrected) over exact recompute closures.

Numbers in, names out: nothing here knows torch.fx.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

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
    """What the search found: names to save (mandatory ones included), what the rest costs, the time predicted."""

    saved: frozenset[str]
    saved_bytes: int
    recomputed: frozenset[str]
    recompute_s: float
    recompute_flops: int
    step_s: float


@dataclass(frozen=True)
class _Unit:
    """The outputs of one op: saving some of them alone would not spare the op."""

    names: tuple[str, ...]
    bytes: int
    seconds: float


def search(found: ActivationGraph, step_s: Callable[[int, float], float]) -> Choice:
    """Algorithm 1, corrected (mechanisms B4): save units by benefit per byte while the step does not get slower.

    ``step_s(saved_bytes, recompute_s)`` prices a state of the search. Starts from the mandatory values. The walk
    crosses a plateau and stops where the time is strictly worse (LoHan's ``>=`` stops on plateaus). The benefit is
    seconds per byte, which for matmuls orders as LoHan's FLOP per byte does, and gives pointwise ops, which LoHan
    counts as free, their memory time. A unit whose closure frees nothing yet is passed over and tried again once its
    neighbours are saved. What nothing reads any more, because values after it were saved too, is not saved in the end.
    """
    saved = set(found.mandatory)
    saved_bytes = sum(found.activations[name].bytes for name in saved)
    exact = RecomputeClosure(found, saved)
    recompute_s = sum(found.seconds[name] for name in exact.recomputed)
    best = step_s(saved_bytes, recompute_s)
    waiting = sorted(_units(found, exact.recomputed), key=lambda unit: unit.seconds / max(unit.bytes, 1), reverse=True)
    moved = True
    while moved:
        moved, passed_over = False, []
        for unit in waiting:
            names = [name for name in unit.names if name in exact.recomputed]
            unit_bytes = sum(found.activations[name].bytes for name in names)
            gain = sum(found.seconds[name] for name in exact.freed_by(names))
            if gain <= 0:
                passed_over.append(unit)
                continue
            time = step_s(saved_bytes + unit_bytes, recompute_s - gain)
            if time > best * (1 + PRECISION):
                return _choice(found, saved, step_s)
            exact.save(names)
            saved.update(names)
            saved_bytes, recompute_s, best, moved = saved_bytes + unit_bytes, recompute_s - gain, time, True
        waiting = passed_over
    return _choice(found, saved, step_s)


def read(found: ActivationGraph, saved: Collection[str]) -> set[str]:
    """Those of ``saved`` that the backward or a recomputation reads."""
    reached: set[str] = set()
    closure(found, saved, reached=reached)
    return reached


def useful(found: ActivationGraph) -> list[str]:
    """Every activation that could be worth saving, in graph order: mandatory, or recomputed otherwise."""
    recomputed = closure(found, found.mandatory)
    return [name for name in found.activations if name in recomputed or name in found.mandatory]


def _units(found: ActivationGraph, recomputed: Collection[str]) -> list[_Unit]:
    members: dict[str, list[str]] = {}
    for name, activation in found.activations.items():
        if name in recomputed:
            members.setdefault(activation.producer, []).append(name)
    return [
        _Unit(tuple(names), sum(found.activations[n].bytes for n in names), found.seconds[producer])
        for producer, names in members.items()
    ]


def _choice(found: ActivationGraph, saved: set[str], step_s: Callable[[int, float], float]) -> Choice:
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
    )
