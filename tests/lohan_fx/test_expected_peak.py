"""expected_peak: what of the staging a plan will use, and how a window filled by drives alone counts."""

from __future__ import annotations

import dataclasses

import pytest

from lohan_fx.budgets import choose_windows, fixed_bytes, staging_bytes
from lohan_fx.expected_peak import added_bytes, touched_staging_bytes
from lohan_fx.memory_model import resident_bytes
from lohan_fx.passes.touched_values import touched_bytes
from lohan_fx.plan import Plan, Prediction, Stage, Swap, Tier
from lohan_fx.runtime.state_buffer import buffer_bytes
from tests.passes.graphs import DECISIONS, captured, plan_for, rewrite


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
    used = states * windows.optimizer_buffers * buffer_bytes(windows.chunk_elements)
    used += own * 4 * windows.chunk_elements + swaps * windows.io_buffers * windows.io_bytes
    assert touched_staging_bytes(planned) == used < staging_bytes(windows, shared=True)


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
    left_behind = fixed_bytes(windows, 0) - staging_bytes(windows)
    said = Prediction(Stage({}), Stage({}), {"host": left_behind + (64 << 20)}, 0, 0, 0, 0)
    beside = Plan("keep", "cuda", "bfloat16", 1 << 30, 1 << 30, (), (), windows, said)
    assert added_bytes(beside, rewrite(found, plan_for(found, {}))) == 64 << 20
