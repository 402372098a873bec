"""g10: keep or swap by how long a tensor lies idle, never recompute (G10, MICRO '23; mechanisms a1, a2).

A tensor idle for longer than a round trip to the drive goes there; one that could only be away in main memory goes
there; the others stay. Where that does not fit, more go, the longest idle first. G10 runs Adam on the GPU, with 14 bytes
per parameter in and as many out.
"""

from __future__ import annotations

import dataclasses

from lohan_fx.cost_models import g10
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.eviction import all_kept, evict
from lohan_fx.policies.layout import DecideIn, Layout
from lohan_fx.policies.traits import round_trip_s, traits

_LAYOUT = Layout(Tier.NVME, Tier.NVME, Tier.NVME)
_NOTE = "G10's optimizer runs on the GPU, which 14 bytes per parameter enter and leave; the prediction is of the CPU's"


def by_idle_time(*tiers: Tier) -> DecideIn:
    """Decides as G10 does; ``tiers`` are where tensors may go, the farthest first."""

    def decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
        decisions = all_kept(problem)
        found = sorted(traits(problem), key=lambda t: t.idle_s, reverse=True)
        for trait in found:
            away = next((tier for tier in tiers if trait.idle_s > round_trip_s(trait.bytes, tier, hw)), None)
            if away is not None:
                decisions[trait.name] = Swap(away)
        kept = [t.name for t in found if not isinstance(decisions[t.name], Swap)]
        return evict(problem, layout, decisions, [(name, Swap(tiers[0])) for name in kept])

    return decide


def _noted(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    return dataclasses.replace(by_idle_time(Tier.NVME, Tier.HOST)(layout, problem, hw), notes=(_NOTE,))


G10 = _LAYOUT.policy(
    "g10",
    "G10",
    "kept or swapped to NVMe or host RAM by idle time",
    _noted,
    optimizer="GPU, after the backward",
    why_not="its optimizer runs on the GPU over states that stream in and out; this runtime streams them to the CPU",
    formulas=(g10.SEPARATE, g10.OVERLAPPED),
)
