"""angel-ptm: states on NVMe, the CPU's optimizer beside the backward and behind it, asynchronously (Angel-PTM, VLDB '23).

Mechanisms a3: out of LoHan's scope for its staleness. Planned as if each update were done in time, so that it can be
simulated; the tensors between blocks are kept and the rest recomputed.
"""

from __future__ import annotations

from lohan_fx.plan import Tier
from lohan_fx.policies.layout import STREAMED, checkpointing

ANGEL_PTM = STREAMED.policy(
    "angel-ptm",
    "Angel-PTM",
    "between blocks kept, the rest recomputed",
    checkpointing(Tier.DEVICE),
    optimizer="CPU, asynchronous",
    why_not="it is asynchronous: it computes with parameters of earlier steps, so its numbers are not plain PyTorch's",
)
