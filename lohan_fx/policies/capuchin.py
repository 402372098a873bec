"""capuchin: per tensor keep, swap to main memory or recompute, by measured costs (Capuchin, ASPLOS '20; mechanisms a2).

Nothing moves while everything fits. Then, longest free time first, tensors are swapped whose transfers the link can hide
behind compute, and after these each by its cheaper way, exposed transfer or recomputation, fewest seconds per byte
freed first. The paper measures seconds; ours are the cost model's. It knows the GPU-main link and nothing slower.
"""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Decision, Plan, Recompute, Swap, Tier
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.eviction import all_kept, evict
from lohan_fx.policies.layout import IN_CORE, Layout
from lohan_fx.policies.traits import Trait, round_trip_s, traits


def order(problem: Problem, hw: HardwareProfile) -> list[tuple[str, Decision]]:
    """What leaves the device, in turn, as far as memory demands."""
    by_free_time = sorted(traits(problem), key=lambda t: t.idle_s - _trip_s(t, hw), reverse=True)
    hidden: list[tuple[str, Decision]] = []
    exposed: list[Trait] = []
    link_s = 0.0
    for trait in by_free_time:
        link_s += _trip_s(trait, hw)
        # Out in the forward and back in the backward: one link's work hides behind the compute of both.
        if trait.idle_s > _trip_s(trait, hw) and link_s <= problem.forward_s + problem.backward_s:
            hidden.append((trait.name, Swap(Tier.HOST)))
        else:
            link_s -= _trip_s(trait, hw)
            exposed.append(trait)
    exposed.sort(key=lambda t: _overhead_s(t, hw) / t.bytes)
    return hidden + [(t.name, _cheaper(t, hw)) for t in exposed]


def _trip_s(trait: Trait, hw: HardwareProfile) -> float:
    return round_trip_s(trait.bytes, Tier.HOST, hw)


def _cheaper(trait: Trait, hw: HardwareProfile) -> Decision:
    if trait.mandatory or _trip_s(trait, hw) < trait.recompute_s:
        return Swap(Tier.HOST)
    return Recompute()


def _overhead_s(trait: Trait, hw: HardwareProfile) -> float:
    return trait.recompute_s if isinstance(_cheaper(trait, hw), Recompute) else _trip_s(trait, hw)


def by_link_cost(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    """Capuchin's decision."""
    return evict(problem, layout, all_kept(problem), order(problem, hw))


ACTIVATIONS = "kept, swapped to host RAM or recomputed by link and recompute cost"
CAPUCHIN = IN_CORE.policy("capuchin", "Capuchin", ACTIVATIONS, by_link_cost)
