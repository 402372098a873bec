"""fuyou-no-overlap: Fuyou whose optimizer is a stage after the backward (Fuyou's ablation; mechanisms a1).

Gradients go to the drives and are read back; updates and the drives still overlap each other.
"""

from __future__ import annotations

from lohan_fx.cost_models import fuyou
from lohan_fx.plan import Tier
from lohan_fx.policies.fuyou import ACTIVATIONS, by_transfer_benefit
from lohan_fx.policies.layout import Layout

_LAYOUT = Layout(Tier.NVME, Tier.NVME, Tier.NVME)

FUYOU_NO_OVERLAP = _LAYOUT.policy(
    "fuyou-no-overlap", "Fuyou", ACTIVATIONS, by_transfer_benefit, formulas=(fuyou.NOT_OVERLAPPED,)
)
