"""flashneuron: states on the device; activations go to the drives from the first layer on until the rest fits.

FlashNeuron (FAST '21), its linear selection, without its compression; nothing is recomputed. LoHan's prototype of it
moves through main memory, as ours does (mechanisms a1).
"""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.eviction import all_kept, evict
from lohan_fx.policies.layout import IN_CORE, Layout
from lohan_fx.policies.traits import traits


def _decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    del hw
    return evict(problem, layout, all_kept(problem), [(t.name, Swap(Tier.NVME)) for t in traits(problem)])


FLASHNEURON = IN_CORE.policy(
    "flashneuron", "FlashNeuron", "swapped to NVMe from the first layer on, until the rest fits", _decide
)
