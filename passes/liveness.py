"""liveness: the bytes alive on the device while a graph runs boxed, from the graph alone.

Requires: an annotated graph.
Ensures: a value; the graph is unchanged.

A storage lives from the node that makes it to the last node that reads it, through views too. Inputs that only
this graph holds (saved activations, tangents) die at their last use as well, because a boxed graph gives them up;
outputs, inputs that the caller holds and parameters at home on the device do not die.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
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
    nodes = list(gm.graph.nodes)
    last = _last_reads(nodes)
    kept = {_storage(n) for n in outputs_of(gm) if isinstance(n, Node)} | {n for n in nodes if n.name in held}
    live = {n: meta.cost(n).bytes for n in nodes if n.op == "placeholder" and n.name not in shells}
    total = sum(live.values())
    peak, peak_node = total, "inputs"
    for place, node in enumerate(nodes):
        if node.op == "call_function":
            made = 0 if node.target is ops.FETCH and meta.origin(node) in resident else meta.cost(node).bytes
            live[node] = made
            total += made
            if total > peak:
                peak, peak_node = total, node.name
            for storage in {_storage(n) for n in (node, *node.all_input_nodes)} - kept:
                if storage in live and last.get(storage, place) <= place:
                    total -= live.pop(storage)
    return Peak(peak, peak_node, total)


def _storage(node: Node) -> Node:
    """The node that made the storage that ``node`` shows."""
    while node.op == "call_function" and meta.cost(node).is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _last_reads(nodes: list[Node]) -> dict[Node, int]:
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last[_storage(source)] = place
    return last
