"""cost: LoHan's Eq. 3 to 5 by hand, and more work never takes less time."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.cost import (
    ADAM_TOUCHED_BYTES,
    Work,
    backward_stage,
    coming_back_s,
    forward_stage,
    lane_update_s,
    node_seconds,
    optimizer_stage,
    ssd_seconds,
    update_s,
)
from lohan_fx.cost_models import lohan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Cost, Lane, Phase
from lohan_fx.plan import Tier

SERVER = HardwareProfile.preset("rtx4090-12xP5510")
DRIVE = replace(SERVER.nvme[0], read_bytes_per_s=30.0, write_bytes_per_s=20.0, mixed_bytes_per_s=22.0)
HW = replace(
    SERVER,
    memory_bytes_per_s=1000.0,
    host_memory_bytes_per_s=1e9,
    h2d_bytes_per_s=10.0,
    d2h_bytes_per_s=5.0,
    adam_parameters_per_s=100.0,
    nvme=(DRIVE,),
    op_overhead_s=0.5,
    interpreter_s_per_job=0.25,
)
WORK = Work(
    forward_s=7.0,
    backward_s=14.0,
    recompute_s=3.0,
    fetched_forward_bytes=40,
    fetched_forward_nvme_bytes=30,
    fetched_backward_bytes=60,
    fetched_backward_nvme_bytes=50,
    swapped_bytes=20,
    swapped_nvme_bytes=10,
    gradient_bytes=35,
    state_read_bytes=120,
    state_write_bytes=140,
    adam_parameters=1000,
    first_fetched_nvme_bytes=15,
    fetches_read_bytes=30,
    behind_fetches_s=1.25,
    by_lane=10,
    updates_read_bytes=120,
    updates_written_bytes=140,
    before_updates_s=2.5,
)


def node(**changes: Any) -> Cost:
    plain = Cost(
        flops=0,
        bytes=0,
        touched_bytes=0,
        flops_expr=sympy.Integer(0),
        bytes_expr=sympy.Integer(0),
        layer="",
        layer_kind="",
        phase=Phase.FORWARD,
        lane=Lane.COMPUTE,
        is_view=False,
        is_random=False,
    )
    return replace(plain, **changes)


def test_an_op_is_bound_by_its_flops_or_its_bytes_and_has_to_be_launched() -> None:
    assert node_seconds(node(flops=600, touched_bytes=1000), HW, 100.0) == 6.0 + 0.5
    assert node_seconds(node(flops=600, touched_bytes=9000), HW, 100.0) == 9.0 + 0.5
    assert node_seconds(node(), HW, 100.0) == 0.5


@pytest.mark.parametrize("measured_s", [None, 2.0])
def test_memory_that_the_kernel_clears_takes_its_time_beside_the_op(measured_s: float | None) -> None:
    hw = replace(HW, clearing_s_per_byte=0.25)
    there, fresh = node(flops=600, measured_s=measured_s), node(flops=600, measured_s=measured_s, cleared_bytes=8)
    assert node_seconds(fresh, hw, 100.0) == node_seconds(there, hw, 100.0) + 2.0


@pytest.mark.parametrize("change", [{"is_view": True}, {"lane": Lane.H2D}, {"lane": Lane.D2H}])
def test_views_and_transfers_do_not_compute(change: dict[str, object]) -> None:
    assert node_seconds(node(flops=600, touched_bytes=9000, **change), HW, 100.0) == 0.0


def test_forward_stage_by_hand() -> None:
    """Reads take 30 of 40 bytes, writes 10: 20 bytes both ways at the mixed rate and 20 more read. Compute begins when 15 have
    come, and goes on for 1.25 s when all have."""
    assert forward_stage(WORK, HW).lanes_s == {
        "compute": 7.0 + 15 / 30,
        "h2d": 4.0,
        "d2h": 4.0,
        "ssd": pytest.approx(max(30 / 30 + 10 / 20, 20 / 22 + 20 / 30)),
        "fetches": 1.25 + 30 / 30,
        "cpu": 0.0,
        "python": 0.0,
    }


def test_backward_stage_by_hand() -> None:
    reads, writes = 50 + 10 + 120, 140
    assert backward_stage(WORK, HW).lanes_s == {
        "compute": 17.0,
        "h2d": 8.0,
        "d2h": 7.0,
        "ssd": pytest.approx(max(reads / 30 + writes / 20, 2 * 140 / 22 + 40 / 30)),
        "cpu": 10.0,
        "updates": pytest.approx(max(2.5 + 120 / 30 + 140 / 20, 2.5 + 2 * 120 / 22 + 20 / 20)),
        "python": 0.0,
    }
    assert backward_stage(WORK, HW).bottleneck == "compute"


def test_beside_a_gpu_python_launches_kernels_and_runs_the_jobs_of_lanes() -> None:
    work = replace(WORK, forward_launches=6, forward_jobs=10, backward_launches=12, backward_jobs=100)
    assert forward_stage(work, HW).lanes_s["python"] == 6 * 0.5 + 10 * 0.25
    backward = backward_stage(work, HW)
    assert (backward.bottleneck, backward.seconds) == ("python", 12 * 0.5 + 100 * 0.25)
    assert "python" not in backward_stage(work, replace(HW, device="cpu")).lanes_s


def test_where_the_device_is_the_processor_adam_takes_its_time_from_compute() -> None:
    alone = replace(HW, device="cpu", cpu_cores=1, io_core_s_per_byte=1e-15)
    lanes = backward_stage(WORK, alone).lanes_s
    assert (lanes["compute"], lanes["cpu"]) == (pytest.approx(27.0), 10.0)
    # The 10 parameters whose states are on NVMe are updated by one core of four; the others wait for it.
    four = backward_stage(WORK, replace(alone, cpu_cores=4)).lanes_s
    assert four["compute"] == pytest.approx(27.0 + 3 * 10 / 100)


def test_where_the_device_is_the_processor_drives_and_copies_take_its_time_from_compute() -> None:
    work = replace(WORK, forward_requests=3, backward_requests=5)
    hw = replace(HW, device="cpu", cpu_cores=1, io_core_s_per_request=2.0, io_core_s_per_byte=0.5)
    assert forward_stage(work, hw).lanes_s["compute"] == 7.5 + 3 * 2.0 + (30 + 10) * 0.5 + 20 / 5.0
    assert backward_stage(work, hw).lanes_s["compute"] == 27.0 + 5 * 2.0 + (50 + 10 + 120 + 140) * 0.5
    gpu = replace(hw, device="cuda")
    assert forward_stage(work, gpu).lanes_s["compute"] == 7.5


def test_what_the_step_before_left_of_the_optimizer_is_work_of_the_forward() -> None:
    work = replace(
        WORK,
        next_state_read_bytes=60,
        next_state_write_bytes=80,
        next_adam_parameters=500,
        next_held_nvme_bytes=9,
        fetches_read_bytes=30 + 60 + 9,
        fetches_written_bytes=80,
        late_state_read_bytes=24,
        late_state_write_bytes=36,
        late_adam_parameters=3,
        late_by_lane=2,
    )
    fast = replace(HW, nvme=(replace(DRIVE, mixed_bytes_per_s=1000.0),))
    assert forward_stage(work, fast).lanes_s == {
        **forward_stage(WORK, fast).lanes_s,
        "ssd": pytest.approx((30 + 60 + 9) / 30 + (10 + 80) / 20),
        "fetches": pytest.approx(1.25 + (30 + 60 + 9) / 30 + 80 / 20),
        "cpu": 5.0,
    }
    assert backward_stage(work, fast).lanes_s["ssd"] == pytest.approx((50 + 10 + 120) / 30 + (140 + 9) / 20)
    assert optimizer_stage(work, fast).lanes_s == {"ssd": pytest.approx(24 / 30 + 36 / 20), "cpu": 0.03}
    on_cpu = replace(fast, device="cpu", cpu_cores=4, io_core_s_per_byte=1e-15)
    copied_s = 20 / 5.0
    # All 500 by one thread instead of four, also those whose states are in memory: their gradients were on a drive.
    assert forward_stage(work, on_cpu).lanes_s["compute"] == pytest.approx(7.5 + copied_s + 5.0 + 3 * 500 / 100)
    assert optimizer_stage(work, on_cpu).lanes_s["cpu"] == pytest.approx(0.03 + 3 * 2 / 100)
    serial = replace(work, serial_optimizer=True)
    assert forward_stage(serial, fast).lanes_s["cpu"] == pytest.approx(5.0 + 60 / 30 + 80 / 20)
    assert optimizer_stage(serial, fast).lanes_s["cpu"] == pytest.approx(0.03 + 24 / 30 + 36 / 20)
    assert (work.nvme_read_bytes, work.nvme_write_bytes) == (30 + 50 + 10 + 120 + 60 + 9 + 24, 10 + 140 + 80 + 9 + 36)


def test_the_second_time_of_an_update_is_work_of_the_backward() -> None:
    fast = replace(HW, nvme=(replace(DRIVE, mixed_bytes_per_s=1000.0),))
    work = replace(WORK, repeated_state_bytes=600, repeated_held_nvme_bytes=9)
    assert forward_stage(work, fast) == forward_stage(WORK, fast)
    before, after = backward_stage(WORK, fast).lanes_s, backward_stage(work, fast).lanes_s
    assert after["ssd"] == pytest.approx(before["ssd"] + 609 / 30 + 600 / 20)
    assert after["cpu"] == pytest.approx(before["cpu"] + 50 / 100)
    assert (work.nvme_read_bytes, work.nvme_write_bytes) == (WORK.nvme_read_bytes + 609, WORK.nvme_write_bytes + 600)


def test_adam_is_bound_by_host_memory_where_that_is_slow() -> None:
    slow = replace(HW, host_memory_bytes_per_s=1000.0)
    assert backward_stage(WORK, slow).lanes_s["cpu"] == ADAM_TOUCHED_BYTES * 1000 / 1000.0


@pytest.mark.parametrize("memory", [1e9, 1000.0])
def test_an_update_takes_what_the_formula_has_for_it(memory: float) -> None:
    hw = replace(HW, host_memory_bytes_per_s=memory)
    found = lohan.adam(sympy.Integer(1000), sympy.Float(hw.adam_parameters_per_s), sympy.Float(memory))
    assert update_s(1000, hw) == pytest.approx(float(found))
    assert lane_update_s(1000, hw) == update_s(1000, hw)  # beside a GPU it has all cores
    assert lane_update_s(1000, replace(hw, device="cpu", cpu_cores=3)) == pytest.approx(
        update_s(1000, hw) + 2 * 1000 / 100.0
    )


def test_drives_do_one_thing_at_a_time() -> None:
    assert ssd_seconds(60, 0, HW) == 2.0
    assert ssd_seconds(0, 60, HW) == 3.0
    assert ssd_seconds(30, 20, HW) >= 2.0
    fast = replace(HW, nvme=(replace(DRIVE, mixed_bytes_per_s=1000.0),))
    assert ssd_seconds(30, 20, fast) == 2.0


def test_two_drives_are_twice_as_fast() -> None:
    assert ssd_seconds(60, 60, replace(HW, nvme=(DRIVE, DRIVE))) == pytest.approx(ssd_seconds(60, 60, HW) / 2)


def test_without_drives_nothing_can_go_there() -> None:
    none = replace(HW, nvme=())
    assert ssd_seconds(1, 0, none) == float("inf")
    assert ssd_seconds(0, 0, none) == 0.0


def lohan_step_s(params: float, flops: float, recomputed: float, swapped: float, host: float) -> float:
    """T_f + T_b as mechanisms B2 writes them, on the server's rates."""
    rate, link, read, write = 164e12, SERVER.h2d_bytes_per_s, SERVER.ssd_read_bytes_per_s, SERVER.ssd_write_bytes_per_s
    to_ssd = max(0.0, swapped - host)
    forward = max(flops / rate, swapped / link, 2 * params / link, 2 * params / read + to_ssd / write)
    backward = max(
        (2 * flops + recomputed) / rate,
        2 * params / link,
        (2 * params + swapped) / link,
        (14 * params + to_ssd) / read + 14 * params / write,
    )
    return forward + backward


@pytest.mark.parametrize("params", [13e9, 70e9])
@pytest.mark.parametrize("swapped", [12.5 * 2**30, 34e9, 212.5 * 2**30])
@pytest.mark.parametrize("host", [0.0, 60e9, 768e9])
def test_the_step_is_lohans_where_adam_does_not_bind(params: float, swapped: float, host: float) -> None:
    flops, recomputed = 2 * params * 32 * 1024, params * 32 * 1024
    work = Work(
        forward_s=flops / 164e12,
        backward_s=2 * flops / 164e12,
        recompute_s=recomputed / 164e12,
        fetched_forward_bytes=int(2 * params),
        fetched_forward_nvme_bytes=int(2 * params),
        fetched_backward_bytes=int(2 * params),
        fetched_backward_nvme_bytes=int(2 * params),
        swapped_bytes=int(swapped),
        swapped_nvme_bytes=int(max(0.0, swapped - host)),
        gradient_bytes=int(2 * params),
        state_read_bytes=int(12 * params),
        state_write_bytes=int(14 * params),
        adam_parameters=int(params),
    )
    found = forward_stage(work, SERVER).seconds + backward_stage(work, SERVER).seconds
    assert found == pytest.approx(lohan_step_s(params, flops, recomputed, swapped, host))


counts = st.integers(0, 1000)
works = st.builds(Work, **{field.name: counts for field in fields(Work)})


names = [field.name for field in fields(Work) if field.name != "blocking_hidden_s"]  # which hides what is waited for


@given(works, st.sampled_from(names), st.integers(1, 1000), st.booleans())
def test_more_work_never_takes_less_time(work: Work, name: str, more: int, shared: bool) -> None:
    hw = replace(HW, device="cpu" if shared else "cuda")
    larger = replace(work, **{name: getattr(work, name) + more})
    if name == "blocking_read_bytes":
        # They are among the states that are read; while those are waited for, nothing is taken from compute.
        larger = replace(larger, state_read_bytes=work.state_read_bytes + more)
    for stage in (forward_stage, backward_stage, optimizer_stage):
        before, after = stage(work, hw), stage(larger, hw)
        # On a CPU what comes from NVMe instead of host RAM is not copied: less for h2d, more for the drives.
        copied = shared and name.endswith("_nvme_bytes")
        lanes = [lane for lane in before.lanes_s if lane in after.lanes_s and not (copied and lane == "h2d")]
        assert all(after.lanes_s[lane] >= before.lanes_s[lane] - 1e-9 for lane in lanes)
        assert copied or after.seconds >= before.seconds - 1e-9


def test_what_is_needed_back_too_soon_is_waited_for() -> None:
    """By hand: 20 bytes leave at 5 a second and come back at 10; by way of the drives no faster than they write and read."""
    assert coming_back_s(HW, 20, Tier.HOST, 0.0) == 20 / 5 + 20 / 10
    assert coming_back_s(HW, 20, Tier.HOST, 5.5) == 0.5
    assert coming_back_s(HW, 20, Tier.HOST, 6.5) == 0.0
    assert coming_back_s(HW, 20, Tier.NVME, 1.0) == 20 / 5 + 20 / 10 - 1
    slow = replace(HW, nvme=(replace(DRIVE, read_bytes_per_s=4.0, write_bytes_per_s=2.0),))
    assert coming_back_s(slow, 20, Tier.NVME, 1.0) == 20 / 2 + 20 / 4 - 1
    cpu = replace(HW, device="cpu")  # where it is read to where it belongs
    assert coming_back_s(cpu, 20, Tier.NVME, 1.0) == pytest.approx(20 / 5 + 20 / 30 - 1)
    assert coming_back_s(replace(HW, nvme=()), 20, Tier.NVME, 1.0) > 1e300
    waiting = backward_stage(replace(WORK, coming_back_s=2.0), HW)
    assert waiting.lanes_s[Lane.COMPUTE] == backward_stage(WORK, HW).lanes_s[Lane.COMPUTE] + 2


def test_on_a_cpu_only_what_host_ram_holds_is_copied() -> None:
    work = replace(WORK, fetched_forward_bytes=90, fetched_forward_nvme_bytes=60)
    work = replace(
        work, fetched_backward_bytes=90, fetched_backward_nvme_bytes=60, swapped_bytes=50, swapped_nvme_bytes=30
    )
    on_cpu = replace(HW, device="cpu")
    assert forward_stage(work, on_cpu).lanes_s["h2d"] == pytest.approx(30 / HW.h2d_bytes_per_s)
    assert forward_stage(work, on_cpu).lanes_s["d2h"] == pytest.approx(50 / HW.d2h_bytes_per_s)
    assert backward_stage(work, on_cpu).lanes_s["h2d"] == pytest.approx((30 + 20) / HW.h2d_bytes_per_s)
    assert backward_stage(work, on_cpu).lanes_s["d2h"] == 0.0


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_drives_are_never_faster_than_one_way_traffic(read: int, write: int) -> None:
    assert ssd_seconds(read, write, HW) >= max(read / 30, write / 20)
