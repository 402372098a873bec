"""step_ends: what a step begins with and what it ends with, where lanes do not overlap.

Each suffix k.. of the gradients bounds a step: it is not over before gradient k is there and the drives have moved the
states of all from k on. As long as states that move are spread evenly over the backward, as plans spread them, these
bounds are greatest at either end: at the first gradient, if the drives are slower than compute, and where next to nothing
is left to compute, if they are not. There stands, in a language model, its (tied) embedding, often the largest
parameter. The forward mirrors that: what it fetches first must be updated, and come from the drives, before anything runs,
and what it computes when it has its last parameter (a head) hides no fetch.
A gradient that fills the window stops compute before the next one, until it is updated: often that of a head. Updated
is what Adam has been over: what the optimizer's buffers hold then is written while compute goes on, unless gradients that
fill the window come one after the other, and the next ones' updates need the buffers.
Only what stands in the first or last ``NEGLIGIBLE`` share of a half's own seconds counts (recomputation is the plan's),
and bounds made with it are exact within that share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.meta import Cost, Lane
from lohan_fx.passes.annotate import at_hint, storage_bytes
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Blocking, Ends, Windows

NEGLIGIBLE = 0.01

NodeSeconds = Callable[[Cost], float]


def step_ends(
    halves: Halves,
    node_seconds: NodeSeconds,
    windows: Windows,
    streamed: Collection[str] | None = None,
    beside: Mapping[str, int] | None = None,
) -> Ends:
    """Those of rewritten ``halves``, whose gradients wait for their updates in ``windows``. The graphs are unchanged.

    ``streamed``: the parameters that drives bring; all where that is not decided. ``beside``: bytes that drives move for
    updates beside the forward, by parameter, which the first fetch of it waits for.
    """
    forward, backward = halves.forward, halves.backward
    if backward is None:
        return Ends()
    waits = _within(forward, forward.graph.nodes, ops.WAIT, node_seconds)
    fetches = (n.args[0] for n in waits if isinstance(n.args[0], Node) and n.args[0].target is ops.FETCH)
    offers = _within(backward, reversed(backward.graph.nodes), ops.OFFLOAD_GRAD, node_seconds)
    return Ends(
        frozenset(meta.origin(n) or "" for n in fetches),
        frozenset(meta.origin(n) or "" for n in offers),
        _last_fetch_s(forward, node_seconds, streamed, beside or {}),
        _first_gradient_s(backward, node_seconds),
        _blocking(backward, node_seconds, windows),
    )


def _blocking(backward: GraphModule, node_seconds: NodeSeconds, windows: Windows) -> dict[str, Blocking]:
    """Parameters whose gradients do not fit the window together with the next one."""
    found: dict[str, Blocking] = {}
    for run in _blocking_runs(backward, node_seconds, windows.gradient_bytes):
        after = 0
        for name, numel, hidden_s in reversed(run):
            found[name] = Blocking(hidden_s, after)
            after += -(-numel // windows.chunk_elements) * windows.chunk_elements
    return found


def _blocking_runs(
    backward: GraphModule, node_seconds: NodeSeconds, window_bytes: int
) -> Iterator[list[tuple[str, int, float]]]:
    """Those that come one after the other, each with its elements and the seconds to the next gradient."""
    run: list[tuple[str, int, float]] = []
    before: Node | None = None
    passed_s = 0.0
    for node in backward.graph.nodes:
        passed_s += node_seconds(meta.cost(node)) if _computes(node) else 0.0
        if node.target is not ops.OFFLOAD_GRAD or not fills(node, window_bytes):
            continue
        if before is not None and _gradient_bytes(before) + _gradient_bytes(node) > window_bytes:
            run.append((meta.origin(before) or "", _gradient_numel(before), passed_s))
        elif run:
            yield run
            run = []
        before, passed_s = node, 0.0
    if run:
        yield run


def fills(offer: Node, window_bytes: int) -> bool:
    """Whether the gradient of ``offer`` is large enough to wait for room in ``window_bytes``, or to make others wait."""
    return _gradient_bytes(offer) > NEGLIGIBLE * window_bytes


def _last_fetch_s(
    forward: GraphModule, node_seconds: NodeSeconds, streamed: Collection[str] | None, beside: Mapping[str, int]
) -> float:
    """Seconds of the forward behind the wait for the last of more than a negligible share of the bytes that drives move for
    what it fetches; 0 where that is nothing."""
    sizes: dict[Node, int] = {}
    first = dict(beside)
    for wait in forward.graph.find_nodes(op="call_function", target=ops.WAIT):
        fetch = wait.args[0]
        if isinstance(fetch, Node) and fetch.target is ops.FETCH:
            name = meta.origin(fetch) or ""
            own_bytes = meta.cost(fetch).bytes if streamed is None or name in streamed else 0
            sizes[wait] = own_bytes + first.pop(name, 0)
    passed_s, left = 0.0, NEGLIGIBLE * sum(sizes.values())
    for node in reversed(forward.graph.nodes):
        left -= sizes.get(node, 0)
        if left < 0:
            return passed_s
        passed_s += node_seconds(meta.cost(node)) if _computes(node) else 0.0
    return 0.0


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
    return at_hint(storage_bytes(_gradient(offer)))


def _gradient_numel(offer: Node) -> int:
    return at_hint(_gradient(offer).numel())


def _gradient(offer: Node) -> Tensor:
    gradient = offer.args[0]
    assert isinstance(gradient, Node)
    found = meta.value(gradient)
    assert isinstance(found, Tensor)
    return found


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
    again = meta.is_recomputed(node)
    return node.op == "call_function" and not again and meta.cost(node).lane is Lane.COMPUTE
