"""liveness: the bytes alive on the device while a graph runs boxed, from the graph alone.

Requires: an annotated graph.
Ensures: a value; the graph is unchanged.

A storage lives from the node that makes it to the last node that reads it, through views too. The results of an op
with several live from the op on, and all of them until the last has been taken out of its tuple. Inputs that only
this graph holds (saved activations, tangents) die at their last use as well, because a boxed graph gives them up;
outputs, inputs that the caller holds and parameters at home on the device do not die. What a kernel takes beside what it makes
lives while that op runs.

What the forward has returned is the caller's. Where that may be more than the loss (``Plan.loss_only``), it is there while the
backward runs, and what the call before returned while the next forward does: ``outputs = model(...)`` lets go of it at the end.

What a ``swap_out`` or an ``offload_grad`` was the last to read stays until it has left. Nobody knows when that is, but
no more of it is there at once than the plan's windows allow (``device_peaks``).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.annotate import at_hint, storage_bytes
from lohan_fx.passes.halves import Halves, outputs_of
from lohan_fx.plan import ParameterPlan, Plan, Tier

_SENDING = (ops.SWAP_OUT, ops.OFFLOAD_GRAD)
_NOTHING: Mapping[str, Collection[str]] = {}


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
    for node, during, after, _ in _walk(gm, resident, shells, held):
        if during > peak:
            peak, peak_node = during, node.name if node is not None else "inputs"
        end_bytes = after
    return Peak(peak, peak_node, end_bytes)


@dataclass
class _Leaving:
    """What was handed to transfers of one kind and may still be on the device: no more than ``window_bytes``, or a
    single larger one."""

    window_bytes: int
    sent_bytes: int = 0
    largest_bytes: int = 0

    def send(self, nbytes: int) -> None:
        self.sent_bytes += nbytes
        self.largest_bytes = max(self.largest_bytes, nbytes)

    @property
    def bytes(self) -> int:
        return min(self.sent_bytes, max(self.window_bytes, self.largest_bytes))


@dataclass(frozen=True)
class Transit:
    """What is on its way in a step, as somebody has simulated it.

    ``coming``: (half, node that starts to bring something) -> bytes of earlier ones that are not there as it begins; with ""
    for a node, at the end of the half. ``leaving``: parameter -> those whose gradients are still there once its own has been
    handed over, itself among them.
    """

    coming: Mapping[tuple[str, str], int]
    leaving: Mapping[str, Collection[str]]


class _Gradients:
    """Bytes of gradients that were handed over and may still be there: what fits the window, or what ``transit`` knows."""

    def __init__(self, window_bytes: int, transit: Transit | None) -> None:
        self._window = _Leaving(window_bytes)
        self._transit = transit
        self._sent: dict[str, int] = {}
        self._there: Collection[str] = ()

    def send(self, parameter: str, nbytes: int) -> None:
        self._window.send(nbytes)
        self._sent[parameter] = nbytes

    def handed_over(self, parameter: str) -> None:
        """Whether or not it counts (``send``)."""
        if self._transit is not None:
            self._there = self._transit.leaving.get(parameter, self._there)

    @property
    def bytes(self) -> int:
        if self._transit is None:
            return self._window.bytes
        return sum(self._sent.get(parameter, 0) for parameter in self._there)


@dataclass(frozen=True)
class _Moment:
    """Bytes alive while an op runs, what leaves aside; of what leaves, gradients (at most) and swapped activations, of
    which so many have been sent and may not have left, the largest so large."""

    node: str
    live_bytes: int
    gradient_bytes: int
    sent_bytes: int
    largest_bytes: int


def device_peaks(halves: Halves, plan: Plan, *, elsewhere: Mapping[str, Collection[str]] = _NOTHING) -> dict[str, Peak]:
    """``peaks`` with what is leaving and what the caller holds; ``end_bytes`` is what is alive during the last op.
    ``elsewhere``: by half, the ops and inputs whose values do not count."""
    most: dict[str, tuple[int, str]] = {}
    end_bytes: dict[str, int] = {}
    for half, node, nbytes in alive(halves, plan, elsewhere=elsewhere):
        end_bytes[half] = nbytes
        if half not in most or nbytes > most[half][0]:
            most[half] = nbytes, node
    return {half: Peak(nbytes, node, end_bytes[half]) for half, (nbytes, node) in most.items()}


def alive(
    halves: Halves,
    plan: Plan,
    *,
    elsewhere: Mapping[str, Collection[str]] = _NOTHING,
    transit: Transit | None = None,
    scratch: bool = True,
) -> Iterator[tuple[str, str, int]]:
    """(half, op, bytes alive while it runs) for each op of both graphs, as ``device_peaks`` counts them; of gradients with
    ``transit`` those that it knows to be there. ``scratch``: whether what kernels take counts."""
    for half, at in _moments(halves, plan, elsewhere, transit, scratch):
        leaving = min(at.sent_bytes, max(plan.windows.swap_out_bytes, at.largest_bytes))
        yield half, at.node, at.live_bytes + at.gradient_bytes + leaving


def device_peak(halves: Halves, plan: Plan) -> int:
    """Most device bytes alive in either half, with what is on its way out, what the caller holds and what other forwards keep."""
    return max(half.bytes for half in device_peaks(halves, plan).values()) + plan.waiting_bytes


def swap_out_room(halves: Halves, plan: Plan, limit_bytes: int) -> int:
    """The widest window for swapping out with which ``device_peaks`` stays within ``limit_bytes``, if any does; at most
    all that is swapped."""
    moments = [at for _, at in _moments(halves, plan)]
    room = max((at.sent_bytes for at in moments), default=0)
    for at in moments:
        if at.live_bytes + at.gradient_bytes + at.sent_bytes > limit_bytes:
            room = min(room, limit_bytes - at.live_bytes - at.gradient_bytes)
    return max(0, room)


def _moments(
    halves: Halves,
    plan: Plan,
    elsewhere: Mapping[str, Collection[str]] = _NOTHING,
    transit: Transit | None = None,
    scratch: bool = True,
) -> Iterator[tuple[str, _Moment]]:
    """By half, each op while it runs.

    Swapped activations leave one after the other: once one has been waited for in the backward, it and all that were
    sent before it are gone.
    """
    resident = {p.name for p in plan.parameters if p.home is Tier.DEVICE}
    held, beside = _held(halves, plan), _beside(halves, plan, elsewhere)
    swaps, gradients = _Leaving(plan.windows.swap_out_bytes), _Gradients(plan.windows.gradient_bytes, transit)
    up_to: dict[object, int] = {}  # slot -> all bytes sent until its activation was, itself included
    sent_bytes = gone_bytes = 0
    for half, gm in halves.graphs():
        leaves = _leaves(gm, plan)
        for node, during, _, dead in _walk(gm, resident, halves.parameters, held, elsewhere.get(half, ()), scratch):
            name = "inputs" if node is None else node.name
            # What is handed over is alive until that op has run, beside what was handed over before.
            live_bytes = during + beside[half]
            yield half, _Moment(name, live_bytes, gradients.bytes, swaps.sent_bytes, swaps.largest_bytes)
            for storage, nbytes in dead:
                if storage in leaves and leaves[storage].target is ops.SWAP_OUT:
                    swaps.send(nbytes)
                elif storage in leaves:
                    gradients.send(meta.origin(leaves[storage]) or "", nbytes)
            if node is not None and node.target is ops.OFFLOAD_GRAD:
                gradients.handed_over(meta.origin(node) or "")
            if node is None or half == "forward":
                sent_bytes = swaps.sent_bytes
                if node is not None and node.target is ops.SWAP_OUT:
                    up_to[node.args[1]] = sent_bytes
            elif node.target is ops.WAIT and (start := node.all_input_nodes[0]).target is ops.SWAP_IN:
                gone_bytes = max(gone_bytes, up_to.get(start.args[1], 0))
                swaps.sent_bytes = sent_bytes - gone_bytes


def outputs_bytes(halves: Halves) -> int:
    """Bytes of what the forward makes and returns to whoever called the model."""
    return sum(meta.cost(storage).bytes for storage in _outputs(halves))


def _outputs(halves: Halves) -> set[Node]:
    """The storages that the forward makes and returns to its caller."""
    return {storage for n in halves.returned("forward") if (storage := storage_of(n)).op == "call_function"}


def _held(halves: Halves, plan: Plan) -> set[str]:
    """The placeholders of either half that the caller holds to its end."""
    held = {n.name for n in halves.forward.graph.find_nodes(op="placeholder")}
    if plan.loss_only:
        return held
    outputs = _outputs(halves)
    return held | {n.name for n in halves.crossing() if storage_of(n) in outputs}


def _beside(halves: Halves, plan: Plan, elsewhere: Mapping[str, Collection[str]]) -> Mapping[str, int]:
    """By half, bytes of what the caller holds that is no value of this half: of the calls before, beside the forward; of this
    call, beside the backward."""
    if plan.loss_only:
        return {"forward": 0, "backward": 0}
    outputs = {storage for storage in _outputs(halves) if storage.name not in elsewhere.get("forward", ())}
    read_again = {storage_of(n) for n in halves.crossing()}
    before = plan.forwards * sum(meta.cost(storage).bytes for storage in outputs)
    return {"forward": before, "backward": sum(meta.cost(storage).bytes for storage in outputs - read_again)}


def _leaves(gm: GraphModule, plan: Plan) -> dict[Node, Node]:
    """Storage -> the node that hands it to a transfer, which may have it for some time."""
    updated_here = {p.name for p in plan.parameters if is_updated_here(p, plan.device)}
    return {
        storage_of(n.all_input_nodes[0]): n
        for op in _SENDING
        for n in gm.graph.find_nodes(op="call_function", target=op)
        if op is ops.SWAP_OUT or meta.origin(n) not in updated_here
    }


def is_updated_here(p: ParameterPlan, device: str) -> bool:
    """Whether the compute thread itself does away with the gradient, because all that it needs is in its memory."""
    near = (Tier.DEVICE, Tier.HOST) if device == "cpu" else (Tier.DEVICE,)
    return p.gradient_home in near if p.gradient_home is not None else p.home in near and p.states_home in near


def bytes_at(halves: Halves, plan: Plan) -> dict[str, dict[str, int]]:
    """The bytes alive while each op runs, by half and by the op's name; counted as in ``peaks``."""
    resident = {p.name for p in plan.parameters if p.home is Tier.DEVICE}
    held = {n.name for n in halves.forward.graph.find_nodes(op="placeholder")}
    return {
        name: {
            node.name: during for node, during, _, _ in _walk(gm, resident, halves.parameters, held) if node is not None
        }
        for name, gm in halves.graphs()
    }


def rises(
    halves: Halves, plan: Plan, *, elsewhere: Mapping[str, Collection[str]] = _NOTHING, scratch: bool = True
) -> dict[str, dict[ops.Look, int]]:
    """By half, and by op and slot: how much more than before the fetch of that parameter, or before its gradient leaves, is
    alive at the most until the next such node; None stands for the beginning. Counted as in ``device_peaks``, but of what is
    leaving all that was handed over there or since: whoever looks sees what else has not left."""
    resident = {p.name for p in plan.parameters if p.home is Tier.DEVICE}
    held = _held(halves, plan)
    found: dict[str, dict[ops.Look, int]] = {}
    for name, gm in halves.graphs():
        look: ops.Look = None
        base = before = leaving = 0
        half = found[name] = {None: 0}
        leaves = _leaves(gm, plan)
        for node, during, after, dead in _walk(gm, resident, halves.parameters, held, elsewhere.get(name, ()), scratch):
            if node is None:
                base = during
            elif node.target in (ops.FETCH, ops.OFFLOAD_GRAD):
                look, base = (cast(torch._ops.OpOverload, node.target), cast(int, node.args[1])), before
                leaving = 0
            half[look] = max(half.get(look, 0), during + leaving - base)
            leaving += sum(nbytes for storage, nbytes in dead if storage in leaves)
            before = after
    return found


def _walk(
    gm: GraphModule,
    resident: Collection[str],
    shells: Collection[str],
    held: Collection[str],
    elsewhere: Collection[str] = (),
    scratch: bool = True,
) -> Iterator[tuple[Node | None, int, int, Sequence[tuple[Node, int]]]]:
    """Each op with the bytes alive while it runs and after it, and what dies in between; first None, with the inputs."""
    nodes = list(gm.graph.nodes)
    dying = _dying(nodes)
    kept = {storage_of(n) for n in outputs_of(gm) if isinstance(n, Node)} | {n for n in nodes if n.name in held}
    inputs = [n for n in nodes if n.op == "placeholder" and n.name not in shells and n.name not in elsewhere]
    live = {n: meta.cost(n).bytes for n in inputs}
    total = sum(live.values())
    yield None, total, total, ()
    for place, node in enumerate(nodes):
        if node.op == "call_function":
            apart = node.name in elsewhere or (node.target is ops.FETCH and meta.origin(node) in resident)
            made = {} if apart else _made(node)
            live.update(made)
            total += sum(made.values())
            during = total + (meta.cost(node).scratch_bytes if scratch else 0)
            dead = [(storage, live.pop(storage, 0)) for storage in dying.get(place, ()) if storage not in kept]
            total -= sum(nbytes for _, nbytes in dead)
            yield node, during, total, dead


def _made(node: Node) -> dict[Node, int]:
    """Bytes of each storage that ``node`` makes, by the node that stands for it."""
    if node.target is operator.getitem or meta.cost(node).is_view:
        return {}
    if meta.tensor(node) is not None:
        return {node: meta.cost(node).bytes}
    parts = {part: meta.cost(part).bytes for part in node.users if part.target is operator.getitem}
    return {node: at_hint(storage_bytes(meta.value(node))) - sum(parts.values()), **parts}


def storage_of(node: Node) -> Node:
    """The node that made the storage that ``node`` shows."""
    while node.op == "call_function" and meta.cost(node).is_view and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def last_uses(nodes: Sequence[Node]) -> dict[Node, int]:
    """Storage (the node that makes it) -> the place in ``nodes`` of the last that needs it."""
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        if node.op == "call_function":
            last[storage_of(node)] = place
        for source in node.all_input_nodes:
            last[storage_of(source)] = place
        if node.target is operator.getitem:
            last.update(dict.fromkeys(node.all_input_nodes[0].users, place))
    return last


def _dying(nodes: list[Node]) -> dict[int, list[Node]]:
    """Place -> storages that nothing needs after it."""
    dying: dict[int, list[Node]] = {}
    for storage, place in last_uses(nodes).items():
        dying.setdefault(place, []).append(storage)
    return dying
