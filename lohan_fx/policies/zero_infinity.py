"""zero-infinity: all states on NVMe, the optimizer on the CPU in a stage after the backward (ZeRO-Infinity, SC '21).

As LoHan and Fuyou measured it (mechanisms a1): gradients go to NVMe and are read back; the tensors between blocks go to
main memory, never to the drives, and everything else is recomputed; next to nothing overlaps, so no transfer starts
before it is needed.
"""

from __future__ import annotations

from lohan_fx.cost_models import zero_infinity
from lohan_fx.plan import Tier
from lohan_fx.policies.layout import Layout, checkpointing

_LAYOUT = Layout(Tier.NVME, Tier.NVME, Tier.NVME, prefetches=False)

ZERO_INFINITY = _LAYOUT.policy(
    "zero-infinity",
    "ZeRO-Infinity",
    "between blocks swapped to host RAM, the rest recomputed",
    checkpointing(Tier.HOST),
    formulas=(zero_infinity.MODEL,),
)
