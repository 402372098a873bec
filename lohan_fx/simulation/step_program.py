"""step_program: what compute does in one step, instruction by instruction, read off the scheduled nodes.

Requires: halves after all rewriting passes. Ensures: a value; the graphs are unchanged.

Nodes that compute, one after the other, are one instruction. Device memory is counted as each node makes and drops
it; what a ``swap_out`` or an ``offload_grad`` is the last to read is handed to the transfer, which drops it once it
has left. (``passes/liveness.py`` counts the same without transfers; this is counted apart from it, to check it.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.meta import Cost, Lane
from lohan_fx.passes.annotate import at_hint, storage_bytes
from lohan_fx.passes.halves import Halves, outputs_of
from lohan_fx.passes.traffic import hands_over
from lohan_fx.plan import Plan, Tier

NodeSeconds = Callable[[Cost], float]


@dataclass(frozen=True)
class Compute:
    """Nodes in a row: their seconds and memory traffic; device bytes at the most and at the end, against the start; and how many
    of them are launched where the device is a GPU."""

    seconds: float
    touched_bytes: int
    peak_bytes: int
    change_bytes: int
    launches: int = 0


@dataclass(frozen=True)
class Fetch:
    """Start bringing ``parameter``; ``bytes`` is its compute-dtype copy, ``change_bytes`` what appears on the device."""

    node: str
    parameter: str
    bytes: int
    change_bytes: int


@dataclass(frozen=True)
class SwapOut:
    """Start moving the activation of ``slot``; ``held_bytes`` of device memory stay until it has left."""

    slot: int
    activation: str
    bytes: int
    tier: Tier
    held_bytes: int


@dataclass(frozen=True)
class SwapIn:
    """Start bringing back the activation of ``slot``."""

    node: str
    slot: int
    activation: str
    change_bytes: int


@dataclass(frozen=True)
class Wait:
    """Block until what the node ``started`` began is there."""

    started: str


@dataclass(frozen=True)
class Offload:
    """Hand over the gradient of ``parameter``; ``held_bytes`` of device memory stay until it has left."""

    parameter: str
    held_bytes: int


Instruction = Compute | Fetch | SwapOut | SwapIn | Wait | Offload


@dataclass(frozen=True)
class StepProgram:
    """Both halves; the ``*_base_bytes`` are device bytes at the start of each, parameters at home there left out."""

    forward: tuple[Instruction, ...]
    forward_base_bytes: int
    backward: tuple[Instruction, ...]
    backward_base_bytes: int


def step_program(halves: Halves, plan: Plan, node_seconds: NodeSeconds, handover_s: float = 0.0) -> StepProgram:
    """The program of one step; the backward is empty where there is none. ``handover_s``: what compute takes to hand a transfer
    over (``cost.handover_s``)."""
    resident = {p.name for p in plan.parameters if p.home is Tier.DEVICE}
    held = {n.name for n in halves.forward.graph.find_nodes(op="placeholder")}
    homes = {p.name: p for p in plan.parameters}

    def seconds(node: Node) -> float:
        if node.target in ops.ALL:
            return handover_s if hands_over(node, homes, plan.device) else 0.0
        return node_seconds(meta.cost(node)) if meta.cost(node).lane is Lane.COMPUTE else 0.0

    forward_base, forward = _half(halves.forward, halves, resident, held, seconds)
    backward_base, backward = 0, tuple[Instruction, ...]()
    if halves.backward is not None:
        backward_base, backward = _half(halves.backward, halves, resident, held, seconds)
    return StepProgram(forward, forward_base, backward, backward_base)


def _half(
    gm: GraphModule,
    halves: Halves,
    resident: Collection[str],
    held: Collection[str],
    seconds: Callable[[Node], float],
) -> tuple[int, tuple[Instruction, ...]]:
    changes = _Changes(gm, resident, held)
    base = sum(meta.cost(n).bytes for n in gm.graph.find_nodes(op="placeholder") if n.name not in halves.parameters)
    return base, tuple(_merged(_instructions(gm, changes, seconds)))


def _instructions(gm: GraphModule, changes: _Changes, seconds: Callable[[Node], float]) -> Iterator[Instruction]:
    """One per node, in order; handing over a transfer comes before it as ``Compute``, and an empty one follows where its node
    drops other memory too."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        made, dropped = changes.at(node)
        found = meta.cost(node)
        if node.target in ops.ALL and (handing_over_s := seconds(node)):
            yield Compute(handing_over_s, 0, 0, 0)
        if node.target is ops.FETCH:
            yield Fetch(node.name, meta.origin(node) or "", found.bytes, made)
        elif node.target is ops.SWAP_IN:
            yield SwapIn(node.name, node.args[1], meta.origin(node) or "", made)
        elif node.target is ops.SWAP_OUT:
            source = meta.cost(node.args[0])
            yield SwapOut(node.args[1], meta.origin(node) or "", source.bytes, Tier(node.args[2]), dropped)
            continue
        elif node.target is ops.OFFLOAD_GRAD:
            yield Offload(meta.origin(node) or "", dropped)
            continue
        elif node.target is ops.WAIT:
            yield Wait(node.args[0].name)
        else:
            launched = found.lane is Lane.COMPUTE and not found.is_view
            yield Compute(seconds(node), found.touched_bytes, made + found.scratch_bytes, made - dropped, int(launched))
            continue
        if dropped:
            yield Compute(0.0, 0, 0, -dropped)


def _merged(instructions: Iterator[Instruction]) -> Iterator[Instruction]:
    """The same with neighbouring ``Compute`` as one."""
    run: Compute | None = None
    for found in instructions:
        if isinstance(found, Compute):
            run = found if run is None else _joined(run, found)
            continue
        if run is not None:
            yield run
            run = None
        yield found
    if run is not None:
        yield run


def _joined(a: Compute, b: Compute) -> Compute:
    return Compute(
        seconds=a.seconds + b.seconds,
        touched_bytes=a.touched_bytes + b.touched_bytes,
        peak_bytes=max(a.peak_bytes, a.change_bytes + b.peak_bytes),
        change_bytes=a.change_bytes + b.change_bytes,
        launches=a.launches + b.launches,
    )


class _Changes:
    """Device bytes that each node of a graph makes, and those that are dropped once it has run."""

    def __init__(self, gm: GraphModule, resident: Collection[str], held: Collection[str]) -> None:
        nodes = list(gm.graph.nodes)
        order = {node: place for place, node in enumerate(nodes)}
        kept = {_storage(n) for n in outputs_of(gm) if isinstance(n, Node)}
        kept.update(n for n in nodes if n.name in held)
        self._made: dict[Node, int] = {}
        self._dropped: dict[Node, int] = {}
        for node in nodes:
            in_place = node.target is ops.FETCH and meta.origin(node) in resident
            for storage, nbytes in () if in_place else _storages(node):
                self._made[node] = self._made.get(node, 0) + nbytes
                if storage not in kept:
                    last = max(_readers(storage) | set(_parts(node)), key=lambda n: order[n])
                    self._dropped[last] = self._dropped.get(last, 0) + nbytes

    def at(self, node: Node) -> tuple[int, int]:
        return self._made.get(node, 0), self._dropped.get(node, 0)


def _storages(node: Node) -> list[tuple[Node, int]]:
    """What ``node`` makes: the node that stands for each storage, and its bytes. Of an op with several results each
    that is used has a node of its own, and the others go with the tuple."""
    if node.op not in ("call_function", "placeholder") or node.target is operator.getitem or meta.cost(node).is_view:
        return []
    if node.op == "placeholder" or meta.tensor(node) is not None:
        return [(node, meta.cost(node).bytes)]
    parts = [(part, meta.cost(part).bytes) for part in _parts(node)]
    rest = at_hint(storage_bytes(meta.value(node))) - sum(nbytes for _, nbytes in parts)
    return [(node, rest), *parts]


def _parts(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is operator.getitem]


def _readers(node: Node) -> set[Node]:
    """All that read the storage that ``node`` stands for, through views too, and ``node`` itself."""
    found, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user in found or user.op == "output":
                continue
            found.add(user)
            if user.op == "call_function" and meta.cost(user).is_view:
                stack.append(user)
    return found


def _storage(node: Node) -> Node:
    """The node that made the storage that ``node`` shows."""
    while node.op == "call_function" and meta.cost(node).is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
