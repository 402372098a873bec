"""disk_space: what a training takes of its drives, and what its checkpoints take; padding aside."""

from __future__ import annotations

from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import SUM_BYTES, Plan, Swap, Tier
from lohan_fx.runtime.striping import most_bytes
from lohan_fx.units import format_bytes


def stored_bytes(plan: Plan) -> int:
    """Masters, moments and copies of all parameters: what the store has room for wherever they live, and what each checkpoint
    that is kept takes once more (docs/0010). A frozen parameter counts once."""
    copies = sum(p.bytes for p in plan.parameters if not p.trainable or p.bytes != 4 * p.numel)
    return copies + sum(12 * p.numel for p in plan.parameters if p.trainable)


def disk_bytes(plan: Plan, checkpoints: int = 0) -> int:
    """Bytes that the store of ``plan`` takes with room for the last ``checkpoints``."""
    return (1 + checkpoints) * stored_bytes(plan) + _passing_bytes(plan)


def capacity_bytes(hw: HardwareProfile) -> tuple[int, int]:
    """(bytes, drive): how large a store may be that is striped over the drives of ``hw``, of which there is one at least, and
    which of them is full then."""
    return most_bytes([drive.capacity_bytes for drive in hw.nvme], [drive.stripe_weight for drive in hw.nvme])


def endurance_bytes(hw: HardwareProfile, times: int) -> int:
    """What a store may write until the first drive of ``hw`` has been written in full so many times."""
    whole = [times * (drive.drive_bytes or drive.capacity_bytes) for drive in hw.nvme]
    return most_bytes(whole, [drive.stripe_weight for drive in hw.nvme])[0]


def _passing_bytes(plan: Plan) -> int:
    """What a step puts there and reads again, activations once for each forward that waits: no checkpoint keeps it."""
    gradients = sum(SUM_BYTES * p.numel for p in plan.parameters if p.gradient_home is Tier.NVME)
    return gradients + plan.forwards * plan.bytes_of(Swap(Tier.NVME))


def disk_text(plan: Plan, checkpoints: int) -> str:
    """What of the store's bytes is for what, and what a checkpoint would take where there is no room for any yet."""
    states, passing = stored_bytes(plan), _passing_bytes(plan)
    parts = [f"{format_bytes(states)} for parameters and states"]
    if passing:
        parts.append(f"{format_bytes(passing)} for activations and gradients")
    if not checkpoints:
        return f"{', '.join(parts)}; each checkpoint that is kept takes {format_bytes(states)} more"
    last = "checkpoint" if checkpoints == 1 else f"{checkpoints} checkpoints"
    return ", ".join([*parts, f"{format_bytes(checkpoints * states)} more for the last {last}"])
