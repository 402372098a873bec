"""policies: who decides what, one file per system; the same graphs and the same runtime execute all of them."""

from __future__ import annotations

import difflib

from lohan_fx.policies.forced import IN_MEMORY, KEEP, RECOMPUTE, SWAP_HOST, SWAP_NVME
from lohan_fx.policies.lohan import LOHAN
from lohan_fx.policies.policy import Policy

ALL: tuple[Policy, ...] = (LOHAN, IN_MEMORY, KEEP, SWAP_HOST, SWAP_NVME, RECOMPUTE)
POLICIES = tuple(found.name for found in ALL)


def named(name: str) -> Policy:
    """The policy called ``name``; ``ValueError`` names close ones."""
    for found in ALL:
        if found.name == name:
            return found
    close = difflib.get_close_matches(str(name), POLICIES, n=3, cutoff=0.4)
    hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
    raise ValueError(f"unknown policy {name!r}{hint}: expected one of {', '.join(POLICIES)}")
