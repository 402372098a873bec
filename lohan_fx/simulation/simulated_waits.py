"""simulated_waits: why a simulated step takes longer than the formula: what compute waited for, and what came after it."""

from __future__ import annotations

from collections.abc import Mapping

from lohan_fx.runtime.timeline import STALL
from lohan_fx.simulation.simulated_machine import LAUNCHING
from lohan_fx.simulation.simulated_step import Simulation

WORTH_A_REASON = 0.1
"""Share of the formula's seconds by which the simulated ones may differ without a word."""
COMING_BACK, LEAVING = "activations to come back", "activations to leave the device"
_KINDS: Mapping[str, str] = {
    "fetch of": "parameters",
    "swap_in of": COMING_BACK,
    "swap window": LEAVING,
    "gradient window": "gradients to leave the device, whose updates are behind",
    LAUNCHING: "kernels to be launched by Python, which the lanes use too",
}
TAIL = "updates after the backward"


def waits_s(simulation: Simulation) -> dict[str, float]:
    """What compute waited for -> seconds, the longest first; and the updates that were left when the backward ended."""
    found: dict[str, float] = {TAIL: simulation.tail_s}
    for event in simulation.events:
        if not event.is_stall:
            continue
        label = event.label.removeprefix(STALL)
        kind = next((text for start, text in _KINDS.items() if label.startswith(start)), "the optimizer")
        found[kind] = found.get(kind, 0.0) + event.end_s - event.start_s
    return dict(sorted(((kind, s) for kind, s in found.items() if s > 0), key=lambda item: -item[1]))
