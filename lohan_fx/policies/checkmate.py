"""checkmate: keep or recompute, by integer programming; everything else is on the device (Checkmate, MLSys '20).

Mechanisms a3. Its own program also schedules when a value is computed again; here that is right before its use, as
everywhere in this compiler.
"""

from __future__ import annotations

from lohan_fx.plan import Keep
from lohan_fx.policies.layout import IN_CORE
from lohan_fx.policies.mixing import mixing

CHECKMATE = IN_CORE.policy("checkmate", "Checkmate", "kept or recomputed by MILP", mixing(Keep()))
