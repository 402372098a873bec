"""lohan-g10: LoHan with G10's decisions (LoHan Fig. 9a "+G10"; mechanisms a2): keep, or swap to the drive, by idle time.

Nothing is recomputed; states and optimizer are LoHan's.
"""

from __future__ import annotations

from lohan_fx.plan import Tier
from lohan_fx.policies.g10 import by_idle_time
from lohan_fx.policies.layout import STREAMED
from lohan_fx.policies.lohan import LOHAN

LOHAN_G10 = STREAMED.policy(
    "lohan-g10", "LoHan", "kept or swapped to NVMe by idle time", by_idle_time(Tier.NVME), formulas=LOHAN.formulas
)
