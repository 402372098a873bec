"""lohan-ds: LoHan with DeepSpeed's activations (LoHan Fig. 9a "+DS"; "+ZeRO" in its text; mechanisms a2).

Exactly the tensors between blocks go to main memory, everything else is recomputed; states and optimizer are LoHan's.
"""

from __future__ import annotations

from lohan_fx.plan import Tier
from lohan_fx.policies.layout import STREAMED, checkpointing
from lohan_fx.policies.lohan import LOHAN

LOHAN_DS = STREAMED.policy(
    "lohan-ds",
    "LoHan",
    "between blocks swapped to host RAM, the rest recomputed",
    checkpointing(Tier.HOST),
    formulas=LOHAN.formulas,
)
