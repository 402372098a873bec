"""predict: what a step of final graphs will take: seconds, bytes per tier, and operations."""

from __future__ import annotations

import dataclasses
import functools

from lohan_fx import cost, meta
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.passes.assign_buffers import assign_buffers, note_clearing
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import device_peak
from lohan_fx.passes.traffic import padding_bytes, traffic
from lohan_fx.plan import Plan, Prediction
from lohan_fx.planning.memory_model import host_bytes, resident_bytes
from lohan_fx.request import Request, node_seconds, settled

BUFFERS_ROOM_BYTES = 16 << 20
"""Values may take so much more in their places than without even where a plan fills the promise: holes in the heap, of which
no plan speaks, would take more."""


def predict_placed(halves: Halves, plan: Plan, request: Request) -> Prediction:
    """The prediction for final ``halves``, whose values get their places in what the plan leaves of the promise."""
    prediction = predict(halves, plan, request)
    promised = {"host": plan.host_memory_bytes, "device": plan.device_memory_bytes}
    room = min(promised[tier] - nbytes for tier, nbytes in prediction.peak_bytes.items())
    more = assign_buffers(halves, plan, room_bytes=max(room, BUFFERS_ROOM_BYTES))
    more = max(0, min(more, room))
    if plan.device == "cpu" and note_clearing(halves):
        prediction = predict(halves, plan, request)
    return dataclasses.replace(
        prediction, peak_bytes={tier: nbytes + more for tier, nbytes in prediction.peak_bytes.items()}
    )


def work_of(halves: Halves, plan: Plan, request: Request) -> cost.Work:
    """What a step of ``halves`` does, for a cost model."""
    hw = request.hw
    return traffic(
        halves,
        plan,
        node_seconds(request),
        cost.handover_s(hw),
        functools.partial(cost.coming_back_s, hw),
        functools.partial(cost.ssd_seconds, hw=hw),
        functools.partial(cost.lane_update_s, hw=hw),
    )


def host_bytes_short(halves: Halves, plan: Plan, request: Request) -> int:
    """By how much ``halves`` exceed the host memory that ``plan`` was promised; 0 where they fit."""
    return max(0, _needed_bytes(halves, plan, settled(request, plan.windows))[1] - plan.host_memory_bytes)


def _needed_bytes(halves: Halves, plan: Plan, request: Request) -> tuple[int, int]:
    """(device, host) bytes at the peak; a CPU's host memory holds the device's, too. ``request`` is settled."""
    device, host = resident_bytes(plan)[0], host_bytes(request.budgets.fixed_bytes, plan)
    device += device_peak(halves, plan)
    return device, host + device if request.budgets.shared else host


def predict(halves: Halves, plan: Plan, request: Request, *, what: str = "the plan given") -> Prediction:
    """The prediction for ``halves``. Raises ``InfeasiblePlan`` where they, or ``what`` a user calls them, need more memory
    than ``plan`` was promised."""
    request = settled(request, plan.windows)
    work = work_of(halves, plan, request)
    device, host = _needed_bytes(halves, plan, request)
    over = {"device": device - plan.device_memory_bytes, "host": host - plan.host_memory_bytes}
    short = [f"{tier}_memory is {nbytes:,} bytes short" for tier, nbytes in over.items() if nbytes > 0]
    if short:
        raise InfeasiblePlan(f"{what} needs more memory than was promised: {'; '.join(short)}")
    more_read, more_written = padding_bytes(halves, plan)
    flops = [(meta.is_recomputed(n), n) for _, gm in halves.graphs() for n in gm.graph.nodes]
    return Prediction(
        forward=cost.forward_stage(work, request.hw),
        backward=cost.backward_stage(work, request.hw),
        peak_bytes={"device": device, "host": host},
        optimizer=cost.optimizer_stage(work, request.hw),
        nvme_read_bytes=work.nvme_read_bytes + more_read,
        nvme_write_bytes=work.nvme_write_bytes + more_written,
        flops=sum(meta.cost(n).flops for again, n in flops if not again),
        recompute_flops=sum(meta.cost(n).flops for again, n in flops if again),
    )
