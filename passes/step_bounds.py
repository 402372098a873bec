"""step_bounds: what drives and compute cannot do at the same time in a step of final graphs.

Before a wait of the forward the drives must have moved all that is waited for up to it; what is computed behind it comes on top.
Before a gradient is there, no state of it or of the later ones moves, and no fetch that the graph begins behind it; what compute
did until then comes before. Each wait and each gradient so bounds its stage, and the greatest bound is what counts: where
states that move are not spread evenly, it lies between the ends that ``step_ends`` knows before anything is decided.

Requires: halves after all rewriting passes.
Ensures: values; the graphs are unchanged. No bound is above what a step takes, but by writes that the optimizer's buffers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.meta import Cost, Lane
from lohan_fx.passes.step_ends import fills
from lohan_fx.plan import ParameterPlan, Plan, Swap, Tier

NodeSeconds = Callable[[Cost], float]
DrivesSeconds = Callable[[int, int], float]
"""Seconds in which drives read and write so many bytes."""


@dataclass(frozen=True)
class Bound:
    """``compute_s`` of compute, and then or before the drives read and write so much."""

    compute_s: float
    read_bytes: int
    written_bytes: int


def fetch_bound(
    forward: GraphModule,
    beside: Mapping[str, tuple[int, int]],
    homes: Mapping[str, ParameterPlan],
    node_seconds: NodeSeconds,
    drives_s: DrivesSeconds,
    least: Bound,
) -> Bound:
    """That of the wait which bounds the ``forward`` most, if it is more than ``least``. ``beside``: bytes that are read and
    written for the update of a parameter before the forward may fetch it."""
    left_s = sum(_seconds(node, node_seconds) for node in forward.graph.nodes)
    read = written = 0
    bounds, updates = [least], dict(beside)
    for node in forward.graph.nodes:
        left_s -= _seconds(node, node_seconds)
        if node.target is not ops.WAIT or not isinstance(fetch := node.args[0], Node) or fetch.target is not ops.FETCH:
            continue
        name = meta.origin(fetch) or ""
        also_read, also_written = updates.pop(name, (0, 0))
        fetched = meta.cost(fetch).bytes if homes[name].home is Tier.NVME else 0
        if fetched or also_read or also_written:
            read, written = read + fetched + also_read, written + also_written
            bounds.append(Bound(left_s, read, written))
    return max(bounds, key=lambda bound: _total_s(bound, drives_s))


def update_bound(
    backward: GraphModule,
    plan: Plan,
    moved: Mapping[str, tuple[int, int]],
    blocking_s: Mapping[str, float],
    node_seconds: NodeSeconds,
    drives_s: DrivesSeconds,
    least: Bound,
) -> Bound:
    """That of the gradient which bounds the ``backward`` most, if it is more than ``least``. ``moved``: bytes read and written
    in the backward for each gradient and its update; ``blocking_s``: seconds of the updates for which compute waits before it
    goes on from the next gradient."""
    before_s = free_s = 0.0
    offers: list[tuple[int, float]] = []
    nodes = list(backward.graph.nodes)
    for place, node in enumerate(nodes):
        before_s += _seconds(node, node_seconds)
        if node.target is not ops.OFFLOAD_GRAD:
            continue
        name = meta.origin(node) or ""
        if fills(node, plan.windows.gradient_bytes):
            before_s = max(before_s, free_s)
            free_s = before_s + blocking_s.get(name, 0.0)
        if any(moved.get(name, ())):
            offers.append((place, before_s))
    away = {a.node: a.bytes for a in plan.activations if a.decision == Swap(Tier.NVME)}
    homes = {p.name: p for p in plan.parameters}
    bounds = [least, *_behind(nodes, offers, moved, away, homes)]
    return max(bounds, key=lambda bound: _total_s(bound, drives_s))


def _behind(
    nodes: list[Node],
    offers: list[tuple[int, float]],
    moved: Mapping[str, tuple[int, int]],
    away: Mapping[str, int],
    homes: Mapping[str, ParameterPlan],
) -> Iterator[Bound]:
    """The bound of each of ``offers`` (place among ``nodes``, seconds before it), the last one first."""
    read = written = 0
    end = len(nodes)
    for place, before_s in reversed(offers):
        for node in nodes[place:end]:
            name = meta.origin(node) or "" if node.op == "call_function" else ""
            if node.target is ops.FETCH:
                read += meta.cost(node).bytes if homes[name].home is Tier.NVME else 0
            elif node.target is ops.SWAP_IN:
                read += away.get(name, 0)
            elif node.target is ops.OFFLOAD_GRAD:
                also_read, also_written = moved.get(name, (0, 0))
                read, written = read + also_read, written + also_written
        end = place
        yield Bound(before_s, read, written)


def _seconds(node: Node, node_seconds: NodeSeconds) -> float:
    if node.op != "call_function":
        return 0.0
    cost = meta.cost(node)
    return node_seconds(cost) if cost.lane is Lane.COMPUTE else 0.0


def _total_s(bound: Bound, drives_s: DrivesSeconds) -> float:
    return bound.compute_s + drives_s(bound.read_bytes, bound.written_bytes)
