"""stronghold: all states in main memory, the CPU's optimizer inside the backward, activations in main memory.

STRONGHOLD (SC '22) as LoHan's Table I and mechanisms a3 have it: synchronous, nothing is recomputed.
"""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Keep, Plan, Tier
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.eviction import all_kept
from lohan_fx.policies.layout import Layout, swap

_LAYOUT = Layout(Tier.HOST, Tier.HOST)


def _decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    del hw
    decisions = all_kept(problem)
    moved = {name: swap(problem, name, Tier.HOST) for name, d in decisions.items() if isinstance(d, Keep)}
    return layout.fitting(problem, {**decisions, **moved})


STRONGHOLD = _LAYOUT.policy("stronghold", "STRONGHOLD", "all swapped to host RAM", _decide)
