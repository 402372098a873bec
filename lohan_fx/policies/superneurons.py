"""superneurons: cheap layers are recomputed, the outputs of heavy ones cached on the device (SuperNeurons, PPoPP '18).

Outputs of matmuls, convolutions and attention (its checkpoints), and what must be saved, stay on the device; the least
recently used go to main memory where they do not fit. States are on the device (LoHan; Fuyou lists them on the CPU).
"""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Keep, Plan, Swap, Tier
from lohan_fx.planning.plan_builder import saving
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.eviction import evict
from lohan_fx.policies.layout import IN_CORE, Layout
from lohan_fx.policies.traits import traits


def _decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    del hw
    found = problem.activations
    heavy = {name for name, activation in found.activations.items() if found.flops[activation.producer] > 0}
    decisions = saving(problem, heavy | found.mandatory, Keep())
    idle_s = {t.name: t.idle_s for t in traits(problem)}
    checkpoints = [name for name, d in decisions.items() if isinstance(d, Keep) and name in idle_s]
    least_recent = sorted(checkpoints, key=lambda name: idle_s[name], reverse=True)
    return evict(problem, layout, decisions, [(name, Swap(Tier.HOST)) for name in least_recent])


SUPERNEURONS = IN_CORE.policy(
    "superneurons",
    "SuperNeurons",
    "heavy layers' outputs kept, then swapped to host RAM (LRU); the rest recomputed",
    _decide,
)
