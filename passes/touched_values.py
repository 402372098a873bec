"""touched_values: the host memory that values of graphs will have touched, which is more than what lives at once.

Requires: annotated graphs, rewritten and scheduled, for a CPU; ``halves.assigned`` where values have places.
Ensures: a value; the graphs are unchanged.

What drives bring, what outlives a graph and what dies in it have a stretch each, and the rest has the heap, what kernels take
while they run too. All four stay in RAM as far as they were ever used, and they are not fullest at one moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lohan_fx import ops
from lohan_fx.passes.assign_buffers import shared_bytes
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import Transit, alive, rises
from lohan_fx.plan import Plan

_Names = Mapping[str, frozenset[str]]
"""By half, the names of nodes."""


def touched_bytes(halves: Halves, plan: Plan, transit: Transit | None = None) -> int:
    """Bytes of all stretches, as far as they are used, and of the heap. With ``transit``, what is not there yet counts
    nowhere, although it has its place."""
    coming = {} if transit is None else dict(_coming(halves, transit))
    there = _at_each_op(halves, plan, _brought(halves), transit)
    arrived = max(0, *(nbytes - coming.get((half, op), 0) for half, op, nbytes in there))
    in_heap = _at_each_op(halves, plan, _in_heap(halves), transit, scratch=True)
    most_in_heap = max(nbytes for _, _, nbytes in in_heap)
    return shared_bytes(halves.assigned) + outliving_bytes(halves, plan, transit) + arrived + most_in_heap


def heap_rises(halves: Halves, plan: Plan) -> dict[str, dict[ops.Look, int]]:
    """``liveness.rises`` of what the heap has."""
    return rises(halves, plan, elsewhere=_others(halves, _in_heap(halves)))


def brought_rises(halves: Halves, plan: Plan) -> dict[str, dict[ops.Look, int]]:
    """``liveness.rises`` of what drives bring, and of what returns from memory."""
    return rises(halves, plan, elsewhere=_others(halves, _brought(halves)), scratch=False)


def outliving_rises(halves: Halves, plan: Plan) -> dict[str, dict[ops.Look, int]]:
    """``liveness.rises`` of what outlives a graph and has a place."""
    return rises(halves, plan, elsewhere=_others(halves, _outliving(halves)), scratch=False)


def _coming(halves: Halves, transit: Transit) -> Iterator[tuple[tuple[str, str], int]]:
    """By half and op: of what was started before, the bytes that are not there when the next thing is started."""
    for half, gm in halves.graphs():
        nbytes = transit.coming.get((half, ""), 0)
        for node in reversed(gm.graph.nodes):
            yield (half, node.name), nbytes
            nbytes = transit.coming.get((half, node.name), nbytes)
        yield (half, "inputs"), nbytes


def brought_bytes(halves: Halves, plan: Plan) -> int:
    """The most that lives at once of what drives bring, and of what returns from memory, from where that is asked for."""
    return max(_alive(halves, plan, _brought(halves)))


def outliving_bytes(halves: Halves, plan: Plan, transit: Transit | None = None) -> int:
    """The most that lives at once of the values that outlive their graph, which get places as they are made."""
    return max(_alive(halves, plan, _outliving(halves), transit)) if halves.assigned else 0


def _brought(halves: Halves) -> _Names:
    return {half: frozenset(n.name for n in gm.graph.nodes if n.target in ops.STARTS) for half, gm in halves.graphs()}


def _outliving(halves: Halves) -> _Names:
    """With those of the forward among the inputs of the backward, which have its names."""
    found = {half: one.outliving for half, one in halves.assigned.items()}
    made = found.get("forward", frozenset())
    return {half: found.get(half, frozenset()) | made for half, _ in halves.graphs()}


def _in_heap(halves: Halves) -> _Names:
    brought, outliving = _brought(halves), _outliving(halves)
    assigned = {half: one.offsets.keys() for half, one in halves.assigned.items()}
    placed = {half: brought[half] | outliving[half] | assigned.get(half, set()) for half in brought}
    return _others(halves, placed)


def _every(halves: Halves) -> _Names:
    return {half: frozenset(n.name for n in gm.graph.nodes) for half, gm in halves.graphs()}


def _others(halves: Halves, names: _Names) -> _Names:
    return {half: every - names[half] for half, every in _every(halves).items()}


def _alive(halves: Halves, plan: Plan, names: _Names, transit: Transit | None = None) -> Iterator[int]:
    """Bytes alive while each op runs, of the values of ``names``."""
    return (nbytes for _, _, nbytes in _at_each_op(halves, plan, names, transit))


def _at_each_op(
    halves: Halves, plan: Plan, names: _Names, transit: Transit | None, *, scratch: bool = False
) -> Iterator[tuple[str, str, int]]:
    return alive(halves, plan, elsewhere=_others(halves, names), transit=transit, scratch=scratch)
