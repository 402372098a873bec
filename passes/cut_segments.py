"""cut_segments: which neighbouring ops of a rewritten graph can be compiled into one kernel, and their replacement.

Requires: an annotated graph.
Ensures: a value, or a new graph beside the given one, which is unchanged.

A segment lies between two of our nodes, and between two ops that a compiler would call as they are: matmuls, attention,
random ops. What is left are pointwise ops, and those that only move values. So a segment needs no more memory than its
inputs, its outputs and what is in between, none of it a parameter that the graph has let go; and the segments of equal
blocks are equal, as are many within a block.

    mul = mul(a, b);  wait_w = wait(..);  silu = silu(x);  up = mul(silu, y);  mm = mm(up, w)
        becomes
    mul = mul(a, b);  wait_w = wait(..);  box = box(x, y);  call = segment(box);  up = call[0];  mm = mm(up, w)

A view is not an output of a segment: what it views is, and the view is taken again, so that every storage dies when it
did before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from lohan_fx import meta, ops
from lohan_fx.meta import Lane

_aten = torch.ops.aten
_MOVES = frozenset(
    {
        _aten._to_copy.default,
        _aten.cat.default,
        _aten.clone.default,
        _aten.slice_backward.default,
        _aten.select_backward.default,
        _aten.native_dropout_backward.default,
    }
)
"""Ops that write the values that they read, beside those that are pointwise by their tag."""
_OTHER_FORMULA = frozenset({_aten.tanh.default})
"""Inductor's kernels for processors compute these by another formula than PyTorch's do, and other bits come out."""
FEWEST_OPS = 2
"""A single op is called as it is."""

Key = tuple[Any, ...]
Run = Callable[[list[Any]], Any]
"""A compiled segment: takes its inputs in a list, which it empties, and returns its outputs."""


@dataclass(frozen=True)
class Segment:
    """Ops that become one call.

    ``nodes``: the ops and the views between them, in order; ``inputs``, ``outputs``: values of the graph that it reads
    and that others read. ``key`` is equal for two segments that compute the same of tensors of the same kind.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    key: Key

    @property
    def name(self) -> str:
        """Of its first output, which no other segment of the graph has."""
        return self.outputs[0].name

    @property
    def computing(self) -> list[Node]:
        """The nodes without the views."""
        return [n for n in self.nodes if not meta.cost(n).is_view]

    @property
    def is_on_cpu(self) -> bool:
        return all(value is None or value.device.type == "cpu" for value in map(meta.tensor, self.nodes))


def segments_of(gm: GraphModule) -> list[Segment]:
    """The segments of ``gm``, in order."""
    found = []
    for run in _runs(gm):
        for part in _connected(run):
            if sum(not meta.cost(n).is_view for n in part) >= FEWEST_OPS:
                found.append(_segment(part))
    return [segment for segment in found if segment.outputs]


def extract(segment: Segment) -> GraphModule:
    """The ops of ``segment`` as a graph of their own: inputs in, a tuple of outputs out."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for source in segment.inputs:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta["val"] = meta.value(source)
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[n] for n in segment.outputs))
    return GraphModule(torch.nn.Module(), graph)


def replace_segments(gm: GraphModule, compiled: Mapping[str, Run]) -> GraphModule:
    """``gm`` with a call in place of each segment whose name ``compiled`` has."""
    found = [(s, compiled[s.name]) for s in segments_of(gm) if s.name in compiled] if compiled else []
    return _Replacing(gm, found).graph_module() if found else gm


# --- where to cut ---------------------------------------------------------------------------------------------


def _runs(gm: GraphModule) -> Iterator[list[Node]]:
    """Neighbouring ops that a segment may hold, and the views among them."""
    run: list[Node] = []
    for node in gm.graph.nodes:
        if _is_fusible(node) or _is_view(node):
            run.append(node)
        else:
            yield run
            run = []
    yield run


def _is_fusible(node: Node) -> bool:
    op = node.target
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
        return False
    found = meta.cost(node)
    if found.is_random or found.is_view or found.lane is not Lane.COMPUTE or op._schema.is_mutable:
        return False
    wanted = op in _MOVES or (torch.Tag.pointwise in op.tags and op not in _OTHER_FORMULA)
    return wanted and _is_static(node)


def _is_view(node: Node) -> bool:
    is_op = node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    return is_op and node.target not in ops.ALL and meta.cost(node).is_view and _is_static(node)


def _is_static(node: Node) -> bool:
    """Whether all that ``node`` reads and makes are dense tensors of known sizes."""
    return all(_is_plain(meta.value(n)) for n in (node, *node.all_input_nodes))


def _is_plain(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _connected(run: list[Node]) -> list[list[Node]]:
    """The parts of ``run`` whose ops share values; a part holds only those views that lie between its ops."""
    inside = {n for n in run if not meta.cost(n).is_view}
    for node in run:  # in order: what a view inside views comes before it
        if node not in inside and node.all_input_nodes[0] in inside:
            inside.add(node)
    group: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while group.setdefault(node, node) is not node:
            node = group[node]
        return node

    for node in run:
        if node in inside:
            for source in node.all_input_nodes:
                group[root(source)] = root(node)
    parts: dict[Node, list[Node]] = {}
    for node in run:
        if node in inside:
            parts.setdefault(root(node), []).append(node)
    return [_without_idle_views(part) for part in parts.values()]


def _without_idle_views(part: list[Node]) -> list[Node]:
    """``part`` without the views that no op of it reads."""
    needed: set[Node] = set()
    for node in reversed(part):
        if not meta.cost(node).is_view or node in needed:
            needed.add(node)
            needed.update(node.all_input_nodes)
    return [n for n in part if n in needed]


def _segment(nodes: list[Node]) -> Segment:
    inside = set(nodes)
    inputs = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    outputs = [n for n in nodes if not meta.cost(n).is_view and any(_leaves(user, inside) for user in n.users)]
    number: dict[Node, Any] = {n: _Number(i) for i, n in enumerate((*inputs, *nodes))}
    key = (
        tuple(_described(n) for n in inputs),
        tuple((str(n.target), repr(map_arg((n.args, n.kwargs), lambda a: number[a]))) for n in nodes),
        tuple(number[n].place for n in outputs),
    )
    return Segment(tuple(nodes), tuple(inputs), tuple(outputs), key)


def _leaves(user: Node, inside: set[Node]) -> bool:
    """Whether ``user`` needs from outside what a node inside makes: it is no node inside, or a view that leaves too."""
    if user not in inside:
        return True
    return meta.cost(user).is_view and any(_leaves(u, inside) for u in user.users)


@dataclass(frozen=True)
class _Number:
    """Stands in a key for the value of a node."""

    place: int


def _described(node: Node) -> tuple[Any, ...]:
    value = meta.tensor(node)
    assert value is not None
    return (str(value.device), str(value.dtype), tuple(value.shape), tuple(value.stride()))


# --- putting calls in their place -----------------------------------------------------------------------------


def box(*values: Any) -> list[Any]:
    """``values`` in a list that alone holds them: its reader lets each go when it likes."""
    return list(values)


class _Replacing:
    """Copies a graph node by node, and each segment as a call where it is first needed."""

    def __init__(self, gm: GraphModule, runs: list[tuple[Segment, Run]]) -> None:
        self._gm = gm
        segments = [segment for segment, _ in runs]
        self._graph = Graph()
        self._copies: dict[Node, Node] = {}
        self._segment = {n: found for found in runs for n in found[0].computing}
        self._views = {n for s in segments for n in s.nodes if meta.cost(n).is_view}

    def graph_module(self) -> GraphModule:
        for node in self._gm.graph.nodes:
            # A view between the ops of a segment is copied for whoever else reads it.
            if node not in self._views:
                self._copy(node)
        return GraphModule(self._gm, self._graph)

    def _copy(self, node: Node) -> Node:
        if node in self._copies:
            return self._copies[node]
        if node in self._segment:
            self._call(*self._segment[node])
            return self._copies.get(node, node)
        for source in node.all_input_nodes:
            self._copy(source)
        self._copies[node] = self._graph.node_copy(node, lambda n: self._copies[n])
        return self._copies[node]

    def _call(self, segment: Segment, run: Run) -> None:
        inputs = tuple(self._copy(source) for source in segment.inputs)
        if segment.outputs[0] in self._copies:
            return
        boxed = self._graph.call_function(box, inputs)
        call = self._graph.call_function(run, (boxed,))
        for place, node in enumerate(segment.outputs):
            self._copies[node] = self._graph.call_function(operator.getitem, (call, place))
            self._copies[node].name = node.name
            self._copies[node].meta = dict(node.meta)
