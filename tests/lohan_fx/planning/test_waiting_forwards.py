"""How many forwards wait at once, by what they keep and for how long."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from lohan_fx.plan import ActivationPlan, Keep, Plan, Prediction, Recompute, Stage, Swap, Tier
from lohan_fx.planning.waiting_forwards import WaitingForwards, kept_bytes
from tests.lohan_fx.planning.test_planner import WINDOWS

MIB = 1 << 20
ROOM = 10 * MIB


def plan(kept: int, *, device: str = "cpu", to_host: int = 0, forwards: int = 1) -> Plan:
    """Of one activation that stays and one that goes to host, megabytes each, in graphs that need nothing else."""
    sizes = {"stays": (kept, Keep()), "goes": (to_host, Swap(Tier.HOST)), "again": (7, Recompute())}
    activations = tuple(
        ActivationPlan(node=name, op="op", layer="", layer_kind="", bytes=size * MIB, flops=0, decision=decision)
        for name, (size, decision) in sizes.items()
    )
    stage = Stage({"compute": 1.0})
    made = Plan("lohan", device, "float32", ROOM, ROOM, activations, (), WINDOWS, forwards=forwards)
    here, there = forwards * kept * MIB, forwards * to_host * MIB
    peaks = {"device": here, "host": there + (here if device == "cpu" else 0)}
    return replace(made, prediction=Prediction(stage, stage, peaks, stage, 0, 0, 0, 0))


def over(*forwards: Plan) -> tuple[int, int]:
    """What all of them together are over, at the backward of the last, and how many are counted."""
    waiting, alive = WaitingForwards(), []
    for found in forwards:
        alive.append(torch.ones(1))
        waiting.waits(found, alive[-1], step=1)
    return waiting.backward_begins(forwards[-1], step=1), waiting.wanted


@pytest.mark.parametrize(
    ("device", "kept", "to_host", "expected"),
    [("cpu", 3, 2, {"device": 3, "host": 5}), ("cuda", 3, 2, {"device": 3, "host": 2})],
)
def test_what_a_forward_keeps(device: str, kept: int, to_host: int, expected: dict[str, int]) -> None:
    assert kept_bytes(plan(kept, device=device, to_host=to_host)) == {t: n * MIB for t, n in expected.items()}


@pytest.mark.parametrize(("count", "expected"), [(1, (0, 1)), (2, (0, 1)), (3, (2 * MIB, 3)), (4, (6 * MIB, 4))])
def test_as_many_as_fit_change_nothing_and_more_are_counted(count: int, expected: tuple[int, int]) -> None:
    assert over(*[plan(4)] * count) == expected


@pytest.mark.parametrize(("count", "expected"), [(3, (0, 1)), (4, (2 * MIB, 4))])
def test_a_plan_that_counts_them_has_room_for_them(count: int, expected: tuple[int, int]) -> None:
    assert over(*[plan(3, forwards=3)] * count) == expected


def test_what_is_gone_waits_no_more() -> None:
    waiting = WaitingForwards()
    for _ in range(20):
        kept = torch.ones(1)
        waiting.waits(plan(9), kept, step=1)
        assert waiting.backward_begins(plan(9), step=1) == 0
        del kept
        gc.collect()
        assert not waiting.of(1)
    assert waiting.wanted == 1


def test_what_an_earlier_step_has_left_is_none_of_this_one() -> None:
    waiting, alive = WaitingForwards(), [torch.ones(1) for _ in range(9)]
    for step, kept in enumerate(alive):
        waiting.waits(plan(9), kept, step)
        assert len(waiting.of(step)) == 1
        assert waiting.backward_begins(plan(9), step) == 0
    assert waiting.wanted == 1


@pytest.mark.parametrize(("small", "expected"), [(0, 1), (1, 1), (2, 2), (70, 2), (100, 2)])
def test_small_ones_beside_a_large_one_do_not_count(small: int, expected: int) -> None:
    """An embedding that is called by itself keeps next to nothing. The large one fills the promise."""
    filling = replace(plan(100), host_memory_bytes=100 * MIB, device_memory_bytes=100 * MIB)
    assert over(plan(small), filling)[1] == expected


def test_a_head_that_keeps_nothing_and_needs_much_is_noticed_beside_a_backbone() -> None:
    head = plan(0)
    assert head.prediction is not None
    needs = {"device": 8 * MIB, "host": 8 * MIB}
    head = replace(head, prediction=replace(head.prediction, peak_bytes=needs))
    assert over(plan(9), head) == (7 * MIB, 2)
    assert over(plan(5, forwards=2), replace(head, forwards=2)) == (3 * MIB, 3)
    assert over(plan(2, forwards=3), replace(head, forwards=3)) == (0, 1)


@pytest.mark.parametrize(("kept", "to_host"), [(6, 0), (0, 6)])
def test_each_budget_of_a_gpu_is_one_of_its_own(kept: int, to_host: int) -> None:
    found = plan(kept, device="cuda", to_host=to_host)
    assert over(found, found) == (2 * MIB, 2)
    assert over(*[plan(5, device="cuda", to_host=5)] * 2) == (0, 1)
