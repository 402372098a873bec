"""zero-offload: all states and gradients in main memory, the CPU's optimizer after the backward (ZeRO-Offload, ATC '21).

As the papers measured it (mechanisms a1): its delayed update is off, so it is synchronous, and gradients leave beside the
backward. The tensors between blocks go to main memory, as LoHan says; Fuyou 2.2 leaves them on the device.
"""

from __future__ import annotations

from lohan_fx.cost_models import zero_offload
from lohan_fx.plan import Tier
from lohan_fx.policies.layout import IN_HOST, checkpointing

ZERO_OFFLOAD = IN_HOST.policy(
    "zero-offload",
    "ZeRO-Offload",
    "between blocks swapped to host RAM, the rest recomputed",
    checkpointing(Tier.HOST),
    formulas=(zero_offload.MEASURED, zero_offload.LSP_EQ1),
)
