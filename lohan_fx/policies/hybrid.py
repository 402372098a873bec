"""str: keep, swap to main memory or recompute, by integer programming; states on the device (STR, TPDS '23).

Mechanisms a3: a mix of offloading and recomputation, with states and optimizer in the device's memory.
"""

from __future__ import annotations

from lohan_fx.plan import Keep, Swap, Tier
from lohan_fx.policies.layout import IN_CORE
from lohan_fx.policies.mixing import mixing

STR = IN_CORE.policy("str", "STR", "kept, swapped to host RAM or recomputed by MILP", mixing(Keep(), Swap(Tier.HOST)))
