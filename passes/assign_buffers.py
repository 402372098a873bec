"""assign_buffers: which values of graphs get places of their own, and where in one stretch those lie that die in the graph.

Requires: annotated graphs, rewritten and scheduled.
Ensures: ``halves.assigned``, the graphs unchanged (``assign_buffers``); or the graph with such an op in place of each
assigned one (``write_into``):

    mm = mm(a, b)
        becomes
    mm_out = self.mm_out;  mm = mm.out(a, b, out=mm_out)

The C library's heap would hold them as well, but what is freed among what stays are holes that count as resident, and
a block of more than 32 MiB is mapped and cleared anew by the kernel each time. Lifetimes are known here, so two values
share bytes where they never live at once (docs/0029).

What outlives the graph (what the backward needs, gradients, what is swapped: the runtime reads those when the graph has gone
on) is written so too, into a place that is looked for as the op runs (``Assignment.outliving``).

Left to the heap: what an op makes that has no kernel which writes into a given tensor. Nothing is assigned that is not in host
memory. Symbolic sizes have room for what they were when they were traced (``symbolic_sizes``).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from lohan_fx import meta
from lohan_fx.passes.halves import Assignment, Halves, outputs_of
from lohan_fx.passes.liveness import device_peaks, last_uses, storage_of
from lohan_fx.passes.symbolic_sizes import is_dense
from lohan_fx.plan import Plan

ALIGNMENT_BYTES = 64
"""Of what torch's allocator hands out for a processor."""
_MAPPED_BYTES = 32 << 20
"""Blocks of more than this the C library maps anew each time, and unmaps: they leave no holes."""
LEAST_BYTES = 64 << 10
SIZES = (range(LEAST_BYTES, sys.maxsize), range(LEAST_BYTES, _MAPPED_BYTES + 1), range(1 << 20, _MAPPED_BYTES + 1))
"""Which values are assigned, by their bytes: of these the first with which there is room for the stretch, which stays
whatever lives in it. Smaller values stay with the heap."""

_UNPLACED = Assignment({}, 0)
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.clone.default)
"""What ``copy_`` into the given tensor does, whose dtype and strides say all that their arguments do."""
_WITH_NUMBER = {_aten.mul.Scalar: _aten.mul.out, _aten.div.Scalar: _aten.div.out}
"""What torch itself makes of these: the number becomes a tensor."""
_OF_EMBEDDING = _aten.embedding_dense_backward.default
"""Its own ``out=`` would compute elsewhere and copy: ``add_rows`` does it in place."""


@dataclass(frozen=True)
class _Life:
    """A value, and the places in the graph of the node that makes it and of the last that reads it."""

    node: Node
    nbytes: int
    first: int
    last: int


def assign_buffers(halves: Halves, plan: Plan, *, room_bytes: int) -> int:
    """Note on ``halves`` where their values lie in the stretch that they share; the bytes by which that raises the peak.

    At most ``room_bytes``: else fewer values are assigned, and at the least those that outlive their graph, which take no
    more so. None where segments run compiled, which make their values themselves.
    """
    halves.assigned = {}
    if plan.device != "cpu" or any(halves.compiled.values()):
        return 0
    halves.assigned, more = assignments(halves, plan, room_bytes=room_bytes)
    return more


def assignments(halves: Halves, plan: Plan, *, room_bytes: int) -> tuple[dict[str, Assignment], int]:
    """What ``assign_buffers`` notes, and by how much it raises the peak: at most ``room_bytes``, if that is not below 0."""
    alone = _peak(halves, plan, {})
    for sizes in SIZES:
        found = {half: assign(gm, sizes, halves.returned(half)) for half, gm in halves.graphs()}
        more = _peak(halves, plan, found) - alone
        if more <= room_bytes:
            return found, more
    return {half: Assignment({}, 0, _outliving(gm, SIZES[0], halves.returned(half))) for half, gm in halves.graphs()}, 0


def _peak(halves: Halves, plan: Plan, found: Mapping[str, Assignment]) -> int:
    apart = {half: one.offsets.keys() for half, one in found.items()}
    live = max(peak.bytes for peak in device_peaks(halves, plan, elsewhere=apart).values())
    return live + shared_bytes(found)


def note_clearing(halves: Halves) -> bool:
    """Note on the nodes of ``halves`` which have their memory cleared by the kernel each time; whether any note is new."""
    changed = False
    cleared = set(_cleared(halves, halves.assigned))
    for node in (n for _, gm in halves.graphs() for n in gm.graph.nodes if n.op == "call_function"):
        found = meta.cost(node)
        nbytes = found.bytes if node in cleared else 0
        if nbytes != found.cleared_bytes:
            meta.set_cost(node, dataclasses.replace(found, cleared_bytes=nbytes))
            changed = True
    return changed


def cleared_bytes(halves: Halves, assigned: Mapping[str, Assignment]) -> int:
    """Bytes that the kernel clears anew in each step where values have the places of ``assigned``."""
    return sum(meta.cost(node).bytes for node in _cleared(halves, assigned))


def _cleared(halves: Halves, assigned: Mapping[str, Assignment]) -> Iterator[Node]:
    """Those without a place that are so large that the C library maps them anew. What no place can be given to has been timed
    so already."""
    for half, gm in halves.graphs():
        placed = assigned.get(half, _UNPLACED)
        for node in gm.graph.nodes:
            apart = node.name in placed.offsets or node.name in placed.outliving
            if is_assignable(node) and meta.cost(node).bytes > _MAPPED_BYTES and not apart:
                yield node


def shared_bytes(found: Mapping[str, Assignment]) -> int:
    """The stretch that holds any one of ``found``."""
    return max((one.nbytes for one in found.values()), default=0)


def assign(gm: GraphModule, sizes: range, returned: Sequence[Node] = ()) -> Assignment:
    """Places for the values of ``gm`` whose bytes are within ``sizes``, without those that are ``returned`` to the user.

    The largest first, each in the smallest gap between those that live when it does ("greedy by size": Pisarchyk and Lee,
    Efficient Memory Management for Deep Neural Net Inference, 2020).
    """
    alive: list[list[tuple[int, _Life]]] = [[] for _ in gm.graph.nodes]
    offsets: dict[str, int] = {}
    end = 0
    for life in sorted(_lives(gm, sizes), key=lambda one: (-one.nbytes, one.first)):
        span = range(life.first, life.last + 1)
        beside = {other.node: (offset, other.nbytes) for place in span for offset, other in alive[place]}
        offset = _gap(life.nbytes, sorted(beside.values()))
        for place in span:
            alive[place].append((offset, life))
        offsets[life.node.name] = offset
        end = max(end, offset + life.nbytes)
    return Assignment(offsets, end, _outliving(gm, sizes, returned))


def _gap(nbytes: int, beside: Sequence[tuple[int, int]]) -> int:
    """The offset of the smallest gap of ``nbytes`` between those of ``beside``, (offset, bytes) in order, or behind them."""
    best, best_bytes, end = -1, 0, 0
    for offset, taken in beside:
        gap = offset - end
        if gap >= nbytes and (best < 0 or gap < best_bytes):
            best, best_bytes = end, gap
        end = max(end, offset + taken)
    return best if best >= 0 else end


def _lives(gm: GraphModule, sizes: range) -> list[_Life]:
    nodes = list(gm.graph.nodes)
    place_of = {node: place for place, node in enumerate(nodes)}
    last = last_uses(nodes)
    staying = _returned(gm) | _handed(gm)
    return [
        _Life(node, _padded(meta.cost(node).bytes), place_of[node], last[node])
        for node in nodes
        if node not in staying and meta.cost(node).bytes in sizes and is_assignable(node)
    ]


def _outliving(gm: GraphModule, sizes: range, returned: Sequence[Node]) -> frozenset[str]:
    """The values of ``gm`` that it hands to the runtime or to the other half and that can be made in a place that is given."""
    found = (_returned(gm) | _handed(gm)) - {storage_of(n) for n in returned}
    return frozenset(
        n.name for n in found if n.op == "call_function" and meta.cost(n).bytes in sizes and is_assignable(n)
    )


def _returned(gm: GraphModule) -> set[Node]:
    return {storage_of(n) for n in outputs_of(gm) if isinstance(n, Node)}


def _handed(gm: GraphModule) -> set[Node]:
    return {storage_of(source) for n in gm.graph.nodes if _may_keep(n) for source in n.all_input_nodes}


def _may_keep(node: Node) -> bool:
    """Whether ``node`` may read what it is given after it has returned, or hands it on in a way that nothing tells."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    return node.target.namespace not in ("aten", "prims") or node.target._schema.is_mutable


def is_assignable(node: Node) -> bool:
    """Whether ``node`` makes one dense tensor in host memory and can do so in a place that it is given."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or meta.cost(node).is_view:
        return False
    value = meta.tensor(node)
    if value is None or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    if not is_dense(value):
        return False
    return node.target in _COPIES or _adds_rows(node.target, node.args) or writing(node.target) is not None


@functools.lru_cache(maxsize=1024)
def writing(op: torch._ops.OpOverload) -> tuple[torch._ops.OpOverload, str] | None:
    """The overload of ``op`` that computes the same into a given tensor, by a kernel of its own for processors, and the name
    of that argument; None where there is none, or only one that computes elsewhere and copies."""
    if op in _WITH_NUMBER:
        return _WITH_NUMBER[op], "out"
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    for name in op._overloadpacket.overloads():
        found = getattr(op._overloadpacket, name)
        *rest, out = found._schema.arguments
        if (
            out.kwarg_only
            and out.alias_info is not None
            and out.alias_info.is_write
            and [(a.name, str(a.type)) for a in rest] == wanted
            and torch._C._dispatch_has_kernel_for_dispatch_key(found.name(), "CPU")
        ):
            return found, out.name
    return None


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def into(op: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> tuple[Callable[..., Any], Any, Any]:
    """(op, args, kwargs) that compute what ``op`` of ``args`` and ``kwargs`` does, into ``out``."""
    if op in _COPIES:
        return _aten.copy_.default, (out, args[0]), {}
    if _adds_rows(op, args):
        return add_rows, (out, *args[:2], args[3]), {}
    found = writing(op)
    assert found is not None, f"{op} has no kernel that writes into a given tensor"
    return found[0], args, {**kwargs, found[1]: out}


def _adds_rows(op: torch._ops.OpOverload, args: Any) -> bool:
    """Whether ``op`` is the gradient of an embedding that is not scaled by how often a row was read."""
    return op is _OF_EMBEDDING and args[4] is False


def add_rows(out: torch.Tensor, gradient: torch.Tensor, rows: torch.Tensor, padding: int) -> torch.Tensor:
    """The gradient of an embedding's weight, ``out`` of (rows, width), from that of what it returned, (..., width), where it had
    read ``rows``, (...), with none for the row ``padding``: ``embedding_dense_backward``'s bits, in memory that is given.

    That op adds the rows one after the other, each sum rounded to the dtype. So does ``index_add_`` in float32; it sums
    narrower ones in float32. ``index_put_`` rounds each of those, and has threads race for sums of float32 only.
    """
    added = gradient.reshape(-1, out.shape[1])
    out.zero_()
    if out.dtype is torch.float32:
        out.index_add_(0, rows.reshape(-1), added)
    else:
        out.index_put_((rows.reshape(-1),), added, accumulate=True)
    if padding >= 0:
        out[padding].zero_()
    return out


def write_into(gm: GraphModule, assignment: Assignment, place: Callable[[Node], Callable[[], torch.Tensor]]) -> None:
    """Let each assigned op of ``gm`` write into the tensor that the module has for it under ``buffer_name``, or, where its value
    outlives the graph, into the one that ``place`` of its node makes each time."""
    for node in list(gm.graph.nodes):
        if node.name not in assignment.offsets and node.name not in assignment.outliving:
            continue
        with gm.graph.inserting_before(node):
            if node.name in assignment.offsets:
                out = gm.graph.create_node("get_attr", buffer_name(node.name))
            else:
                out = gm.graph.call_function(place(node), ())
        node.target, node.args, node.kwargs = into(node.target, node.args, node.kwargs, out)


def buffer_name(name: str) -> str:
    return f"{name}_out"
