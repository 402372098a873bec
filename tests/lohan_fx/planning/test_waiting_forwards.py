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


def run(waiting: WaitingForwards, found: Plan, *, keeping: list[torch.Tensor]) -> int:
    """One forward; what it keeps is kept alive by ``keeping``."""
    over = waiting.begins(found)
    keeping.append(torch.ones(1))
    waiting.waits(found, keeping[-1])
    return over


@pytest.mark.parametrize(
    ("device", "kept", "to_host", "expected"),
    [("cpu", 3, 2, {"device": 3, "host": 5}), ("cuda", 3, 2, {"device": 3, "host": 2})],
)
def test_what_a_forward_keeps(device: str, kept: int, to_host: int, expected: dict[str, int]) -> None:
    assert kept_bytes(plan(kept, device=device, to_host=to_host)) == {t: n * MIB for t, n in expected.items()}


def test_as_many_as_fit_change_nothing() -> None:
    waiting, alive = WaitingForwards(), []
    assert [run(waiting, plan(3), keeping=alive) for _ in range(3)] == [0, 0, 0]
    assert waiting.wanted == 1


def test_one_that_does_not_fit_says_by_how_much_and_all_are_counted() -> None:
    waiting, alive = WaitingForwards(), []
    assert [run(waiting, plan(4), keeping=alive) for _ in range(4)] == [0, 0, 2 * MIB, 6 * MIB]
    assert waiting.wanted == 4


def test_what_is_gone_waits_no_more() -> None:
    waiting, alive = WaitingForwards(), []
    for _ in range(20):
        assert run(waiting, plan(9), keeping=alive) == 0
        alive.clear()
        gc.collect()
        assert not waiting
    assert waiting.wanted == 1


def test_a_plan_that_counts_them_has_room_for_them() -> None:
    waiting, alive = WaitingForwards(), []
    assert [run(waiting, plan(3, forwards=3), keeping=alive) for _ in range(3)] == [0, 0, 0]
    assert run(waiting, plan(3, forwards=3), keeping=alive) == 2 * MIB
    assert waiting.wanted == 4


def test_small_ones_beside_a_large_one_do_not_count() -> None:
    """An embedding that is called by itself keeps next to nothing."""
    found = {}
    for small, large in ((1, 100), (10, 100), (70, 100)):
        waiting, alive = WaitingForwards(), []
        run(waiting, plan(small), keeping=alive)
        over = run(waiting, plan(large), keeping=alive)
        found[small] = over > 0, waiting.wanted
    assert found == {1: (False, 1), 10: (True, 2), 70: (True, 2)}


@pytest.mark.parametrize(("kept", "to_host"), [(6, 0), (0, 6)])
def test_each_budget_of_a_gpu_is_one_of_its_own(kept: int, to_host: int) -> None:
    waiting, alive = WaitingForwards(), []
    found = [run(waiting, plan(kept, device="cuda", to_host=to_host), keeping=alive) for _ in range(2)]
    assert found == [0, 2 * MIB]
    waiting = WaitingForwards()
    assert [run(waiting, plan(5, device="cuda", to_host=5), keeping=alive) for _ in range(2)] == [0, 0]
