"""A machine for simulations by hand: a second per page on every lane, and no contention."""

from __future__ import annotations

import dataclasses
from typing import Any

from lohan_fx import simulate
from lohan_fx.hardware import HardwareProfile, NvmeProfile
from lohan_fx.meta import Cost
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from lohan_fx.simulation.simulator import Simulation
from tests.passes import graphs
from tests.passes.graphs import Captured, rewrite

PAGE = 4096
DECISIONS: tuple[Decision, ...] = (Keep(), Recompute(), Swap(Tier.NVME), Swap(Tier.HOST))


def drive(read: float, write: float, mixed: float | None = None) -> NvmeProfile:
    """Without ``mixed``, reading and writing at once is as fast as taking turns."""
    return NvmeProfile("", read, write, mixed or 2 / (1 / read + 1 / write), 1 << 40)


def machine(**changes: Any) -> HardwareProfile:
    """A machine without contention: a second per page on every lane, two for writing one to a drive."""
    known: dict[str, Any] = {
        "name": "by hand",
        "device": "cuda",
        "device_name": "by hand",
        "cpu_name": "by hand",
        "cpu_cores": 1000,
        "matmul_flops_per_s": {"float32": 1.0},
        "memory_bytes_per_s": 1e12,
        "host_memory_bytes_per_s": 1e12,
        "h2d_bytes_per_s": PAGE,
        "d2h_bytes_per_s": PAGE,
        "adam_parameters_per_s": PAGE / 4,
        "device_memory_bytes": 1 << 40,
        "host_memory_bytes": 1 << 40,
        "nvme": (drive(PAGE, PAGE / 2),),
        "op_overhead_s": 1e-9,
        "measured_at": "",
        "versions": {},
        "machine": "",
        "io_core_s_per_request": 1e-12,
        "io_core_s_per_byte": 1e-15,
        "interpreter_s_per_job": 1e-12,
    }
    return HardwareProfile(**{**known, **changes})


def second_each(found: Cost) -> float:
    return 0.0 if found.is_view else 1.0


def windows(**changes: int) -> Any:
    return dataclasses.replace(graphs.WINDOWS, **changes)


def lane(found: Simulation, name: str) -> list[tuple[str, float, float]]:
    """Label, start and end of each job, without the little that requests to the drive take from the processor."""
    return [(e.label, round(e.start_s, 6), round(e.end_s, 6)) for e in found.events if e.lane == name]


def run(found: Captured, plan: Plan, hw: HardwareProfile, seconds: Any = second_each) -> Simulation:
    plan = dataclasses.replace(plan, device=hw.device)
    return simulate(rewrite(found, plan), plan, hw, node_seconds=seconds)
