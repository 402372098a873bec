"""expected_peak: what training steps will add to the process's memory, as far as can be told before the first.

A plan promises: it counts all staging there may be, and what capture leaves behind at the most (``budgets``), and what
lives at once of the graphs' values. Here is expected: staging as far as this plan uses it, and what values will have touched,
of which a simulated step says what has arrived and what has left at each op.
"""

from __future__ import annotations

import dataclasses

import torch

from lohan_fx import cost
from lohan_fx.meta import Lane
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import Transit
from lohan_fx.passes.touched_values import touched_bytes
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.planning import staging
from lohan_fx.planning.budgets import captured_bytes
from lohan_fx.planning.memory_model import host_bytes, resident_bytes
from lohan_fx.request import Request, node_seconds
from lohan_fx.runtime.nvme_store import ssd_threads
from lohan_fx.runtime.slots import STATE_DTYPE
from lohan_fx.runtime.state_buffer import states_bytes, used_bytes
from lohan_fx.simulation.simulated_step import simulated_transit
from lohan_fx.simulation.step_program import step_program


def added_bytes(plan: Plan, halves: Halves, transit: Transit | None = None, *, drives: int = 1) -> int:
    """Bytes of host memory that steps by ``plan``, on so many ``drives``, come to use beside what capture has left behind;
    ``plan`` has a prediction, and ``halves`` are its final graphs. Without ``transit`` all that may be on its way is."""
    if plan.device != "cpu":
        assert plan.prediction is not None
        return plan.prediction.peak_bytes["host"] - captured_bytes(len(plan.parameters))
    beside = host_bytes(touched_staging_bytes(plan), plan)
    beside += resident_bytes(plan)[0] + plan.waiting_bytes
    return beside + touched_bytes(halves, _leaving_slowly(plan, drives), transit)


def transit_of(halves: Halves, plan: Plan, request: Request) -> Transit | None:
    """What is on its way in a step of final ``halves``, simulated with the rates of ``request``; None where these are another
    machine's, or know no drive, or where the device has memory of its own."""
    if plan.device != "cpu" or not request.hw.is_this_machine() or not request.hw.nvme:
        return None
    program = step_program(halves, plan, node_seconds(request), cost.handover_s(request.hw))
    return simulated_transit(program, plan, request.hw, transfers=staging.TRANSFERS)


def touched_staging_bytes(plan: Plan) -> int:
    """Of the staging of a CPU's ``plan``, what will be used: what comes back is read in place, and what stays in memory is
    updated there."""
    windows = plan.windows
    trained = [p for p in plan.parameters if p.trainable]
    stay = [p.stays_in_memory_of(plan.device) for p in trained]
    leaves = any(a.decision == Swap(Tier.NVME) for a in plan.activations)
    here = 4 * windows.chunk_elements if any(stay) else 0
    streamed = 0 if all(stay) else _touched_states_bytes(plan)
    return here + streamed + (windows.io_buffers * windows.io_bytes if leaves else 0)


def _touched_states_bytes(plan: Plan) -> int:
    """Of the optimizer's buffers. Where gradients wait on NVMe their sums may be fp32, and pass through a buffer whole."""
    if any(p.gradient_home is Tier.NVME for p in plan.parameters):
        return states_bytes(plan.windows)
    dtype = getattr(torch, plan.compute_dtype)
    copy_itemsize = 0 if dtype == STATE_DTYPE else dtype.itemsize
    return used_bytes(plan.windows, copy_itemsize)


def _leaving_slowly(plan: Plan, drives: int) -> Plan:
    """``plan`` with a window for what swaps out that only drives fill: what goes to host memory has left before the next.
    They hold back the share of it for which the forward, as it is predicted, leaves them no time, and a few at work."""
    swapped = [a.bytes for a in plan.activations if a.decision == Swap(Tier.NVME)]
    at_work = ssd_threads(drives) * max(swapped, default=0)
    held_back = at_work + round(sum(swapped) * _behind(plan))
    windows = dataclasses.replace(
        plan.windows, swap_out_bytes=min(plan.windows.swap_out_bytes, sum(swapped), held_back)
    )
    return dataclasses.replace(plan, windows=windows)


def _behind(plan: Plan) -> float:
    """Share of the forward's traffic that its compute leaves the drives no time for; all of it where nothing is predicted."""
    if plan.prediction is None:
        return 1.0
    lanes_s = plan.prediction.forward.lanes_s
    drives_s = lanes_s.get(Lane.SSD, 0.0)
    return max(0.0, 1 - lanes_s.get(Lane.COMPUTE, 0.0) / drives_s) if drives_s else 0.0
