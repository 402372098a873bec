"""l2l: layer by layer: all states in main memory, and every transfer starts when it is needed (L2L, Pudipeddi et al. '20).

Fuyou's Table 1 (mechanisms a3): activations to main memory, no overlap, synchronous. Inside a layer everything is
recomputed from what entered it.
"""

from __future__ import annotations

import dataclasses

from lohan_fx.plan import Tier
from lohan_fx.policies.layout import IN_HOST, checkpointing

_LAYOUT = dataclasses.replace(IN_HOST, prefetches=False)

L2L = _LAYOUT.policy("l2l", "L2L", "between blocks swapped to host RAM, the rest recomputed", checkpointing(Tier.HOST))
