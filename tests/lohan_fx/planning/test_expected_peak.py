"""expected_peak: what of the staging a plan will use, and how a window filled by drives alone counts."""

from __future__ import annotations

import dataclasses

import pytest
from torch.fx import Node

from lohan_fx import meta, ops
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import Transit
from lohan_fx.passes.touched_values import _alive, touched_bytes
from lohan_fx.plan import Plan, Prediction, Stage, Swap, Tier
from lohan_fx.planning.budgets import captured_bytes, choose_windows, make_budgets, staging_bytes
from lohan_fx.planning.expected_peak import added_bytes, touched_staging_bytes, transit_of
from lohan_fx.planning.memory_model import resident_bytes
from lohan_fx.request import Request
from lohan_fx.runtime.state_buffer import buffer_bytes
from lohan_fx.simulation.simulated_step import simulated_transit
from lohan_fx.simulation.step_program import step_program
from tests.lohan_fx.simulation.simulated import drive, machine, second_each
from tests.passes.graphs import DECISIONS, WINDOWS, captured, plan_for, rewrite


def plan(decision: str = "keep", home: Tier = Tier.NVME) -> Plan:
    found = captured("transformer")
    return plan_for(found, DECISIONS[decision](found), home=home)


@pytest.mark.parametrize(
    ("decision", "home", "states", "own", "swaps"),
    [
        ("keep", Tier.HOST, 0, 1, 0),
        ("keep", Tier.NVME, 1, 0, 0),
        ("swap-nvme", Tier.NVME, 1, 0, 1),
        ("swap-host", Tier.NVME, 1, 0, 0),
        ("swap-nvme", Tier.HOST, 0, 1, 1),
    ],
)
def test_staging_is_what_is_used(decision: str, home: Tier, states: int, own: int, swaps: int) -> None:
    planned = plan(decision, home)
    windows = planned.windows
    of_one = 3 * 4 * windows.chunk_elements  # fp32 graphs compute with the masters, and gradients are read in place
    used = states * windows.optimizer_buffers * of_one
    used += own * 4 * windows.chunk_elements + swaps * windows.io_buffers * windows.io_bytes
    assert touched_staging_bytes(planned) == used < staging_bytes(windows, shared=True)


def test_of_the_optimizers_buffers_counts_what_the_dtype_and_waiting_gradients_use() -> None:
    """In bf16 the copy, and fp32 gradients of a part at a time; all of a buffer where sums come from NVMe."""
    windows = dataclasses.replace(choose_windows(1 << 30, []), chunk_elements=1 << 20, optimizer_buffers=5)
    full = dataclasses.replace(plan(), windows=windows)
    bf16 = dataclasses.replace(full, compute_dtype="bfloat16")
    waits = [dataclasses.replace(p, gradient_home=Tier.NVME) for p in full.parameters]
    small = 8 * (16 << 10)
    assert touched_staging_bytes(full) == 12 * (5 * (1 << 20) + small)
    assert touched_staging_bytes(bf16) == 14 * (5 * (1 << 20) + small) + 4 * (5 * (1 << 18) + small)
    for dtype in (full, bf16):
        held = dataclasses.replace(dtype, parameters=tuple(waits))
        assert touched_staging_bytes(held) == 5 * buffer_bytes(1 << 20) + 8 * buffer_bytes(16 << 10)


def test_what_swaps_to_ram_does_not_wait_for_a_drive() -> None:
    found = captured("transformer")
    planned = plan_for(found, DECISIONS["swap-host"](found))
    halves = rewrite(found, planned)
    narrow, wide = (
        dataclasses.replace(planned, windows=dataclasses.replace(planned.windows, swap_out_bytes=nbytes))
        for nbytes in (0, 1 << 40)
    )
    assert touched_bytes(halves, wide) > touched_bytes(halves, narrow)
    assert added_bytes(wide, halves) == added_bytes(narrow, halves)
    swapped = sum(a.bytes for a in planned.activations)
    assert added_bytes(planned, halves) > swapped + sum(resident_bytes(planned))


def test_drives_hold_back_what_the_forward_leaves_them_no_time_for() -> None:
    """Three threads are at work on an activation each, whatever is predicted."""
    found = captured("transformer")
    planned = plan_for(found, DECISIONS["swap-nvme"](found))
    planned = dataclasses.replace(planned, windows=dataclasses.replace(planned.windows, swap_out_bytes=1 << 40))
    halves = rewrite(found, planned)

    def expected(drives_s: float) -> int:
        said = Prediction(Stage({"compute": 1.0, "ssd": drives_s}), Stage({}), {}, 0, 0, 0, 0)
        return added_bytes(dataclasses.replace(planned, prediction=said), halves)

    def with_window(nbytes: int) -> int:
        return added_bytes(
            dataclasses.replace(planned, windows=dataclasses.replace(planned.windows, swap_out_bytes=nbytes)), halves
        )

    sizes = [a.bytes for a in planned.activations if a.decision == Swap(Tier.NVME)]
    at_work = 3 * max(sizes)
    assert expected(0.5) == expected(1.0) == with_window(at_work)
    assert expected(1.25) == with_window(at_work + round(0.2 * sum(sizes)))
    assert expected(0.5) < expected(1.25) < expected(1e9) == added_bytes(planned, halves)


def test_beside_a_gpu_it_is_the_prediction_without_what_capture_leaves_behind() -> None:
    found = captured("transformer")
    windows = choose_windows(1 << 30, [])
    said = Prediction(Stage({}), Stage({}), {"host": captured_bytes(0) + (64 << 20)}, 0, 0, 0, 0)
    beside = Plan("keep", "cuda", "bfloat16", 1 << 30, 1 << 30, (), (), windows, said)
    assert added_bytes(beside, rewrite(found, plan_for(found, {}))) == 64 << 20


# --- what is on its way ---------------------------------------------------------------------------------------------


def simulated(read_bytes_per_s: float, write_bytes_per_s: float = 1e15) -> tuple[Halves, Plan, Transit]:
    """A transformer all of whose parameters are on NVMe, on a CPU with such drives, an op taking a second."""
    found = captured("transformer")
    planned = plan_for(found, DECISIONS["keep"](found))
    planned = dataclasses.replace(
        planned, device="cpu", windows=dataclasses.replace(WINDOWS, fetch_bytes=32768, gradient_bytes=1 << 40)
    )
    halves = rewrite(found, planned)
    hw = machine(
        device="cpu", nvme=(drive(read_bytes_per_s, write_bytes_per_s),), h2d_bytes_per_s=1e15, d2h_bytes_per_s=1e15,
        adam_parameters_per_s=1e15,
    )  # fmt: skip
    return halves, planned, simulated_transit(step_program(halves, planned, second_each), planned, hw)


def starts(halves: Halves, half: str) -> list[Node]:
    return [n for n in dict(halves.graphs())[half].graph.nodes if n.target in ops.STARTS]


def test_what_slow_drives_have_not_brought_yet_has_a_place_and_touches_nothing() -> None:
    halves, planned, slow = simulated(read_bytes_per_s=1.0)
    first, second, *_ = starts(halves, "forward")
    assert slow.coming["forward", first.name] == 0
    assert slow.coming["forward", second.name] == meta.cost(first).bytes
    fast = simulated(read_bytes_per_s=1e15)[2]
    assert sum(fast.coming.values()) < sum(slow.coming.values())
    same_gradients = dataclasses.replace(slow, leaving=fast.leaving)
    assert touched_bytes(halves, planned, same_gradients) <= touched_bytes(halves, planned, fast)
    assert touched_bytes(halves, planned, fast) <= touched_bytes(halves, planned)


def test_what_has_arrived_is_counted_to_the_byte() -> None:
    """Of what is brought, nothing counts where nothing has come, and all where all has."""
    halves, planned, known = simulated(read_bytes_per_s=1e15)
    everywhere = {(half, n.name): 1 << 40 for half in ("forward", "backward") for n in starts(halves, half)}
    never = {**everywhere, ("forward", ""): 1 << 40, ("backward", ""): 1 << 40}
    at_once = dict.fromkeys(never, 0)
    nothing, all_of_it = (
        touched_bytes(halves, planned, dataclasses.replace(known, coming=coming)) for coming in (never, at_once)
    )
    brought = {half: frozenset(node.name for node in starts(halves, half)) for half in ("forward", "backward")}
    assert all_of_it - nothing == max(_alive(halves, planned, brought)) > 0
    assert all_of_it == touched_bytes(halves, planned, dataclasses.replace(known, coming={}))


def test_gradients_that_have_left_do_not_count_although_the_window_would_hold_them() -> None:
    halves, planned, fast = simulated(read_bytes_per_s=1e15)
    slow = simulated(read_bytes_per_s=1e15, write_bytes_per_s=1.0)[2]
    last = list(fast.leaving)[-1]
    assert list(fast.leaving[last]) == [last]
    assert set(fast.leaving[last]) < set(slow.leaving[last])
    assert (
        touched_bytes(halves, planned, fast) <= touched_bytes(halves, planned, slow) <= touched_bytes(halves, planned)
    )


def test_only_steps_on_this_machine_are_simulated(tiny_request: Request) -> None:
    halves, planned, _ = simulated(read_bytes_per_s=1e15)
    here = dataclasses.replace(tiny_request.hw, machine=HardwareProfile.fingerprint())
    assert transit_of(halves, planned, tiny_request) is None
    assert transit_of(halves, planned, dataclasses.replace(tiny_request, hw=here)) is not None
    assert transit_of(halves, planned, dataclasses.replace(tiny_request, hw=dataclasses.replace(here, nvme=()))) is None
    beside = dataclasses.replace(planned, device="cuda")
    assert transit_of(halves, beside, dataclasses.replace(tiny_request, hw=here)) is None


@pytest.fixture
def tiny_request() -> Request:
    hw = machine(device="cpu")
    return Request(hw, "keep", "float32", 1.0, (), make_budgets(hw, 1 << 40, None, WINDOWS), WINDOWS, None)
