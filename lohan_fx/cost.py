"""cost: seconds of a training step from its work and the machine's rates.

LoHan Eq. 1-5 (mechanisms B2), corrected: swapped bytes that host RAM takes do not reach the SSD (Eq. 3 clamped), CPU
Adam is a term (Fuyou's T_o^comp), and so is the host's memory traffic (c3.9). The GPU link is duplex, the SSD
simplex. Where the compute device is the CPU, Adam and the model share its cores and count as one lane.
"""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Cost, Lane
from lohan_fx.plan import Stage

ADAM_TOUCHED_BYTES = 32
"""Bytes of host memory that one parameter's update moves: g16, p32, m, v read; p32, m, v, p16 written."""


@dataclass(frozen=True)
class Work:
    """What one training step does. Symbols of LoHan beside the names.

    ``fetched_*_bytes`` (2P, P16): parameters brought to the device per stage, ``*_nvme_bytes`` the part that comes
    from NVMe. ``swapped_bytes`` (A_G2M) leave in the forward and come back in the backward; ``swapped_nvme_bytes`` is
    what exceeds MEM_avail. ``state_*_bytes`` (12P read, 14P written) and ``adam_parameters``: of updates in the
    backward; ``late_*``: of those in a stage after it, whose gradients were written to NVMe as far as
    ``held_nvme_bytes`` says, and are read back there. ``serial_optimizer``: reads, updates and writes do not overlap
    (LoHan's naive handler).
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    fetched_forward_bytes: int
    fetched_forward_nvme_bytes: int
    fetched_backward_bytes: int
    fetched_backward_nvme_bytes: int
    swapped_bytes: int
    swapped_nvme_bytes: int
    gradient_bytes: int
    state_read_bytes: int
    state_write_bytes: int
    adam_parameters: int
    held_nvme_bytes: int = 0
    late_state_read_bytes: int = 0
    late_state_write_bytes: int = 0
    late_adam_parameters: int = 0
    serial_optimizer: bool = False

    @property
    def nvme_read_bytes(self) -> int:
        """Bytes that one step reads from NVMe."""
        fetched = self.fetched_forward_nvme_bytes + self.fetched_backward_nvme_bytes
        states = self.state_read_bytes + self.late_state_read_bytes + self.held_nvme_bytes
        return fetched + states + self.swapped_nvme_bytes

    @property
    def nvme_write_bytes(self) -> int:
        """Bytes that one step writes to NVMe."""
        states = self.state_write_bytes + self.late_state_write_bytes + self.held_nvme_bytes
        return states + self.swapped_nvme_bytes


def node_seconds(cost: Cost, hw: HardwareProfile, dtype_rate: float) -> float:
    """Seconds of one op: as measured, or its FLOPs at ``dtype_rate`` or its bytes at memory speed, whichever binds, and
    its launch."""
    if cost.lane is not Lane.COMPUTE or cost.is_view:
        return 0.0
    if cost.measured_s is not None:
        return cost.measured_s
    return max(cost.flops / dtype_rate, cost.touched_bytes / hw.memory_bytes_per_s) + hw.op_overhead_s


def forward_stage(work: Work, hw: HardwareProfile) -> Stage:
    """T_f of Eq. 4, per lane."""
    return Stage(
        {
            Lane.COMPUTE.value: work.forward_s,
            Lane.H2D.value: work.fetched_forward_bytes / hw.h2d_bytes_per_s,
            Lane.D2H.value: work.swapped_bytes / hw.d2h_bytes_per_s,
            Lane.SSD.value: ssd_seconds(work.fetched_forward_nvme_bytes, work.swapped_nvme_bytes, hw),
            Lane.CPU.value: 0.0,
        }
    )


def backward_stage(work: Work, hw: HardwareProfile) -> Stage:
    """T_b of Eq. 5, per lane, with the optimizer inside as far as it runs there."""
    adam_s = adam_seconds(work.adam_parameters, hw)
    shared = hw.device == "cpu"
    read = work.fetched_backward_nvme_bytes + work.swapped_nvme_bytes + work.state_read_bytes
    written = work.state_write_bytes + work.held_nvme_bytes
    waits_s = ssd_seconds(work.state_read_bytes, work.state_write_bytes, hw) if work.serial_optimizer else 0.0
    return Stage(
        {
            Lane.COMPUTE.value: work.backward_s + work.recompute_s + (adam_s if shared else 0.0),
            Lane.H2D.value: (work.fetched_backward_bytes + work.swapped_bytes) / hw.h2d_bytes_per_s,
            Lane.D2H.value: work.gradient_bytes / hw.d2h_bytes_per_s,
            Lane.SSD.value: ssd_seconds(read, written, hw),
            Lane.CPU.value: adam_s + waits_s,
        }
    )


def optimizer_stage(work: Work, hw: HardwareProfile) -> Stage:
    """The stage after the backward, per lane, for systems that update there; empty for the others."""
    if not work.late_adam_parameters:
        return Stage({})
    read = work.late_state_read_bytes + work.held_nvme_bytes
    return Stage(
        {
            Lane.SSD.value: ssd_seconds(read, work.late_state_write_bytes, hw),
            Lane.CPU.value: adam_seconds(work.late_adam_parameters, hw),
        }
    )


def step_seconds(work: Work, hw: HardwareProfile) -> float:
    """Seconds of all stages."""
    stages = (forward_stage(work, hw), backward_stage(work, hw), optimizer_stage(work, hw))
    return sum(stage.seconds for stage in stages)


def adam_seconds(parameters: int, hw: HardwareProfile) -> float:
    """Seconds of the CPU's updates: arithmetic, or the host's memory traffic (mechanisms c3.9)."""
    touched_s = parameters * ADAM_TOUCHED_BYTES / hw.host_memory_bytes_per_s
    return max(parameters / hw.adam_parameters_per_s, touched_s)


def ssd_seconds(read_bytes: int, write_bytes: int, hw: HardwareProfile) -> float:
    """Seconds of the drives for this traffic: simplex, and no faster than their measured mixed rate."""
    if not read_bytes and not write_bytes:
        return 0.0
    if not hw.nvme:
        return float("inf")
    one_way = read_bytes / hw.ssd_read_bytes_per_s + write_bytes / hw.ssd_write_bytes_per_s
    both = min(read_bytes, write_bytes) * 2 / hw.ssd_mixed_bytes_per_s
    rest = max(read_bytes - write_bytes, 0) / hw.ssd_read_bytes_per_s
    rest += max(write_bytes - read_bytes, 0) / hw.ssd_write_bytes_per_s
    return max(one_way, both + rest)
