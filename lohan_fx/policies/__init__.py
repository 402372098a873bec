"""policies: who decides what, one file per system; the same graphs and the same runtime execute all of them.

``lohan_fx.policies()`` is the table of them: the name ``lohan_fx.policies`` is that function, this package is reached by
``from lohan_fx.policies import ...``.
"""

from __future__ import annotations

import difflib

from lohan_fx.policies.angel_ptm import ANGEL_PTM
from lohan_fx.policies.capuchin import CAPUCHIN
from lohan_fx.policies.checkmate import CHECKMATE
from lohan_fx.policies.flashneuron import FLASHNEURON
from lohan_fx.policies.forced import IN_MEMORY, KEEP, RECOMPUTE, SWAP_HOST, SWAP_NVME
from lohan_fx.policies.fuyou import FUYOU
from lohan_fx.policies.fuyou_no_overlap import FUYOU_NO_OVERLAP
from lohan_fx.policies.g10 import G10
from lohan_fx.policies.gemini import GEMINI
from lohan_fx.policies.hybrid import STR
from lohan_fx.policies.l2l import L2L
from lohan_fx.policies.lohan import LOHAN
from lohan_fx.policies.lohan_cap import LOHAN_CAP
from lohan_fx.policies.lohan_cm import LOHAN_CM
from lohan_fx.policies.lohan_cpuact import LOHAN_CPUACT
from lohan_fx.policies.lohan_ds import LOHAN_DS
from lohan_fx.policies.lohan_g10 import LOHAN_G10
from lohan_fx.policies.lohan_naive import LOHAN_NAIVE
from lohan_fx.policies.lohan_zero import LOHAN_ZERO
from lohan_fx.policies.policy import Policy
from lohan_fx.policies.stronghold import STRONGHOLD
from lohan_fx.policies.superneurons import SUPERNEURONS
from lohan_fx.policies.swapadvisor import SWAPADVISOR
from lohan_fx.policies.vdnn import VDNN
from lohan_fx.policies.zero_infinity import ZERO_INFINITY
from lohan_fx.policies.zero_offload import ZERO_OFFLOAD

FORCED: tuple[Policy, ...] = (IN_MEMORY, KEEP, SWAP_HOST, SWAP_NVME, RECOMPUTE)
ALL: tuple[Policy, ...] = (
    LOHAN,
    LOHAN_NAIVE,
    LOHAN_ZERO,
    LOHAN_CPUACT,
    LOHAN_DS,
    LOHAN_CAP,
    LOHAN_G10,
    LOHAN_CM,
    FUYOU,
    FUYOU_NO_OVERLAP,
    ZERO_INFINITY,
    ZERO_OFFLOAD,
    GEMINI,
    L2L,
    STRONGHOLD,
    ANGEL_PTM,
    G10,
    FLASHNEURON,
    CAPUCHIN,
    CHECKMATE,
    STR,
    SWAPADVISOR,
    VDNN,
    SUPERNEURONS,
    *FORCED,
)
POLICIES = tuple(found.name for found in ALL)


def named(name: str) -> Policy:
    """The policy called ``name``; ``ValueError`` names close ones."""
    for found in ALL:
        if found.name == name:
            return found
    close = difflib.get_close_matches(str(name), POLICIES, n=3, cutoff=0.4)
    hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
    raise ValueError(f"unknown policy {name!r}{hint}: expected one of {', '.join(POLICIES)}")


def runnable(name: str) -> Policy:
    """``named(name)``; ``ValueError`` also where this runtime cannot execute its plans, with the reason."""
    found = named(name)
    if not found.runs:
        raise ValueError(f"policy {name!r} is planned and simulated only: {found.why_not}")
    return found
