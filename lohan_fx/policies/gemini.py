"""gemini: Colossal-AI with Gemini: parameters and gradients in main memory, optimizer states on NVMe.

Mechanisms a1: the tensors between blocks stay on the device, the rest is recomputed, nothing of them is offloaded; the
CPU's optimizer runs after the backward. (Fuyou's configuration; LoHan says only that states are on the drives.)
"""

from __future__ import annotations

from lohan_fx.cost_models import gemini
from lohan_fx.plan import Tier
from lohan_fx.policies.layout import Layout, checkpointing

_LAYOUT = Layout(Tier.HOST, Tier.NVME, Tier.HOST)

GEMINI = _LAYOUT.policy(
    "gemini",
    "Colossal-AI",
    "between blocks kept, the rest recomputed",
    checkpointing(Tier.DEVICE),
    formulas=(gemini.MODEL,),
)
