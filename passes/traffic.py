"""traffic: what one step moves and computes, read off the rewritten graphs node by node.

Requires: halves after all rewriting passes.
Ensures: a value; the graphs are unchanged. Bytes are exact: what the runtime will move, padding of files aside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

import sympy
from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.cost import ADAM_TOUCHED_BYTES, STATE_BYTES, Work
from lohan_fx.meta import Cost, Lane, Phase
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.lane_jobs import (
    chunks,
    jobs_of_parameter,
    jobs_of_transfer,
    pieces,
    repeated_requests,
    streamed_back,
    update_requests,
)
from lohan_fx.passes.liveness import is_updated_here
from lohan_fx.passes.step_bounds import Bound, fetch_bound, update_bound
from lohan_fx.passes.step_ends import step_ends
from lohan_fx.passes.turn import seconds_away
from lohan_fx.plan import Ends, OptimizerTiming, ParameterPlan, Plan, Swap, Tier, Windows

PAGE_BYTES = 4096
"""What O_DIRECT moves at least (``runtime.host_pool``)."""


def _at_once(nbytes: int, tier: Tier, away_s: float) -> float:
    return 0.0


def _no_time(parameters: int) -> float:
    return 0.0


def traffic(
    halves: Halves,
    plan: Plan,
    node_seconds: Callable[[Cost], float],
    handover_s: float = 0.0,
    coming_back_s: Callable[[int, Tier, float], float] = _at_once,
    drives_s: Callable[[int, int], float] | None = None,
    by_lane_s: Callable[[int], float] = _no_time,
) -> Work:
    """The ``Work`` of one training step (or of one inference, where there is no backward). ``handover_s``: what compute takes
    to hand a transfer over (``cost.handover_s``); ``coming_back_s(bytes, tier, seconds away)``: what it waits for an activation
    to come back (``cost.coming_back_s``); ``drives_s(bytes read, written)`` and ``by_lane_s(parameters)``: by which the wait and
    the gradient are found that bound the step most (``step_bounds``); without them the ends of the step do."""
    homes = {p.name: p for p in plan.parameters}
    forward, backward = halves.forward, halves.backward
    computed = sum(node_seconds(meta.cost(n)) for n in _computing(forward))
    again = sum(node_seconds(meta.cost(n)) for n in _computing(backward) if meta.is_recomputed(n))
    back = sum(node_seconds(meta.cost(n)) for n in _computing(backward)) - again
    handed_over, handed_back = (
        sum(hands_over(n, homes, plan.device) for n in gm.graph.nodes) if gm is not None else 0
        for gm in (forward, backward)
    )
    swaps = _calls(forward, ops.SWAP_OUT)
    away_s = seconds_away(halves, node_seconds) if swaps else {}
    updated = [homes[meta.origin(n) or ""] for n in _calls(backward, ops.OFFLOAD_GRAD)]
    ends = ends_of(halves, plan, node_seconds)
    on_gpu = [p for p in updated if p.states_home is Tier.DEVICE and plan.device != "cpu"]
    names_on_gpu = {p.name for p in on_gpu}
    elsewhere = [p for p in updated if p.name not in names_on_gpu or p.optimizer_runs is OptimizerTiming.IN_BACKWARD]
    early, late, next_ = (
        [p for p in elsewhere if p.runs_beside(ends, plan.device) is timing]
        for timing in (OptimizerTiming.IN_BACKWARD, OptimizerTiming.AFTER_BACKWARD, OptimizerTiming.NEXT_FORWARD)
    )
    repeated = [p for p in elsewhere if p.updated_twice]
    blocking = [p for p in early if p.name in ends.blocking and not p.in_memory_of(plan.device)]
    by_lane, late_by_lane = ([p for p in some if not p.stays_in_memory_of(plan.device)] for some in (early, late))
    fetched_nvme_bytes = _fetched(forward, homes, Tier.NVME)
    fetches = _fetches(forward, homes, ends, next_, fetched_nvme_bytes, node_seconds, drives_s)
    held = [*late, *next_]
    updates = _updates(halves, plan, ends, early, held, blocking, node_seconds, drives_s, by_lane_s)
    return Work(
        forward_s=computed + handed_over * handover_s,
        backward_s=back + handed_back * handover_s + (node_seconds(_adam(on_gpu)) if on_gpu else 0.0),
        recompute_s=again,
        coming_back_s=sum(
            coming_back_s(_swapped_bytes(n), Tier(str(n.args[2])), away_s.get(meta.origin(n) or "", math.inf))
            for n in swaps
        ),
        fetched_forward_bytes=_fetched(forward, homes, Tier.HOST, Tier.NVME),
        fetched_forward_nvme_bytes=fetched_nvme_bytes,
        fetched_backward_bytes=_fetched(backward, homes, Tier.HOST, Tier.NVME),
        fetched_backward_nvme_bytes=_fetched(backward, homes, Tier.NVME),
        swapped_bytes=sum(_swapped_bytes(n) for n in swaps),
        swapped_nvme_bytes=sum(_swapped_bytes(n) for n in swaps if n.args[2] == Tier.NVME),
        gradient_bytes=sum(p.bytes for p in updated if p.gradient_home is not Tier.DEVICE),
        state_read_bytes=states_read_bytes(early),
        state_write_bytes=states_written_bytes(early),
        adam_parameters=sum(p.numel for p in early),
        by_lane=sum(p.numel for p in by_lane),
        first_fetched_nvme_bytes=sum(p.first_fetched_nvme_bytes(ends) for p in plan.parameters),
        fetches_read_bytes=fetches.read_bytes,
        fetches_written_bytes=fetches.written_bytes,
        behind_fetches_s=fetches.compute_s,
        held_nvme_bytes=held_nvme_bytes(late),
        late_state_read_bytes=states_read_bytes(late),
        late_state_write_bytes=states_written_bytes(late),
        late_adam_parameters=sum(p.numel for p in late),
        late_by_lane=sum(p.numel for p in late_by_lane),
        updates_read_bytes=updates.read_bytes,
        updates_written_bytes=updates.written_bytes,
        before_updates_s=updates.compute_s,
        blocking_read_bytes=states_read_bytes(blocking),
        blocking_write_bytes=blocking_written_bytes(blocking, ends, plan.windows),
        blocking_by_lane=sum(p.numel for p in blocking),
        blocking_hidden_s=sum(ends.blocking[p.name].hidden_s for p in blocking),
        next_held_nvme_bytes=held_nvme_bytes(next_),
        next_state_read_bytes=states_read_bytes(next_),
        next_state_write_bytes=states_written_bytes(next_),
        next_adam_parameters=sum(p.numel for p in next_),
        repeated_held_nvme_bytes=held_nvme_bytes(repeated),
        repeated_state_bytes=states_read_bytes(repeated),
        returned_bytes=returned_bytes(early, plan),
        late_returned_bytes=returned_bytes(late, plan),
        next_returned_bytes=returned_bytes(next_, plan),
        serial_optimizer=plan.windows.serial_optimizer,
        forward_requests=_stage_requests(forward, homes, plan) + sum(update_requests(p, plan.windows) for p in next_),
        backward_requests=_stage_requests(backward, homes, plan)
        + sum(update_requests(p, plan.windows) for p in early)
        + sum(repeated_requests(p, plan.windows) for p in repeated)
        + sum(chunks(p, plan.windows) for p in (*late, *next_) if p.gradient_home is Tier.NVME),
        **(_launching(halves, plan, ends) if plan.device != "cpu" else {}),
    )


def _fetches(
    forward: GraphModule,
    homes: Mapping[str, ParameterPlan],
    ends: Ends,
    next_: list[ParameterPlan],
    fetched_nvme_bytes: int,
    node_seconds: Callable[[Cost], float],
    drives_s: Callable[[int, int], float] | None,
) -> Bound:
    """What bounds the fetches of the forward. ``next_``: what is updated beside it; ``fetched_nvme_bytes``: of all fetches."""
    last = Bound(
        ends.last_fetch_s,
        fetched_nvme_bytes + states_read_bytes(next_) + held_nvme_bytes(next_),
        states_written_bytes(next_),
    )
    if drives_s is None:
        return last
    return fetch_bound(forward, _beside_forward(next_), homes, node_seconds, drives_s, last)


def _updates(
    halves: Halves,
    plan: Plan,
    ends: Ends,
    early: list[ParameterPlan],
    held: list[ParameterPlan],
    blocking: list[ParameterPlan],
    node_seconds: Callable[[Cost], float],
    drives_s: Callable[[int, int], float] | None,
    by_lane_s: Callable[[int], float],
) -> Bound:
    """What bounds the updates of the backward: ``early`` are updated in it, ``held`` later."""
    first = Bound(ends.first_gradient_s, states_read_bytes(early), states_written_bytes(early) + held_nvme_bytes(held))
    if drives_s is None or halves.backward is None:
        return first
    moved = {p.name: (states_read_bytes([p]), states_written_bytes([p])) for p in early}
    moved |= {p.name: (0, held_nvme_bytes([p])) for p in held}
    theirs = {p.name: (states_read_bytes([p]), blocking_written_bytes([p], ends, plan.windows)) for p in blocking}
    blocking_s = {p.name: max(by_lane_s(p.numel), drives_s(*theirs[p.name])) for p in blocking}
    return update_bound(halves.backward, plan, moved, blocking_s, node_seconds, drives_s, first)


def ends_of(halves: Halves, plan: Plan, node_seconds: Callable[[Cost], float]) -> Ends:
    """The parameters at both ends of a step by ``plan``."""
    streamed = {p.name for p in plan.parameters if p.home is Tier.NVME}
    updated = {meta.origin(n) for n in _calls(halves.backward, ops.OFFLOAD_GRAD)}
    beside = {p.name: _beside_forward_bytes(p, plan) for p in plan.parameters if p.name in updated}
    return step_ends(halves, node_seconds, plan.windows, streamed, beside)


def _launching(halves: Halves, plan: Plan, ends: Ends) -> dict[str, int]:
    """What takes time from the thread that launches a GPU's kernels: those, and the jobs of the lanes."""
    counts = fetch_counts(halves)
    updated = {meta.origin(n) for n in _calls(halves.backward, ops.OFFLOAD_GRAD)}
    jobs = [
        jobs_of_parameter(p, counts.get(p.name, (0, 0)), p.runs_beside(ends, plan.device), plan.windows)
        for p in plan.parameters
        if p.name in counts or p.name in updated
    ]
    swaps = [(_swapped_bytes(n), Tier(str(n.args[2]))) for n in _calls(halves.forward, ops.SWAP_OUT)]
    swapped = sum(jobs_of_transfer(nbytes, tier, plan.windows) for nbytes, tier in swaps)
    return {
        "forward_launches": _launches(halves.forward),
        "backward_launches": _launches(halves.backward),
        "forward_jobs": sum(forward for forward, _ in jobs) + swapped,
        "backward_jobs": sum(backward for _, backward in jobs) + (swapped if halves.backward is not None else 0),
    }


def _launches(gm: GraphModule | None) -> int:
    """Ops of ``gm`` that are launched, each about a kernel."""
    return sum(not meta.cost(n).is_view for n in _computing(gm))


def _stage_requests(gm: GraphModule | None, homes: dict[str, ParameterPlan], plan: Plan) -> int:
    """Reads and writes of the drives that the nodes of ``gm`` cause, optimizer states aside."""
    fetched = [meta.cost(n).bytes for n in _calls(gm, ops.FETCH) if homes[meta.origin(n) or ""].home is Tier.NVME]
    out = [_swapped_bytes(n) for n in _calls(gm, ops.SWAP_OUT) if n.args[2] == Tier.NVME]
    away = {a.node: a.bytes for a in plan.activations if a.decision == Swap(Tier.NVME)}
    back = [away.get(meta.origin(n) or "", 0) for n in _calls(gm, ops.SWAP_IN)]
    return sum(pieces(nbytes, plan.windows) for nbytes in (*fetched, *out, *back))


def padding_bytes(halves: Halves, plan: Plan) -> tuple[int, int]:
    """What whole pages add to the (reads, writes) of a step: drives move no less."""
    homes = {p.name: p for p in plan.parameters}
    fetched = [n for _, gm in halves.graphs() for n in _calls(gm, ops.FETCH)]
    reads = sum(_padding(meta.cost(n).bytes) for n in fetched if homes[meta.origin(n) or ""].home is Tier.NVME)
    swapped = sum(_padding(nbytes) for nbytes in swap_sizes_bytes(halves))
    reads, writes = reads + swapped, swapped
    for p in (homes[meta.origin(n) or ""] for n in _calls(halves.backward, ops.OFFLOAD_GRAD)):
        # All chunks but the last are whole pages in every dtype.
        last = p.numel % plan.windows.chunk_elements
        away = 3 * _padding(4 * last) if p.states_home is Tier.NVME else 0
        held = _padding(last * p.held_bytes // p.numel) if p.numel and p.gradient_home is Tier.NVME else 0
        reads += (away + held) * (2 if p.updated_twice else 1)
        writes += away + held + (_padding(last * p.bytes // p.numel) if p.numel and streamed_back(p) else 0)
    return reads, writes


def _padding(nbytes: int) -> int:
    return -nbytes % PAGE_BYTES


def swap_sizes_bytes(halves: Halves) -> list[int]:
    """Bytes of each activation that goes to NVMe."""
    return [_swapped_bytes(n) for n in _calls(halves.forward, ops.SWAP_OUT) if n.args[2] == Tier.NVME]


def fetch_counts(halves: Halves) -> dict[str, tuple[int, int]]:
    """How often the forward and the backward fetch each parameter, by its name."""
    forward, backward = (
        Counter(meta.origin(n) or "" for n in _calls(gm, ops.FETCH)) for gm in (halves.forward, halves.backward)
    )
    return {name: (forward[name], backward[name]) for name in {**forward, **backward}}


def _computing(gm: GraphModule | None) -> list[Node]:
    if gm is None:
        return []
    return [n for n in gm.graph.nodes if n.op == "call_function" and meta.cost(n).lane is Lane.COMPUTE]


def hands_over(node: Node, homes: Mapping[str, ParameterPlan], device: str) -> bool:
    """Whether ``node`` hands a transfer to another lane: not where what it fetches or updates is in memory already."""
    if node.target is ops.FETCH:
        return homes[meta.origin(node) or ""].home is not Tier.DEVICE
    if node.target is ops.OFFLOAD_GRAD:
        return hands_gradient_over(homes[meta.origin(node) or ""], device)
    return node.target in (ops.SWAP_OUT, ops.SWAP_IN)


def hands_gradient_over(p: ParameterPlan, device: str) -> bool:
    """Whether the gradient or its update goes to another lane: in the backward, or in ``step()``, which is counted there."""
    return not (is_updated_here(p, device) and p.in_memory_of(device))


def _calls(gm: GraphModule | None, op: Callable[..., object]) -> list[Node]:
    return [] if gm is None else list(gm.graph.find_nodes(op="call_function", target=op))


def _fetched(gm: GraphModule | None, homes: dict[str, ParameterPlan], *tiers: Tier) -> int:
    return sum(meta.cost(n).bytes for n in _calls(gm, ops.FETCH) if homes[meta.origin(n) or ""].home in tiers)


def _swapped_bytes(node: Node) -> int:
    source = node.args[0]
    assert isinstance(source, Node)
    return meta.cost(source).bytes


def _adam(updated: list[ParameterPlan]) -> Cost:
    """The device's own updates of ``updated``, as an op at its memory's speed."""
    nothing = sympy.Integer(0)
    return Cost(
        flops=0,
        bytes=0,
        touched_bytes=ADAM_TOUCHED_BYTES * sum(p.numel for p in updated),
        flops_expr=nothing,
        bytes_expr=nothing,
        layer="",
        layer_kind="",
        phase=Phase.BACKWARD,
        lane=Lane.COMPUTE,
        is_view=False,
        is_random=False,
    )


def _beside_forward_bytes(p: ParameterPlan, plan: Plan) -> int:
    """Bytes that drives move for an update of ``p`` beside the next forward, which waits for it."""
    if p.optimizer_runs is not OptimizerTiming.NEXT_FORWARD or p.stays_in_memory_of(plan.device):
        return 0
    return states_read_bytes([p]) + states_written_bytes([p]) + held_nvme_bytes([p])


def _beside_forward(updated: list[ParameterPlan]) -> dict[str, tuple[int, int]]:
    """Bytes that are read and written for the update of each of ``updated`` before the next forward may fetch it: of what is
    written only what it fetches."""
    return {
        p.name: (states_read_bytes([p]) + held_nvme_bytes([p]), p.bytes if p.home is Tier.NVME else 0) for p in updated
    }


def held_nvme_bytes(updated: list[ParameterPlan]) -> int:
    """Bytes of the gradients of ``updated`` that wait on NVMe."""
    return sum(p.held_bytes for p in updated if p.gradient_home is Tier.NVME)


def returned_bytes(updated: list[ParameterPlan], plan: Plan) -> int:
    """Bytes of ``updated`` that the CPU copies back to a GPU."""
    return sum(p.bytes for p in updated if p.returns_to(plan.device))


def states_read_bytes(updated: list[ParameterPlan]) -> int:
    """Bytes of states that the updates of ``updated`` read from NVMe."""
    return sum(STATE_BYTES * p.numel for p in updated if p.states_home is Tier.NVME)


def states_written_bytes(updated: list[ParameterPlan]) -> int:
    """Bytes that the updates of ``updated`` write to NVMe: states, and copies that the next forward streams. Of those that are
    made twice, the first time."""
    return states_read_bytes([p for p in updated if not p.updated_twice]) + sum(streamed_back(p) for p in updated)


def blocking_written_bytes(updated: list[ParameterPlan], ends: Ends, windows: Windows) -> int:
    """Of ``states_written_bytes``, what must be on NVMe before compute goes on."""
    return sum(round(ends.blocking[p.name].written(p.numel, windows) * states_written_bytes([p])) for p in updated)
