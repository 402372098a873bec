"""liveness: the bytes alive on the device while a graph runs boxed, from the graph alone.

Requires: an annotated graph.
Ensures: a value; the graph is unchanged.

A storage lives from the node that makes it to the last node that reads it, through views too. The results of an op
with several live from the op on, and all of them until the last has been taken out of its tuple. Inputs that only
this graph holds (saved activations, tangents) die at their last use as well, because a boxed graph gives them up;
outputs, inputs that the caller holds and parameters at home on the device do not die.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.annotate import at_hint, storage_bytes
from lohan_fx.passes.halves import Halves, outputs_of
from lohan_fx.plan import Plan, Tier


@dataclass(frozen=True)
class Peak:
    """Most bytes alive at once, the node that reaches it, and the bytes alive after the last node."""

    bytes: int
    node: str
    end_bytes: int


def peaks(halves: Halves, plan: Plan) -> dict[str, Peak]:
    """The peak of each half by its name; parameters at home on the device are left out."""
    resident = {p.name for p in plan.parameters if p.home is Tier.DEVICE}
    held = {n.name for n in halves.forward.graph.find_nodes(op="placeholder")}
    return {
        name: peak_bytes(gm, resident=resident, shells=halves.parameters, held=held) for name, gm in halves.graphs()
    }


def peak_bytes(
    gm: GraphModule,
    *,
    resident: Collection[str] = (),
    shells: Collection[str] = (),
    held: Collection[str] = (),
) -> Peak:
    """The peak of ``gm``.

    ``resident``: parameters whose fetch allocates nothing; ``shells``: empty placeholders; ``held``: placeholders that
    the caller holds to the end.
    """
    peak, peak_node, end_bytes = -1, "inputs", 0
    for node, during, after in _walk(gm, resident, shells, held):
        if during > peak:
            peak, peak_node = during, node.name if node is not None else "inputs"
        end_bytes = after
    return Peak(peak, peak_node, end_bytes)


def bytes_at(halves: Halves, plan: Plan) -> dict[str, dict[str, int]]:
    """The bytes alive while each op runs, by half and by the op's name; counted as in ``peaks``."""
    resident = {p.name for p in plan.parameters if p.home is Tier.DEVICE}
    held = {n.name for n in halves.forward.graph.find_nodes(op="placeholder")}
    return {
        name: {
            node.name: during for node, during, _ in _walk(gm, resident, halves.parameters, held) if node is not None
        }
        for name, gm in halves.graphs()
    }


def _walk(
    gm: GraphModule, resident: Collection[str], shells: Collection[str], held: Collection[str]
) -> Iterator[tuple[Node | None, int, int]]:
    """Each op with the bytes alive while it runs and after it; first None, with those of the inputs."""
    nodes = list(gm.graph.nodes)
    dying = _dying(nodes)
    kept = {_storage(n) for n in outputs_of(gm) if isinstance(n, Node)} | {n for n in nodes if n.name in held}
    live = {n: meta.cost(n).bytes for n in nodes if n.op == "placeholder" and n.name not in shells}
    total = sum(live.values())
    yield None, total, total
    for place, node in enumerate(nodes):
        if node.op == "call_function":
            made = {} if node.target is ops.FETCH and meta.origin(node) in resident else _made(node)
            live.update(made)
            during = total = total + sum(made.values())
            total -= sum(live.pop(storage, 0) for storage in dying.get(place, ()) if storage not in kept)
            yield node, during, total


def _made(node: Node) -> dict[Node, int]:
    """Bytes of each storage that ``node`` makes, by the node that stands for it."""
    if node.target is operator.getitem or meta.cost(node).is_view:
        return {}
    if meta.tensor(node) is not None:
        return {node: meta.cost(node).bytes}
    parts = {part: meta.cost(part).bytes for part in node.users if part.target is operator.getitem}
    return {node: at_hint(storage_bytes(meta.value(node))) - sum(parts.values()), **parts}


def _storage(node: Node) -> Node:
    """The node that made the storage that ``node`` shows."""
    while node.op == "call_function" and meta.cost(node).is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _dying(nodes: list[Node]) -> dict[int, list[Node]]:
    """Place -> storages that nothing needs after it."""
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        if node.op == "call_function":
            last[_storage(node)] = place
        for source in node.all_input_nodes:
            last[_storage(source)] = place
        if node.target is operator.getitem:
            last.update(dict.fromkeys(node.all_input_nodes[0].users, place))
    dying: dict[int, list[Node]] = {}
    for storage, place in last.items():
        dying.setdefault(place, []).append(storage)
    return dying
