"""contention: shares of drives, cores and memory, by hand and as properties."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.hardware import HardwareProfile
from lohan_fx.simulation.contention import Contention, fair_shares
from lohan_fx.simulation.event_clock import ALL_CORES, Job

MACHINE = Contention(cores=2.0, memory_bytes_per_s=100.0, mixed=0.5)


def job(*, drive: str = "", cores: float = 0.0, memory: float = 0.0) -> Job:
    return Job("lane", "", 1.0, drive=drive, cores=cores, memory_bytes_per_s=memory)


def test_alone_everything_is_as_fast_as_it_can_be() -> None:
    assert MACHINE.speeds([job(cores=8, memory=1e9)]) == [1.0]


def test_drives_are_shared_and_slower_where_reads_meet_writes() -> None:
    assert MACHINE.speeds([job(drive="read")] * 2) == [0.5, 0.5]
    assert MACHINE.speeds([job(drive="read"), job(drive="write")]) == [0.25, 0.25]
    assert MACHINE.speeds([job(drive="read"), job()]) == [1.0, 1.0]


def test_a_lane_on_one_core_holds_up_compute_on_all() -> None:
    """Compute with 2 threads and a lane with 1 on 2 cores: half of a core each, and the other core waits."""
    assert MACHINE.speeds([job(cores=2), job(cores=1)]) == pytest.approx([1 / 2, 1 / 2])
    assert MACHINE.speeds([job(cores=2), job(cores=1), job(cores=1)]) == pytest.approx([1 / 2, 1 / 2, 1 / 2])
    assert MACHINE.speeds([job(cores=2), *[job(cores=1)] * 3]) == pytest.approx([1 / 3] * 4)
    assert MACHINE.speeds([job(cores=1), job(cores=1)]) == [1.0, 1.0]


def test_a_request_to_a_drive_takes_its_processor_time_from_the_others() -> None:
    assert MACHINE.speeds([job(cores=2), job(drive="read", cores=0.2)]) == pytest.approx([0.8, 1.0])


@given(
    st.lists(st.floats(0.01, 9.0), min_size=1, max_size=3),
    st.integers(0, 3),
    st.sampled_from([1.0, 2.0, 8.0]),
    st.booleans(),
)
def test_no_processor_time_of_a_request_is_lost(asked: list[float], lanes: int, cores: float, writes: bool) -> None:
    """What the drives take compute does not get, also where requests need the processor for longer than the drive."""
    drives = [job(drive="write" if writes and not place else "read", cores=each) for place, each in enumerate(asked)]
    machine = dataclasses.replace(MACHINE, cores=cores)
    compute, *others = machine.speeds([job(cores=ALL_CORES), *[job(cores=1)] * lanes, *drives])
    taken = sum(speed * each for speed, each in zip(others[lanes:], asked, strict=True))
    (alone, *_) = machine.speeds([job(cores=ALL_CORES), *[job(cores=1)] * lanes])
    assert compute + taken == pytest.approx(alone)
    assert compute > 0 and all(speed > 0 for speed in others)


def test_without_compute_drives_have_all_cores() -> None:
    assert MACHINE.speeds([job(drive="read", cores=2)] * 2) == [0.5, 0.5]
    assert MACHINE.speeds([job(drive="read", cores=8)] * 2) == [0.125, 0.125]


def test_memory_is_shared_fairly() -> None:
    """Who asks for little gets it; the others divide the rest."""
    assert MACHINE.speeds([job(memory=10), job(memory=90), job(memory=90)]) == pytest.approx([1.0, 0.5, 0.5])
    assert MACHINE.speeds([job(memory=200), job()]) == [0.5, 1.0]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=8), st.floats(1, 1e6))
def test_fair_shares(asked: list[float], limit: float) -> None:
    given_ = fair_shares(asked, limit)
    assert all(0 <= got <= wanted for got, wanted in zip(given_, asked, strict=True))
    assert sum(given_) == pytest.approx(min(limit, sum(asked)))
    short = [got for got, wanted in zip(given_, asked, strict=True) if got < wanted * (1 - 1e-9)]
    assert not short or max(given_) <= min(short) * (1 + 1e-6)


def test_of_a_profile() -> None:
    gpu = HardwareProfile.preset("rtx4090-12xP5510")
    found = Contention.of(gpu)
    assert found.mixed == pytest.approx(1.0)  # the preset's drives take turns
    assert found.memory_bytes_per_s == gpu.host_memory_bytes_per_s
    cpu = dataclasses.replace(gpu, device="cpu", nvme=())
    assert Contention.of(cpu).memory_bytes_per_s == max(gpu.host_memory_bytes_per_s, gpu.memory_bytes_per_s)
    slow = tuple(dataclasses.replace(d, mixed_bytes_per_s=d.mixed_bytes_per_s / 2) for d in gpu.nvme)
    assert Contention.of(dataclasses.replace(gpu, nvme=slow)).mixed == pytest.approx(0.5)
