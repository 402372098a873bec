"""buffered: a graph as a function whose ops write where ``assign_buffers`` has assigned them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.graph import _BoxedCodeGen

from lohan_fx import meta, ops
from lohan_fx.passes.assign_buffers import buffer_name, write_into
from lohan_fx.passes.halves import Assignment
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.workspace import Workspace


class Buffered:
    """``gm`` as a function of one list, which it empties (``boxed``).

    Its values lie in ``nbytes`` of ``workspace`` as ``assignment`` says, which does not allocate them; where another graph has
    the workspace, the heap holds them as ever. What outlives the graph lies in ``room``. The bits are the same.
    """

    def __init__(self, gm: GraphModule, assignment: Assignment, workspace: Workspace, nbytes: int, room: Room) -> None:
        self._graph, self._assignment, self._workspace, self._nbytes = gm, assignment, workspace, nbytes
        self._values = {n.name: meta.tensor(n) for n in gm.graph.nodes if n.name in assignment.offsets}
        self._module = _copy(gm)
        write_into(self._module, assignment, functools.partial(_maker, room))
        self._in_workspace = boxed(self._module)
        self._in_heap: Callable[[list[Any]], Any] | None = None
        self._bound: torch.Tensor | None = None

    def __call__(self, args: list[Any]) -> Any:
        with self._workspace.borrowed(self._nbytes) as memory:
            if memory is None:
                self._in_heap = self._in_heap or boxed(_copy(self._graph))
                return self._in_heap(args)
            if memory is not self._bound:
                self._bind(memory)
            return self._in_workspace(args)

    def _bind(self, memory: torch.Tensor) -> None:
        """Make the tensors that the ops write into. Once, not per call: some 2 microseconds each."""
        with torch.inference_mode(False):
            for name, offset in self._assignment.offsets.items():
                value = self._values[name]
                assert value is not None
                out = torch.empty(0, dtype=value.dtype)
                place = offset // value.element_size()
                setattr(
                    self._module,
                    buffer_name(name),
                    out.set_(memory.untyped_storage(), place, value.shape, value.stride()),
                )
        self._bound = memory


def _maker(room: Room, node: Node) -> Callable[[], torch.Tensor]:
    value = meta.tensor(node)
    assert value is not None

    def make() -> torch.Tensor:
        return room.like(value)

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
    """``gm``, which is changed, as a function of one list, which it empties: every value dies at its last use. Our ops are
    called without the dispatcher."""
    for op, function in ops.FUNCTIONS.items():
        for node in gm.graph.find_nodes(op="call_function", target=op):
            node.target = function
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def run(args: list[object]) -> object:
        return gm.forward(args)

    return run
