"""lohan: LoHan's own policy with this project's corrections (LoHan IV-C, IV-D; mechanisms B2-B4)."""

from __future__ import annotations

from lohan_fx.cost_models import lohan
from lohan_fx.planning.joint_search import joint_search
from lohan_fx.policies.policy import Policy

LOHAN: Policy = Policy(
    name="lohan",
    source="LoHan",
    parameters="NVMe, what fits in memory",
    states="NVMe, what fits in host RAM",
    activations="kept, swapped to host or NVMe, or recomputed, by benefit",
    optimizer="CPU, in the backward",
    decide=joint_search,
    formulas=(lohan.LITERAL, lohan.OF_A_MODEL),
)
