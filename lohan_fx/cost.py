"""cost: seconds of a training step from its work and the machine's rates.

LoHan Eq. 1-5 (mechanisms B2), corrected: swapped bytes that host RAM takes do not reach the SSD (Eq. 3 clamped), CPU
Adam is a term (Fuyou's T_o^comp), and so is the host's memory traffic (c3.9). The GPU link is duplex, the SSD
simplex. Where the compute device is the CPU, Adam and the model share its cores and count as one lane. The numbers are
those of ``cost_models.lohan.CORRECTED``, so that the formula that is printed is what is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lohan_fx.cost_models import lohan
from lohan_fx.cost_models.lohan import ADAM_TOUCHED_BYTES, STATE_BYTES
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Cost, Lane
from lohan_fx.plan import PYTHON_LANE, Stage, Tier

__all__ = [
    "ADAM_TOUCHED_BYTES",
    "NO_DRIVE",
    "STATE_BYTES",
    "Work",
    "backward_stage",
    "coming_back_s",
    "forward_stage",
    "handover_s",
    "lane_update_s",
    "node_seconds",
    "optimizer_stage",
    "ssd_seconds",
    "step_seconds",
    "update_s",
    "values",
]

NO_DRIVE = math.ulp(0.0)
"""Bytes/s of a drive that is not there: what is sent to it takes infinitely long, nothing takes no time."""


@dataclass(frozen=True)
class Work:
    """What one training step does; LoHan's symbols in brackets. Of pairs of fields the forward's comes first.

    Updates run in the backward (no prefix), after it (``late_``: their gradients come last, or the plan has a stage for them), or
    beside the next forward (``next_``, which the step before left); ``repeated_``: made a second time, beside the backward.
    """

    # Seconds of compute, as if nothing else ran.
    forward_s: float
    backward_s: float
    recompute_s: float
    """Of the backward, and not in ``backward_s``."""

    # Parameters brought to the device (P16), and what of them comes from NVMe.
    fetched_forward_bytes: int
    fetched_forward_nvme_bytes: int
    fetched_backward_bytes: int
    fetched_backward_nvme_bytes: int

    # Activations (A_G2M): they leave in the forward and come back in the backward.
    swapped_bytes: int
    swapped_nvme_bytes: int
    """What exceeds MEM_avail."""

    # Gradients, and the updates in the backward: 12 bytes a parameter read, 14 written.
    gradient_bytes: int
    state_read_bytes: int
    state_write_bytes: int
    adam_parameters: int

    # The ends of the forward (``Bound``): what it waits for before it computes, what the drives have moved when the last fetch
    # is there, and what is computed behind that.
    first_fetched_nvme_bytes: int = 0
    fetches_read_bytes: int = 0
    fetches_written_bytes: int = 0
    behind_fetches_s: float = 0.0

    by_lane: int = 0
    """Of ``adam_parameters``: those that a lane's thread updates, not the compute device in its own memory."""
    held_nvme_bytes: int = 0
    """Gradients of late updates that wait on NVMe."""
    late_state_read_bytes: int = 0
    late_state_write_bytes: int = 0
    late_adam_parameters: int = 0
    late_by_lane: int = 0

    # The end of the backward: what the drives move for updates, behind so many seconds of it.
    updates_read_bytes: int = 0
    updates_written_bytes: int = 0
    before_updates_s: float = 0.0

    # Updates in the backward for which compute waits, after so many seconds that hide them.
    blocking_read_bytes: int = 0
    blocking_write_bytes: int = 0
    blocking_by_lane: int = 0
    blocking_hidden_s: float = 0.0

    coming_back_s: float = 0.0
    """What compute waits for activations that are needed back sooner than they can be (``coming_back_s``, each by itself)."""

    next_held_nvme_bytes: int = 0
    next_state_read_bytes: int = 0
    next_state_write_bytes: int = 0
    next_adam_parameters: int = 0
    repeated_held_nvme_bytes: int = 0
    repeated_state_bytes: int = 0
    """Read again beside the backward, and written."""

    serial_optimizer: bool = False
    """Reads, updates and writes do not overlap (LoHan's naive handler)."""

    # Parameters that stay on a GPU and are updated by the CPU, which copies them back.
    returned_bytes: int = 0
    late_returned_bytes: int = 0
    next_returned_bytes: int = 0

    # Reads and writes of the drives, each of which takes processor time on a CPU.
    forward_requests: float = 0
    backward_requests: float = 0

    # Beside a GPU: ops that a thread launches, and jobs of the lanes, which take the interpreter from it.
    forward_launches: int = 0
    backward_launches: int = 0
    forward_jobs: int = 0
    backward_jobs: int = 0

    @property
    def nvme_read_bytes(self) -> int:
        """Bytes that one step reads from NVMe."""
        fetched = self.fetched_forward_nvme_bytes + self.fetched_backward_nvme_bytes
        states = self.state_read_bytes + self.late_state_read_bytes + self.next_state_read_bytes
        again = self.repeated_state_bytes + self.repeated_held_nvme_bytes
        return fetched + states + again + self.held_nvme_bytes + self.next_held_nvme_bytes + self.swapped_nvme_bytes

    @property
    def nvme_write_bytes(self) -> int:
        """Bytes that one step writes to NVMe."""
        states = self.state_write_bytes + self.late_state_write_bytes + self.next_state_write_bytes
        held = self.held_nvme_bytes + self.next_held_nvme_bytes
        return states + self.repeated_state_bytes + held + self.swapped_nvme_bytes


def node_seconds(cost: Cost, hw: HardwareProfile, dtype_rate: float) -> float:
    """Seconds of one op: as measured, or its FLOPs at ``dtype_rate`` or its bytes at memory speed, whichever binds, and
    its launch; and what the kernel takes to clear its memory."""
    cleared_s = cost.cleared_bytes * hw.clearing_s_per_byte
    if cost.measured_s is not None:
        return cost.measured_s + cleared_s
    if cost.lane is not Lane.COMPUTE or cost.is_view:
        return 0.0
    return max(cost.flops / dtype_rate, cost.touched_bytes / hw.memory_bytes_per_s) + hw.op_overhead_s + cleared_s


def handover_s(hw: HardwareProfile) -> float:
    """Seconds that compute loses by handing a transfer over: none beside a GPU, which computes on meanwhile."""
    return hw.handover_s if hw.device == "cpu" else 0.0


def coming_back_s(hw: HardwareProfile, nbytes: int, tier: Tier, away_s: float) -> float:
    """Seconds that compute waits for an activation swapped to ``tier`` that it needs back after ``away_s``: nothing of it is
    read before all of it is written. Pieces of it pass from lane to lane, of which the slower one counts."""
    ways = [(hw.d2h_bytes_per_s, hw.ssd_write_bytes_per_s), (hw.h2d_bytes_per_s, hw.ssd_read_bytes_per_s)]
    if hw.device == "cpu":
        ways[1] = (math.inf, hw.ssd_read_bytes_per_s)  # read to where it belongs
    rates = [link if tier is Tier.HOST else min(link, drives or NO_DRIVE) for link, drives in ways]
    return max(0.0, sum(nbytes / rate for rate in rates) - away_s)


def values(work: Work, hw: HardwareProfile) -> dict[str, float]:
    """What the symbols of ``cost_models.lohan.CORRECTED`` stand for."""
    serial = work.serial_optimizer
    return {
        **vars(work),
        **(_without_copies(work) if hw.device == "cpu" else {}),
        "serial_read_bytes": work.state_read_bytes if serial else 0,
        "serial_write_bytes": work.state_write_bytes if serial else 0,
        "late_serial_read_bytes": work.late_state_read_bytes if serial else 0,
        "late_serial_write_bytes": work.late_state_write_bytes if serial else 0,
        "next_serial_read_bytes": work.next_state_read_bytes if serial else 0,
        "next_serial_write_bytes": work.next_state_write_bytes if serial else 0,
        "adam_on_device": 1 if hw.device == "cpu" else 0,
        "cores_beside_adam": hw.cpu_cores - 1 if hw.device == "cpu" else 0,
        "io_core_s_per_request": hw.io_core_s_per_request if hw.device == "cpu" else 0.0,
        "io_core_s_per_byte": hw.io_core_s_per_byte if hw.device == "cpu" else 0.0,
        "op_overhead_s": hw.op_overhead_s,
        "interpreter_s_per_job": hw.interpreter_s_per_job,
        "h2d_bytes_per_s": hw.h2d_bytes_per_s,
        "d2h_bytes_per_s": hw.d2h_bytes_per_s,
        "adam_parameters_per_s": hw.adam_parameters_per_s,
        "host_memory_bytes_per_s": hw.host_memory_bytes_per_s,
        **_drive_rates(hw),
    }


def _without_copies(work: Work) -> dict[str, float]:
    """On a CPU the drives reach the device's memory, and gradients are updated where they are (``device_link``)."""
    return {
        "fetched_forward_bytes": work.fetched_forward_bytes - work.fetched_forward_nvme_bytes,
        # The formula adds what was swapped, of which only the host's part is copied back.
        "fetched_backward_bytes": work.fetched_backward_bytes
        - work.fetched_backward_nvme_bytes
        - work.swapped_nvme_bytes,
        "gradient_bytes": 0,
        **dict.fromkeys(("returned_bytes", "late_returned_bytes", "next_returned_bytes"), 0),
    }


def forward_stage(work: Work, hw: HardwareProfile) -> Stage:
    """T_f of Eq. 4, per lane, with what the step before left of the optimizer."""
    return _stage("forward", work, hw)


def backward_stage(work: Work, hw: HardwareProfile) -> Stage:
    """T_b of Eq. 5, per lane, with the optimizer inside as far as it runs there."""
    return _stage("backward", work, hw)


def optimizer_stage(work: Work, hw: HardwareProfile) -> Stage:
    """What is left when the backward has ended, per lane: late updates; empty where there are none."""
    return _stage("optimizer", work, hw) if work.late_adam_parameters else Stage({})


def step_seconds(work: Work, hw: HardwareProfile) -> float:
    """Seconds of all stages."""
    return lohan.CORRECTED.seconds(values(work, hw))


def update_s(parameters: int, hw: HardwareProfile) -> float:
    """Seconds in which all cores update ``parameters``: ``cost_models.lohan.adam`` in numbers."""
    return max(parameters / hw.adam_parameters_per_s, ADAM_TOUCHED_BYTES * parameters / hw.host_memory_bytes_per_s)


def lane_update_s(parameters: int, hw: HardwareProfile) -> float:
    """Seconds in which a lane's thread updates ``parameters``: on a CPU that computes it has one core."""
    longer_s = (hw.cpu_cores - 1) * parameters / hw.adam_parameters_per_s if hw.device == "cpu" else 0.0
    return update_s(parameters, hw) + longer_s


def ssd_seconds(read_bytes: int, write_bytes: int, hw: HardwareProfile) -> float:
    """Seconds of the drives for this traffic: simplex, and no faster than their measured mixed rate."""
    return lohan.DRIVES.seconds({"read_bytes": read_bytes, "write_bytes": write_bytes, **_drive_rates(hw)})


def _stage(name: str, work: Work, hw: HardwareProfile) -> Stage:
    lanes_s = lohan.CORRECTED.evaluate(values(work, hw))[name]
    if hw.device == "cpu":  # where compute itself is what launches
        lanes_s.pop(PYTHON_LANE, None)
    return Stage(lanes_s)


def _drive_rates(hw: HardwareProfile) -> dict[str, float]:
    return {
        "ssd_read_bytes_per_s": hw.ssd_read_bytes_per_s or NO_DRIVE,
        "ssd_write_bytes_per_s": hw.ssd_write_bytes_per_s or NO_DRIVE,
        "ssd_mixed_bytes_per_s": hw.ssd_mixed_bytes_per_s or math.inf,
    }
