"""contention: how fast jobs advance that use the same drives, cores and memory at the same moment.

- The drives are simplex: the jobs on them share their time equally. While some read and others write, everything on
  them is slowed to the measured mixed rate, where that is below what taking turns gives.
- Where the compute device is the CPU, every thread that wants to run gets the same share of a core: compute has as
  many threads as there are cores, each busy lane one. A thread on a drive sleeps most of the time (O_DIRECT); what it
  needs for its requests it gets at once.
- Memory bandwidth is shared max-min fairly: who asks for less than a fair share gets what it asks for.

On CUDA compute has memory and cores of its own; the lanes share the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lohan_fx.event_clock import Job
from lohan_fx.hardware import HardwareProfile


@dataclass(frozen=True)
class Contention:
    """The machine's limits. ``mixed``: speed of the drives while reading and writing, against taking turns (at most 1)."""

    cores: float
    memory_bytes_per_s: float
    mixed: float

    @classmethod
    def of(cls, hw: HardwareProfile) -> Contention:
        mixed = 1.0
        if hw.nvme:
            turns = 2 / (1 / hw.ssd_read_bytes_per_s + 1 / hw.ssd_write_bytes_per_s)
            mixed = min(1.0, hw.ssd_mixed_bytes_per_s / turns)
        # Links of a CPU are copies in its memory, which may have been measured faster than the memory itself.
        memory = hw.host_memory_bytes_per_s
        if hw.device == "cpu":
            memory = max(memory, hw.memory_bytes_per_s)
        return cls(float(hw.cpu_cores), memory, mixed)

    def speeds(self, jobs: Sequence[Job]) -> list[float]:
        """Of each job, 1 being as fast as alone."""
        if len(jobs) == 1:
            return [1.0]
        drives = [job.drive for job in jobs if job.drive]
        share = 1.0
        if drives:
            share = (self.mixed if len(set(drives)) > 1 else 1.0) / len(drives)
        driving = share * sum(job.cores for job in jobs if job.drive)
        threads = sum(job.cores for job in jobs if not job.drive)
        core_share = min(1.0, max(self.cores - driving, 0.5) / threads) if threads else 1.0
        speeds = [share if job.drive else core_share if job.cores else 1.0 for job in jobs]
        asked = [speed * job.memory_bytes_per_s for speed, job in zip(speeds, jobs, strict=True)]
        if sum(asked) <= self.memory_bytes_per_s:
            return speeds
        given = fair_shares(asked, self.memory_bytes_per_s)
        return [
            speed * (got / wanted) if wanted else speed for speed, got, wanted in zip(speeds, given, asked, strict=True)
        ]


def fair_shares(asked: Sequence[float], limit: float) -> list[float]:
    """``limit`` divided max-min fairly: nobody gets more than asked, and what one leaves goes to the others."""
    given = [0.0] * len(asked)
    left = limit
    order = sorted(range(len(asked)), key=lambda index: asked[index])
    for place, index in enumerate(order):
        given[index] = min(asked[index], left / (len(order) - place))
        left -= given[index]
    return given
