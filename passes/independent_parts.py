"""independent_parts: what of an activation graph can be decided part by part, with equal parts counted instead of repeated.

Once what must be saved is saved, recomputation in one block of a transformer no longer depends on what other blocks
save. Such parts are independent of each other, and most are copies of a few.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import networkx as nx

from lohan_fx.passes.activation_graph import ActivationGraph, closure


@dataclass(frozen=True)
class Parts:
    """Parts alike in all that a plan's time and memory depend on.

    ``copies``: per part the names of its values, in the same order. Per value, ``seconds`` to compute it, ``bytes`` to
    save it (None where it cannot be), whether the backward ``needed`` it, and which values of the part are its
    ``readers``.
    """

    copies: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]
    bytes: tuple[int | None, ...]
    needed: tuple[bool, ...]
    readers: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.copies)


def independent_parts(found: ActivationGraph) -> tuple[Parts, ...]:
    """The independent parts of what could be recomputed, equal ones together, in graph order."""
    recomputable = _worth_deciding(found)
    members: dict[str, list[str]] = {}
    roots = _roots(found, recomputable)
    for name in recomputable:
        members.setdefault(roots[name], []).append(name)
    alike: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
    for names in members.values():
        alike.setdefault(_signature(found, names), []).append(tuple(names))
    return tuple(_equal(found, copies) for copies in alike.values())


def saved_names(blocks: Parts, counts: Sequence[int]) -> set[str]:
    """What to save, where ``counts[i]`` copies of value ``i`` are to be: as few recomputations as counts allow.

    Counts say enough because the copies can be nested: of each value the first copies are recomputed and the last ones
    saved; then the copies in which some reader is recomputed are the first ones as well.
    """
    again = [0] * len(counts)
    chosen: set[str] = set()
    for place in reversed(range(len(counts))):
        wanted = blocks.count if blocks.needed[place] else max((again[r] for r in blocks.readers[place]), default=0)
        again[place] = max(wanted - counts[place], 0)
        chosen.update(blocks.copies[copy][place] for copy in range(again[place], wanted))
    return chosen


def _worth_deciding(found: ActivationGraph) -> list[str]:
    """What might be recomputed, in graph order, without views of what is there anyway: they would tie blocks together."""
    recomputed = closure(found, found.mandatory)
    free: set[str] = set()
    kept: list[str] = []
    for name in _sources_first(found):
        if name not in recomputed:
            continue
        sources = (source for source in found.graph.predecessors(name) if source in recomputed)
        if found.seconds[name] == 0 and name not in found.activations and all(source in free for source in sources):
            free.add(name)
        else:
            kept.append(name)
    return kept


def _sources_first(found: ActivationGraph) -> list[str]:
    """The names in graph order, which makes copies look alike, or in another order where that one is not topological."""
    places = {name: place for place, name in enumerate(found.graph.nodes)}
    if all(places[source] < places[reader] for source, reader in found.graph.edges):
        return list(places)
    return list(nx.topological_sort(found.graph))


def _roots(found: ActivationGraph, names: Collection[str]) -> dict[str, str]:
    """For each name one that stands for the part it belongs to."""
    above = {name: name for name in names}

    def root(name: str) -> str:
        while above[name] != name:
            above[name] = above[above[name]]
            name = above[name]
        return name

    for name in names:
        for reader in found.graph.successors(name):
            if reader in above:
                above[root(reader)] = root(name)
    return {name: root(name) for name in names}


def _signature(found: ActivationGraph, names: list[str]) -> tuple[object, ...]:
    places = {name: place for place, name in enumerate(names)}
    return tuple((_facts(found, name), _readers(found, name, places)) for name in names)


def _equal(found: ActivationGraph, copies: list[tuple[str, ...]]) -> Parts:
    first = copies[0]
    places = {name: place for place, name in enumerate(first)}
    facts = [_facts(found, name) for name in first]
    return Parts(
        copies=tuple(copies),
        seconds=tuple(seconds for seconds, _, _ in facts),
        bytes=tuple(nbytes for _, nbytes, _ in facts),
        needed=tuple(needed for _, _, needed in facts),
        readers=tuple(_readers(found, name, places) for name in first),
    )


def _facts(found: ActivationGraph, name: str) -> tuple[float, int | None, bool]:
    activation = found.activations.get(name)
    return found.seconds[name], activation.bytes if activation else None, name in found.needed


def _readers(found: ActivationGraph, name: str, places: dict[str, int]) -> tuple[int, ...]:
    return tuple(sorted(places[reader] for reader in found.graph.successors(name) if reader in places))
