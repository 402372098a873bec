"""touched_values: the host memory that values of graphs will have touched, which is more than what lives at once.

Requires: annotated graphs, rewritten and scheduled, for a CPU; ``halves.assigned`` where values have places.
Ensures: a value; the graphs are unchanged.

What drives bring, what outlives a graph and what dies in it have a stretch each, and the rest has the heap, with what
exceeds the first of these stretches. All four stay in RAM as far as they were ever used, and they are not fullest at one
moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lohan_fx import ops
from lohan_fx.passes.assign_buffers import shared_bytes
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import alive
from lohan_fx.plan import Plan

_Names = Mapping[str, frozenset[str]]
"""By half, the names of nodes."""


def touched_bytes(halves: Halves, plan: Plan) -> int:
    """Bytes of all stretches, as far as they are used, and of the heap."""
    brought = {
        half: frozenset(n.name for n in gm.graph.nodes if n.target in ops.STARTS) for half, gm in halves.graphs()
    }
    outliving = _outliving(halves)
    placed = {
        half: brought[half]
        | outliving[half]
        | (halves.assigned[half].offsets.keys() if half in halves.assigned else set())
        for half in brought
    }
    heap = {half: names - placed[half] for half, names in _every(halves).items()}
    landing = plan.windows.fetch_bytes + plan.windows.swap_in_bytes
    most_brought = most_heap = 0
    for arrived, other in zip(_alive(halves, plan, brought), _alive(halves, plan, heap), strict=True):
        most_brought = max(most_brought, min(arrived, landing))
        most_heap = max(most_heap, other + max(0, arrived - landing))
    return shared_bytes(halves.assigned) + outliving_bytes(halves, plan) + most_brought + most_heap


def outliving_bytes(halves: Halves, plan: Plan) -> int:
    """The most that lives at once of the values that outlive their graph, which get places as they are made."""
    return max(_alive(halves, plan, _outliving(halves))) if halves.assigned else 0


def _outliving(halves: Halves) -> _Names:
    """With those of the forward among the inputs of the backward, which have its names."""
    found = {half: one.outliving for half, one in halves.assigned.items()}
    made = found.get("forward", frozenset())
    return {half: found.get(half, frozenset()) | made for half, _ in halves.graphs()}


def _every(halves: Halves) -> _Names:
    return {half: frozenset(n.name for n in gm.graph.nodes) for half, gm in halves.graphs()}


def _alive(halves: Halves, plan: Plan, names: _Names) -> Iterator[int]:
    """Bytes alive while each op runs, of the values of ``names``."""
    others = {half: every - names[half] for half, every in _every(halves).items()}
    return (nbytes for _, _, nbytes in alive(halves, plan, elsewhere=others))
