"""contention: how fast jobs advance that use the same drives, cores and memory at the same moment.

- The drives are simplex: the jobs on them share their time equally. While some read and others write, everything on
  them is slowed to the measured mixed rate, where that is below what taking turns gives.
- Where the compute device is the CPU, compute has a thread per core and each busy lane one. The threads of an op have
  equal shares of it and wait for each other at its end: a lane that takes half of one core halves compute, whatever
  the other cores do meanwhile. A thread on a drive sleeps most of the time (O_DIRECT); what it needs for its requests
  it gets at once, and compute loses it. What compute keeps at least is missing to the drives: a request ends no sooner than
  it has had its processor time.
- Memory bandwidth is shared max-min fairly: who asks for less than a fair share gets what it asks for.

On CUDA compute has memory and cores of its own; the lanes share the host's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lohan_fx.hardware import HardwareProfile
from lohan_fx.simulation.event_clock import Job

LEAST_SHARE = 0.2
"""For compute, of what lanes leave it, however many requests to drives there are."""


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
        computing = any(job.cores > 1 for job in jobs if not job.drive)
        driving = share * sum(job.cores for job in jobs if job.drive)
        lanes = sum(1 for job in jobs if not job.drive and 0 < job.cores <= 1)
        beside = math.ceil(lanes / self.cores)
        core_share = 1 / (beside + computing) if lanes else 1.0
        compute_share = 1 / (1 + beside)
        most = (1 - LEAST_SHARE) * compute_share if computing else self.cores
        if driving > most:
            share *= most / driving
        compute_share -= min(driving, most)
        speeds = [
            share if job.drive else compute_share if job.cores > 1 else core_share if job.cores else 1.0 for job in jobs
        ]
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
