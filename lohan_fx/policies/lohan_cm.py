"""lohan-cm: LoHan with Checkmate's way to decide: offload to main memory or recompute, by integer programming.

LoHan Fig. 9a "+CM", mechanisms a2; states and optimizer are LoHan's.
"""

from __future__ import annotations

from lohan_fx.plan import Swap, Tier
from lohan_fx.policies.layout import STREAMED
from lohan_fx.policies.lohan import LOHAN
from lohan_fx.policies.mixing import mixing

LOHAN_CM = STREAMED.policy(
    "lohan-cm", "LoHan", "swapped to host RAM or recomputed by MILP", mixing(Swap(Tier.HOST)), formulas=LOHAN.formulas
)
