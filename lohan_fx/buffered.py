"""buffered: a graph as a function whose ops write where ``assign_buffers`` has assigned them."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _BoxedCodeGen

from lohan_fx import meta, ops
from lohan_fx.passes.assign_buffers import buffer_name, write_into
from lohan_fx.passes.halves import Assignment
from lohan_fx.passes.symbolic_sizes import CallSizes, Sizes, has_numbers
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.workspace import Workspace


class Buffered:
    """``gm`` as a function of one list, which it empties (``boxed``).

    Its values lie in ``nbytes`` of ``workspace`` as ``assignment`` says, which does not allocate them; where another graph has
    the workspace, or a value is larger than planned, the heap holds them as ever. What outlives the graph lies in ``room``. The
    bits are the same.
    """

    def __init__(self, gm: GraphModule, assignment: Assignment, workspace: Workspace, nbytes: int, room: Room) -> None:
        self._graph, self._workspace, self._nbytes, self._room = gm, workspace, nbytes, room
        self._sizes = CallSizes(gm)
        values = {n.name: value for n in gm.graph.nodes if (value := meta.tensor(n)) is not None}
        known = {name for name, value in values.items() if self._sizes.know(value)}
        self._offsets = {name: offset for name, offset in assignment.offsets.items() if name in known}
        outliving = assignment.outliving & known
        self._values = {name: values[name] for name in (*self._offsets, *outliving)}
        self._changing = {name: value for name, value in self._values.items() if not has_numbers(value)}
        self._shaped = self._sizes.shaped(self._values, self._sizes.planned)
        self._planned_elements = {
            name: self._shaped[name][0].numel() for name in self._changing.keys() & self._offsets.keys()
        }
        self._shaped_for: Sizes | None = self._sizes.planned
        self._fits = True
        self._module = _copy(gm)
        write_into(
            self._module, dataclasses.replace(assignment, offsets=self._offsets, outliving=outliving), self._maker
        )
        self._in_workspace = boxed(self._module)
        self._in_heap: Callable[[list[Any]], Any] | None = None
        self._bound: torch.Tensor | None = None

    def __call__(self, args: list[Any]) -> Any:
        sizes = self._sizes.of(args) if self._changing else self._sizes.planned
        if all(map(operator.le, sizes, self._sizes.planned)):
            with self._workspace.borrowed(self._nbytes) as memory:
                if memory is not None and self._fit(sizes):
                    if memory is not self._bound:
                        self._bind(memory)
                    return self._in_workspace(args)
        self._in_heap = self._in_heap or boxed(_copy(self._graph))
        return self._in_heap(args)

    def _fit(self, sizes: Sizes) -> bool:
        """Whether the values of a call of ``sizes`` fit into their places, and are shaped as it needs them. Those of smaller
        inputs may be larger: what a decoder fills up to a given length."""
        if sizes != self._shaped_for:
            # Whatever interrupts this has all of it done again.
            self._bound = self._shaped_for = None
            self._shaped.update(self._sizes.shaped(self._changing, sizes))
            self._fits = all(self._shaped[name][0].numel() <= most for name, most in self._planned_elements.items())
            self._shaped_for = sizes
        return self._fits

    def _bind(self, memory: torch.Tensor) -> None:
        """Make the tensors that the ops write into. Not per call: some 2 microseconds each."""
        self._bound = None
        with torch.inference_mode(False):
            for name, offset in self._offsets.items():
                out = torch.empty(0, dtype=self._values[name].dtype)
                place = offset // out.element_size()
                setattr(self._module, buffer_name(name), out.set_(memory.untyped_storage(), place, *self._shaped[name]))
        self._bound = memory

    def _maker(self, node: Node) -> Callable[[], torch.Tensor]:
        name, dtype = node.name, self._values[node.name].dtype

        def make() -> torch.Tensor:
            return self._room.dense(*self._shaped[name], dtype)

        return make


def linked(
    gm: GraphModule, assignment: Assignment | None, workspace: Workspace, nbytes: int, room: Room
) -> Callable[[list[Any]], Any]:
    """``gm`` as a function of one list, with its values where ``assignment`` says, if there is one."""
    if assignment is None or not (assignment.offsets or assignment.outliving):
        return boxed(_copy(gm))
    return Buffered(gm, assignment, workspace, nbytes, room)


def _copy(gm: GraphModule) -> GraphModule:
    return GraphModule(gm, copy.deepcopy(gm.graph))


def boxed(gm: GraphModule) -> Callable[[list[object]], object]:
    """``gm``, whose code is made as its graph is changed (not at the first call), as a function of one list, which it empties:
    every value dies at its last use. Our ops are called without the dispatcher. ``gm`` keeps what its code reads, and no graph,
    which takes half a MB for each layer."""
    for op, function in ops.FUNCTIONS.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            node.target = function
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    forward = type(gm).forward
    gm.graph = Graph()

    def run(args: list[object]) -> object:
        return forward(gm, args)

    return run
