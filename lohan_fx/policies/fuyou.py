"""fuyou: swap what saves most recomputation per second of transfer, as long as the backward stays bound by compute.

Fuyou 4.4 and Eq. 1-12 (mechanisms B6): D_start is one checkpoint per block. Where the backward and its optimizer are not
bound by compute there is nothing to gain. Otherwise layers join D_f by SBF, FLOP per second of transfer, up to
D_start + T_max * the slowest link, and the D_f of the least T_iter is taken. All of D_f goes to the drives, as in its cost
model. What a layer spares is its exact closure, not its own FLOPs alone. Everything is decided before the first step;
the paper grows D_f by one step per iteration.
"""

from __future__ import annotations

import dataclasses

from lohan_fx import cost
from lohan_fx.cost_models import fuyou
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Lane
from lohan_fx.passes.search import RecomputeClosure
from lohan_fx.plan import Decision, Keep, Plan, Tier
from lohan_fx.plan_builder import saving
from lohan_fx.policies.estimate import work
from lohan_fx.policies.layout import STREAMED, Layout, between_blocks, swap
from lohan_fx.problem import Problem

ACTIVATIONS = "between blocks and by benefit swapped to NVMe, the rest recomputed"


def by_transfer_benefit(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    """Fuyou's decision."""
    start = work(problem, layout.plan(problem, between_blocks(problem, Tier.NVME)))
    saved = problem.activations.mandatory | set(_joining(problem, hw, start))
    return layout.fitting(problem, _swapped(problem, saved))


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
    candidates = [
        activation
        for name, activation in found.activations.items()
        if name in exact.recomputed
        and activation.bytes >= problem.small_activation_bytes
        and found.flops[activation.producer]
    ]
    candidates.sort(key=lambda a: found.flops[a.producer] / a.bytes, reverse=True)
    best_s, best, joined, added, saved_s = cost.step_seconds(start, hw), 0, list[str](), 0, 0.0
    for activation in candidates:
        if added + activation.bytes > most:
            break
        saved_s += sum(found.seconds[name] for name in exact.freed_by([activation.name]))
        exact.save([activation.name])
        added += activation.bytes
        joined.append(activation.name)
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
