"""vdnn: states on the device; the inputs of compute-heavy layers are swapped to main memory (vDNN, MICRO '16).

vDNN_conv: what a convolution, a matmul or an attention reads leaves, whether or not memory demands it; nothing is
recomputed. Where that does not fit, vDNN_all: everything leaves, in the order of the layers.
"""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.eviction import all_kept, evict
from lohan_fx.policies.layout import IN_CORE, Layout
from lohan_fx.policies.traits import heavy_inputs, traits


def _decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    del hw
    found, inputs = traits(problem), heavy_inputs(problem)
    static = {t.name: Swap(Tier.HOST) for t in found if t.name in inputs}
    rest = [(t.name, Swap(Tier.HOST)) for t in found if t.name not in inputs]
    return evict(problem, layout, {**all_kept(problem), **static}, rest)


VDNN = IN_CORE.policy("vdnn", "vDNN", "inputs of matmuls and convolutions swapped to host RAM, the rest kept", _decide)
