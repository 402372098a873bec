"""step_ends: what a step begins with and what it ends with, where lanes do not overlap.

Each suffix k.. of the gradients bounds a step: it is not over before gradient k is there and the drives have moved the
states of all from k on. As long as states that move are spread evenly over the backward, as plans spread them, these
bounds are greatest at either end: at the first gradient, if the drives are slower than compute, and where next to nothing
is left to compute, if they are not. There stands, in a language model, its (tied) embedding, often the largest
parameter. The forward's beginning mirrors that: what it fetches first must be updated before anything runs.
A gradient that fills the window stops compute before the next one, until it is updated: often that of a head.
Only what stands in the first or last ``NEGLIGIBLE`` share of a half's own seconds counts (recomputation is the plan's),
and bounds made with it are exact within that share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.meta import Cost, Lane
from lohan_fx.passes.annotate import at_hint, storage_bytes
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Ends

NEGLIGIBLE = 0.01

NodeSeconds = Callable[[Cost], float]


def step_ends(halves: Halves, node_seconds: NodeSeconds, window_bytes: int) -> Ends:
    """Those of rewritten ``halves``; ``window_bytes``: of gradients that wait for their updates. The graphs are unchanged."""
    forward, backward = halves.forward, halves.backward
    if backward is None:
        return Ends()
    waits = _within(forward, forward.graph.nodes, ops.WAIT, node_seconds)
    fetches = (n.args[0] for n in waits if isinstance(n.args[0], Node) and n.args[0].target is ops.FETCH)
    offers = _within(backward, reversed(backward.graph.nodes), ops.OFFLOAD_GRAD, node_seconds)
    return Ends(
        frozenset(meta.origin(n) or "" for n in fetches),
        frozenset(meta.origin(n) or "" for n in offers),
        _first_gradient_s(backward, node_seconds),
        _blocking_s(backward, node_seconds, window_bytes),
    )


def _blocking_s(backward: GraphModule, node_seconds: NodeSeconds, window_bytes: int) -> dict[str, float]:
    """Parameter -> seconds to the next gradient, where its own and that do not fit the window together."""
    found: dict[str, float] = {}
    before, before_bytes, passed_s = "", 0, 0.0
    for node in backward.graph.nodes:
        passed_s += node_seconds(meta.cost(node)) if _computes(node) else 0.0
        if node.op != "call_function" or node.target is not ops.OFFLOAD_GRAD:
            continue
        nbytes = _gradient_bytes(node)
        if before and before_bytes + nbytes > window_bytes:
            found[before] = passed_s
        # What is small against the window neither fills it nor waits for room.
        if nbytes > NEGLIGIBLE * window_bytes:
            before, before_bytes, passed_s = meta.origin(node) or "", nbytes, 0.0
    return found


def _first_gradient_s(backward: GraphModule, node_seconds: NodeSeconds) -> float:
    """Seconds before the backward has handed over more than a negligible share of the gradients' bytes."""
    sizes = {n: _gradient_bytes(n) for n in backward.graph.find_nodes(op="call_function", target=ops.OFFLOAD_GRAD)}
    passed_s, left = 0.0, NEGLIGIBLE * sum(sizes.values())
    for node in backward.graph.nodes:
        passed_s += node_seconds(meta.cost(node)) if _computes(node) else 0.0
        left -= sizes.get(node, 0)
        if left < 0:
            return passed_s
    return 0.0


def _gradient_bytes(offer: Node) -> int:
    gradient = offer.args[0]
    assert isinstance(gradient, Node)
    return at_hint(storage_bytes(meta.value(gradient)))


def _within(gm: GraphModule, nodes: Iterable[Node], op: Callable[..., Any], node_seconds: NodeSeconds) -> list[Node]:
    """The calls of ``op`` among the first of ``nodes``, before more than a negligible share of them has run."""
    seconds = {n: node_seconds(meta.cost(n)) for n in gm.graph.nodes if _computes(n)}
    found, passed_s, most_s = [], 0.0, NEGLIGIBLE * sum(seconds.values())
    for node in nodes:
        if node.op == "call_function" and node.target is op:
            found.append(node)
        passed_s += seconds.get(node, 0.0)
        if passed_s > most_s:
            break
    return found


def _computes(node: Node) -> bool:
    again = node.name.startswith("recompute_")
    return node.op == "call_function" and not again and meta.cost(node).lane is Lane.COMPUTE
