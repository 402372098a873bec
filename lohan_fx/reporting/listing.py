"""listing: a rewritten graph as lines, one per node, in a form that ``fold`` can compare.

    mm_4: bf16[64, 160] = aten.mm(view_9, t_4)
    fetch_model_layers_1_mlp_up_proj_weight: bf16[160, 64] = fetch(model.layers.1.mlp.up_proj.weight <- nvme)

What a line reads and the parameters it names are kept apart from its constant text, so that equal layers can be
recognised whatever their nodes are called. Slot numbers differ between runs and never appear.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.activation_graph import is_tangent
from lohan_fx.passes.halves import Halves, outputs_of
from lohan_fx.plan import Keep, Plan, Swap


@dataclass(frozen=True)
class Read:
    """A node that a line reads: its place in the same graph."""

    place: int


@dataclass(frozen=True)
class Name:
    """A parameter's name, whose layer number may count from the layer that is being listed."""

    name: str


Part = str | Read | Name


@dataclass(frozen=True)
class Block:
    """A numbered layer: ``model.layers.3`` is ``Block("model.layers.", 3)``."""

    prefix: str
    number: int

    def __str__(self) -> str:
        return f"{self.prefix}{self.number}"


def block_of(name: str) -> tuple[Block, str] | None:
    """The numbered layer that ``name`` lies in, and the rest of the name: the first component that is a number."""
    found = re.fullmatch(r"((?:.*?\.)??)(\d+)((?:\..*)?)", name)
    return (Block(found[1], int(found[2])), found[3]) if found else None


@dataclass(frozen=True)
class Line:
    """One node. ``block``: the layer it belongs to; ``is_start``: a transfer that was hoisted to where it stands."""

    name: str
    type: str
    parts: tuple[Part, ...]
    layer: str
    block: Block | None
    is_input: bool
    is_start: bool
    reads: tuple[str, ...]
    flops: int
    bytes: int
    lane: str


def listing(gm: GraphModule, halves: Halves, plan: Plan) -> list[Line]:
    """The lines of ``gm``, which is one of ``halves``."""
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    forward = {node.name: node for node in halves.forward.graph.nodes}
    return [_line(node, _parts(node, gm, halves, plan), places, halves, forward) for node in gm.graph.nodes]


def _line(
    node: Node, parts: Sequence[str | Node | Name], places: dict[Node, int], halves: Halves, forward: dict[str, Node]
) -> Line:
    cost = meta.cost(node)
    layer = cost.layer
    if node.op == "placeholder":
        # An input belongs where it is made or used: a parameter by its name, a saved value by the node that made it.
        parameter = halves.parameters.get(node.name)
        made = meta.cost(forward.get(node.name, node)).layer
        layer = made if parameter is None else parameter.name.rpartition(".")[0]
    block = block_of(layer)
    return Line(
        name=node.name,
        type="" if node.op == "output" else type_of(meta.value(node)),
        parts=tuple(Read(places[part]) if isinstance(part, Node) else part for part in parts),
        layer=layer if block is None else str(block[0]),
        block=None if block is None or node.op == "output" else block[0],
        is_input=node.op == "placeholder",
        is_start=node.target in ops.STARTS,
        reads=tuple(source.name for source in node.all_input_nodes),
        flops=cost.flops,
        bytes=cost.bytes,
        lane=cost.lane.value,
    )


# --- what is to the right of the equals sign ------------------------------------------------------------------


def _parts(node: Node, gm: GraphModule, halves: Halves, plan: Plan) -> list[str | Node | Name]:
    if node.op == "placeholder":
        return _input(node, halves, plan)
    if node.op == "output":
        return _output(gm, halves, plan)
    if node.op == "get_attr":
        return [f"get_attr({node.target})"]
    special = _LOHAN.get(node.target)
    return special(node, plan) if special is not None else _call(node)


def _input(node: Node, halves: Halves, plan: Plan) -> list[str | Node | Name]:
    if node.name in halves.parameters:
        return ["parameter(", Name(halves.parameters[node.name].name), ")"]
    if isinstance(meta.value(node), torch.SymInt | int):
        return ["size()"]
    if is_tangent(node):
        return ["tangent()"]
    if any(user.target is ops.SWAP_IN for user in node.users):
        return [f"swapped(<- {_tier(plan, node.name)})"]
    inputs = halves.forward.graph.find_nodes(op="placeholder")
    return ["input()" if any(node.name == found.name for found in inputs) else "saved()"]


def _output(gm: GraphModule, halves: Halves, plan: Plan) -> list[str | Node | Name]:
    """What is returned; of what crosses to the backward only how much there is, by kind."""
    outputs = outputs_of(gm)
    forward = gm is halves.forward
    returned = outputs[: halves.num_outputs] if forward else outputs
    nones = sum(value is None for value in returned)
    shown = [part for value in returned if value is not None for part in (", ", *_argument(value))][1:]
    parts: list[str | Node | Name] = ["return ", *shown]
    if nones:
        parts.append(f"{', ' if shown else ''}{nones} x None")
    crossing = _crossing(outputs[halves.num_outputs :], halves, plan) if forward else ""
    return [*parts, f" and save {crossing}"] if crossing else parts


def _crossing(saved: Sequence[object], halves: Halves, plan: Plan) -> str:
    counts: dict[str, int] = {}
    for value in saved:
        if isinstance(value, Node):
            kind = _crossing_kind(value, halves, plan)
            counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{counts[kind]} {kind}" for kind in sorted(counts))


def _crossing_kind(node: Node, halves: Halves, plan: Plan) -> str:
    if node.op == "placeholder":
        return "parameters" if node.name in halves.parameters else "inputs"
    if meta.tensor(node) is None:
        return "sizes"
    if node.target is ops.SWAP_OUT:
        return "swapped"
    return "kept" if isinstance(plan.decision(node.name), Keep) else "outputs"


def _call(node: Node) -> list[str | Node | Name]:
    parts: list[str | Node | Name] = []
    for value in node.args:
        parts += [", ", *_argument(value)]
    for key, value in node.kwargs.items():
        if value is not None and (key, value) not in (("pin_memory", False), ("layout", torch.strided)):
            parts += [f", {key}=", *_argument(value)]
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].removeprefix(", ")
    return [f"{op_name(node.target)}(", *parts, ")"]


def _fetch(node: Node, plan: Plan) -> list[str | Node | Name]:
    name = meta.origin(node) or "?"
    return ["fetch(", Name(name), f" <- {plan.parameter(name).home})"]


def _swap_out(node: Node, plan: Plan) -> list[str | Node | Name]:
    del plan
    return ["swap_out(", *_argument(node.args[0]), f" -> {node.args[2]})"]


def _swap_in(node: Node, plan: Plan) -> list[str | Node | Name]:
    return ["swap_in(", *_argument(node.args[0]), f" <- {_tier(plan, meta.origin(node) or '?')})"]


def _wait(node: Node, plan: Plan) -> list[str | Node | Name]:
    del plan
    return ["wait(", *_argument(node.args[0]), ")"]


def _offload_grad(node: Node, plan: Plan) -> list[str | Node | Name]:
    del plan
    return ["offload_grad(", *_argument(node.args[0]), " -> ", Name(meta.origin(node) or "?"), ")"]


_LOHAN: dict[object, Callable[[Node, Plan], list[str | Node | Name]]] = {
    ops.FETCH: _fetch,
    ops.SWAP_OUT: _swap_out,
    ops.SWAP_IN: _swap_in,
    ops.WAIT: _wait,
    ops.OFFLOAD_GRAD: _offload_grad,
}


def _tier(plan: Plan, activation: str) -> str:
    decision = plan.decision(activation)
    return decision.tier.value if isinstance(decision, Swap) else "?"


# --- words ----------------------------------------------------------------------------------------------------


def op_name(target: object) -> str:
    """``aten.mm`` for an overload, ``getitem`` for a function."""
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._opname}"
    if target is operator.getitem:
        return "getitem"
    return str(getattr(target, "__name__", type(target).__name__))


def _argument(value: object) -> Iterator[str | Node | Name]:
    """``value`` as it is written: nodes as they are, the rest as text."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        yield "["
        for place, item in enumerate(value):
            if place:
                yield ", "
            yield from _argument(item)
        yield "]"
    else:
        yield _constant(value)


def _constant(value: object) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, int) and value == sys.maxsize:
        return "end"
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, torch.device | torch.layout | torch.memory_format | slice):
        return str(value).removeprefix("torch.")
    # Its repr could hold an address.
    return f"<{type(value).__name__}>"


def dtype_name(dtype: torch.dtype) -> str:
    """``bf16``, ``f32``, ``i64``, ``u8``, ``bool``."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def type_of(value: object) -> str:
    """``bf16[2, 32, 64]`` of a tensor; the same of each in a tuple; ``none``, or ``size s0`` of a symbolic size."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(type_of(item) for item in value)})"
    if isinstance(value, torch.SymInt | int):
        return f"size {value}"
    return "none"
