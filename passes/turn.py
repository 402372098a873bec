"""turn: how long activations are away, where a step turns from its forward to its backward.

Requires: halves from ``partition`` or later.
Ensures: a value; the graphs are unchanged.

What the forward makes last the backward reads first. Sent away and fetched back meanwhile, it is waited for: in a language
model the logits, often the largest activation. Lanes that are taken as always at work do not show that.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.meta import Cost, Lane
from lohan_fx.passes.halves import Halves, first_user, last_user, positions


def seconds_away(halves: Halves, node_seconds: Callable[[Cost], float]) -> dict[str, float]:
    """Of each value that crosses, by its name: seconds of compute between its last use in the forward and its first in the
    backward, which are hidden from whoever moves it away and back meanwhile."""
    if halves.backward is None:
        return {}
    forward, backward = (_begins_s(gm, node_seconds) for gm in (halves.forward, halves.backward))
    total_s = forward[halves.forward.graph.output_node()]
    read_first = {name: node for name, node in halves.saved_placeholders().items() if node.users}
    for wait in halves.backward.graph.find_nodes(op="call_function", target=ops.WAIT):
        start = wait.args[0]
        if isinstance(start, Node) and start.target is ops.SWAP_IN and wait.users:
            read_first[meta.origin(wait) or ""] = wait
    order = {**positions(halves.forward.graph), halves.forward.graph.output_node(): -1}
    backward_order = positions(halves.backward.graph)
    found = {}
    for node in halves.crossing():
        is_away = node.target is ops.SWAP_OUT
        name = (meta.origin(node) if is_away else node.name) or ""
        if name in read_first:
            last = node if is_away else last_user(node, order)
            behind_s = total_s - forward[last] - _seconds(last, node_seconds)
            found[name] = behind_s + backward[first_user(read_first[name], backward_order)]
    return found


def _begins_s(gm: GraphModule, node_seconds: Callable[[Cost], float]) -> dict[Node, float]:
    """When each node begins, if compute never waits."""
    found, passed_s = {}, 0.0
    for node in gm.graph.nodes:
        found[node] = passed_s
        passed_s += _seconds(node, node_seconds)
    return found


def _seconds(node: Node, node_seconds: Callable[[Cost], float]) -> float:
    computes = node.op == "call_function" and meta.cost(node).lane is Lane.COMPUTE
    return node_seconds(meta.cost(node)) if computes else 0.0
