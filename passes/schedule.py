"""schedule: start transfers early, within the plan's windows.

Requires: halves from ``insert_gradient_offload``; scheduled already for another window, or not.
Ensures: the starts of each kind stand in the order of their waits (first in, first out; Fuyou sec. 4.4), each as
early as the window allows: the bytes started and not yet waited for stay within it, unless a single transfer is
larger, which then starts when the one before it has been waited for. Waits do not move.

    wait_a; use(a); start_b; wait_b; use(b)     ->     start_b; wait_a; use(a); wait_b; use(b)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Plan, Tier


@dataclass(frozen=True)
class _Transfer:
    start: Node
    wait: Node
    bytes: int


def schedule(halves: Halves, plan: Plan) -> None:
    """Hoist the starts in both halves."""
    resident = {p.name for p in plan.parameters if p.home is Tier.DEVICE}
    for _, gm in halves.graphs():
        fetches = [t for t in _transfers(gm, ops.FETCH) if meta.origin(t.start) not in resident]
        _hoist(gm, fetches, plan.windows.fetch_bytes)
        _hoist(gm, _transfers(gm, ops.SWAP_IN), plan.windows.swap_in_bytes)


def _transfers(gm: GraphModule, op: object) -> list[_Transfer]:
    """The transfers of one kind, in the order in which they are waited for."""
    found = []
    for wait in gm.graph.nodes:
        if wait.op == "call_function" and wait.target is ops.WAIT and wait.args[0].target is op:
            found.append(_Transfer(wait.args[0], wait, meta.cost(wait.args[0]).bytes))
    return found


def _hoist(gm: GraphModule, transfers: Sequence[_Transfer], window_bytes: int) -> None:
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    if not placeholders:
        return
    after = placeholders[-1]
    started: deque[_Transfer] = deque()
    started_bytes = 0
    for transfer in transfers:
        while started and started_bytes + transfer.bytes > window_bytes:
            arrived = started.popleft()
            started_bytes -= arrived.bytes
            after = arrived.wait
        after.append(transfer.start)
        after = transfer.start
        started.append(transfer)
        started_bytes += transfer.bytes
