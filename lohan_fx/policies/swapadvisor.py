"""swapadvisor: activations and states move to main memory, all computation is on the GPU (SwapAdvisor, ASPLOS '20).

Its swap planner evicts what is needed back last; the genetic search over schedules around it is left out.
"""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.eviction import all_kept, evict
from lohan_fx.policies.layout import IN_HOST, Layout
from lohan_fx.policies.traits import traits


def _decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    del hw
    farthest = sorted(traits(problem), key=lambda t: t.idle_s, reverse=True)
    return evict(problem, layout, all_kept(problem), [(t.name, Swap(Tier.HOST)) for t in farthest])


SWAPADVISOR = IN_HOST.policy(
    "swapadvisor",
    "SwapAdvisor",
    "swapped to host RAM, the last needed first, until the rest fits",
    _decide,
    optimizer="GPU, after the backward",
    why_not="its optimizer runs on the GPU over states that stream in and out; this runtime updates them on the CPU",
)
