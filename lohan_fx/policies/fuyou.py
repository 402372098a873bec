"""fuyou: swap what saves most recomputation per second of transfer, as long as the backward stays bound by compute.

Done as in Fuyou: D_start is one checkpoint per block (mechanisms B6). Where the backward and its optimizer are not bound by
compute there is nothing to gain. Otherwise layers join D_f by SBF, FLOP per second of transfer (Eq. 12), up to D_start +
T_max * the slowest link (Eq. 9 to 11), and the D_f of the least T_iter is taken. All of D_f goes to the drives, as in its cost
model. On a GPU the FIFO has what the peak leaves of its memory, and is refilled in the order of use (sec. 4.4, mechanisms B5).

Otherwise than in Fuyou: what a layer spares is its exact closure, not its own FLOPs alone. Everything is decided before
the first step; the paper grows D_f by one step per iteration ("adaptively iterates") and looks for room in main memory as it
goes. The FIFO is two windows, for parameters and for activations, and gradients have theirs beside it; the CPU's queue is the
staging that every plan has, not the GPU's times a ratio of bandwidths. Write-back is not delayed (mechanisms B3): the states of
a group are written once they are updated, behind the reads of the next ones, as LoHan does; Fuyou waits for the next
group's update. Adam runs in a thread, not in a process of its own.
"""

from __future__ import annotations

import dataclasses

from lohan_fx import cost
from lohan_fx.cost_models import fuyou
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Lane
from lohan_fx.passes.search import RecomputeClosure, flops_per_swap_second, units
from lohan_fx.plan import Decision, Keep, Plan, Tier
from lohan_fx.planning.memory_model import check
from lohan_fx.planning.plan_builder import saving
from lohan_fx.planning.prefetch import with_prefetch
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.estimate import work
from lohan_fx.policies.layout import STREAMED, Layout, between_blocks, swap
from lohan_fx.policies.traits import round_trip_s

ACTIVATIONS = "between blocks and by benefit swapped to NVMe, the rest recomputed"


def by_transfer_benefit(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    """Fuyou's decision."""
    start = work(problem, layout.plan(problem, between_blocks(problem, Tier.NVME)))
    saved = problem.activations.mandatory | set(_joining(problem, hw, start))
    plan = layout.plan(problem, _swapped(problem, saved))
    peak = problem.device_peak(plan)
    check(problem, plan, peak)
    return with_prefetch(problem, plan, peak)


def _joining(problem: Problem, hw: HardwareProfile, start: cost.Work) -> list[str]:
    """The layers that join D_start, in the order of SBF, up to the least T_iter."""
    backward = cost.backward_stage(start, hw)
    if backward.bottleneck != Lane.COMPUTE:
        return []
    slack_s = backward.seconds - max(backward.lanes_s[Lane.H2D], backward.lanes_s[Lane.SSD])
    rates = [hw.h2d_bytes_per_s, hw.d2h_bytes_per_s]
    rates += [hw.ssd_read_bytes_per_s, hw.ssd_write_bytes_per_s] if hw.nvme else []
    most = slack_s * min(rates)
    found = problem.activations
    exact = RecomputeClosure(found, found.mandatory)
    candidates = [u for u in units(found, exact.recomputed) if u.bytes >= problem.small_activation_bytes and u.flops]
    candidates.sort(key=flops_per_swap_second(lambda nbytes: round_trip_s(nbytes, Tier.NVME, hw)), reverse=True)
    best_s, best, joined, added, saved_s = cost.step_seconds(start, hw), 0, list[str](), 0, 0.0
    for unit in candidates:
        if added + unit.bytes > most:
            break
        saved_s += sum(found.seconds[name] for name in exact.freed_by(unit.names))
        exact.save(unit.names)
        added += unit.bytes
        joined += unit.names
        time_s = cost.step_seconds(_grown(start, added, saved_s), hw)
        if time_s < best_s:
            best_s, best = time_s, len(joined)
    return joined[:best]


def _grown(start: cost.Work, added_bytes: int, spared_s: float) -> cost.Work:
    return dataclasses.replace(
        start,
        recompute_s=start.recompute_s - spared_s,
        swapped_bytes=start.swapped_bytes + added_bytes,
        swapped_nvme_bytes=start.swapped_nvme_bytes + added_bytes,
    )


def _swapped(problem: Problem, saved: set[str] | frozenset[str]) -> dict[str, Decision]:
    decisions = saving(problem, saved, Keep())
    return {name: swap(problem, name, Tier.NVME) if isinstance(d, Keep) else d for name, d in decisions.items()}


FUYOU = STREAMED.policy("fuyou", "Fuyou", ACTIVATIONS, by_transfer_benefit, formulas=(fuyou.OVERLAPPED,))
