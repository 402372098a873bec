"""max_model: the largest model of a kind, by the papers' protocol: what the policy's own system could train, and what we can.

The protocol (L-EX-01): batch 1, main memory limited to what is given, no swapping by the operating system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lohan_fx.forecasting.forecast import Asked
from lohan_fx.forecasting.system_memory import MEMORY, Needed
from lohan_fx.models.model_families import Family, ModelDims
from lohan_fx.models.model_presets import MODELS
from lohan_fx.models.transformer_counts import TransformerCounts
from lohan_fx.policies import named
from lohan_fx.reporting.plan_table import table
from lohan_fx.units import format_bytes

BATCH = 1
TOKENS = 1024
"""Per sample, as in the papers, where none are asked for."""


@dataclass(frozen=True)
class SystemRow:
    """What the system needs for one model, at ``tokens`` a sample. ``short``: tier -> bytes missing; empty where it fits."""

    model: str
    tokens: int
    needed: Needed
    short: dict[str, float]


@dataclass(frozen=True)
class SystemLimit:
    """What the system of ``policy`` could train in so many bytes, ``nvme_bytes`` of them on drives; ``rows`` by size, none
    where the papers say too little of its memory, or do not have it."""

    policy: str
    device_bytes: int
    host_bytes: int
    nvme_bytes: int
    rows: tuple[SystemRow, ...]

    @property
    def largest(self) -> str | None:
        fitting = [row.model for row in self.rows if not row.short]
        return fitting[-1] if fitting else None


def relatives(name: str, dims: ModelDims | None, seq: int | None = None) -> list[ModelDims]:
    """The presets of the same kind (``gpt3-``, ``dit-``, ..) as the model ``name`` that take ``seq`` tokens a sample, by size.

    Raises ``ValueError`` where ``name`` is no preset, or where no model of the kind takes so many.
    """
    if dims is None:
        raise ValueError(f"--max-model needs a preset, whose kind it looks through: {name} is none; --list shows them")
    kind = name.split("-")[0]
    found = [d for d in MODELS.values() if d.name.split("-")[0] == kind]
    taking = [d for d in found if seq is None or (seq == d.tokens if d.family is Family.DIT else seq <= d.positions)]
    if not taking:
        lengths = sorted({d.tokens if d.family is Family.DIT else d.positions for d in found})
        raise ValueError(
            f"--seq is {seq}: no {kind} takes so many tokens; they take {'' if dims.family is Family.DIT else 'at most '}"
            f"{', '.join(map(str, lengths))}"
        )
    return sorted(taking, key=lambda dims: dims.parameters)


def system_limit(models: Sequence[ModelDims], asked: Asked, seq: int | None) -> SystemLimit:
    """Which of ``models``, in order of size, the system of ``asked.policy`` trains, on all memory of the machine unless
    less is asked for."""
    host = asked.host_memory_bytes or asked.hw.host_memory_bytes
    device = asked.device_memory_bytes or asked.hw.device_memory_bytes
    nvme = sum(drive.capacity_bytes for drive in asked.hw.nvme)
    memory = MEMORY.get(asked.policy)
    if memory is None:
        return SystemLimit(asked.policy, device, host, nvme, ())
    rows = []
    for dims in models:
        tokens = dims.tokens if dims.family is Family.DIT else min(seq or TOKENS, dims.positions)
        needed = memory.needs(TransformerCounts(dims, BATCH, tokens))
        rows.append(SystemRow(dims.name, tokens, needed, needed.short(device, host, nvme)))
    return SystemLimit(asked.policy, device, host, nvme, tuple(rows))


def limit_text(limit: SystemLimit) -> str:
    """A line per model, and the largest that fits; without a newline at the end."""
    source = named(limit.policy).source
    if source == "ours":
        return f"no paper has {limit.policy}, which is ours: it has no limit of its own to tell"
    if not limit.rows:
        return f"the papers say too little of the memory that {limit.policy} ({source}) itself needs to tell its limit"
    lines = []
    for row in limit.rows:
        missing = ", ".join(f"{format_bytes(int(nbytes))} of {tier}" for tier, nbytes in row.short.items())
        needed = row.needed
        sizes = [format_bytes(int(n)) for n in (needed.device_bytes, needed.host_bytes, needed.nvme_bytes)]
        lines.append([f"  {row.model}", *sizes, f"no: {missing} missing" if row.short else "yes"])
    lengths = sorted({row.tokens for row in limit.rows})
    tokens = f"{lengths[0]} to {lengths[-1]}" if len(lengths) > 1 else f"{lengths[0]}"
    title = f"{source} itself"
    return "\n".join(
        [
            f"by the papers' protocol (batch {BATCH}, {tokens} tokens, {format_bytes(limit.host_bytes)} of main memory, "
            f"{format_bytes(limit.device_bytes)} of the device's, {format_bytes(limit.nvme_bytes)} on drives), what "
            f"{limit.policy} itself needs",
            *table([title, "device", "host", "nvme", "fits"], lines, left=(0, 4)),
            f"\nlargest by {source} itself: {limit.largest or 'none of them'}",
        ]
    )


def limit_data(limit: SystemLimit) -> dict[str, Any]:
    """The same as JSON-ready data."""
    return {
        "policy": limit.policy,
        "source": named(limit.policy).source,
        "known": bool(limit.rows),
        "largest": limit.largest,
        "memory_bytes": {"device": limit.device_bytes, "host": limit.host_bytes, "nvme": limit.nvme_bytes},
        "rows": [
            {
                "case": row.model,
                "tokens": row.tokens,
                "fits": not row.short,
                "device_bytes": row.needed.device_bytes,
                "host_bytes": row.needed.host_bytes,
                "nvme_bytes": row.needed.nvme_bytes,
            }
            for row in limit.rows
        ],
    }
