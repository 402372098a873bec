"""touched_values: each value is counted in one place, and no place is counted at less than what lives there at once."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from lohan_fx.passes.assign_buffers import assign_buffers, shared_bytes
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import alive, device_peak, rises
from lohan_fx.passes.touched_values import (
    _alive,
    _every,
    _outliving,
    brought_bytes,
    brought_rises,
    heap_rises,
    outliving_bytes,
    outliving_rises,
    touched_bytes,
)
from lohan_fx.plan import Plan
from tests.passes.graphs import DECISIONS, captured, plan_for, rewrite, take_scratch

ALL = range(1, sys.maxsize)


@pytest.fixture(autouse=True)
def _small_values_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.passes.assign_buffers.SIZES", (ALL,))


def graphs(decision: str) -> tuple[Halves, Plan]:
    """Rewritten, without places."""
    found = captured("transformer")
    plan = plan_for(found, DECISIONS[decision](found))
    return rewrite(found, plan), plan


@pytest.mark.parametrize("decision", DECISIONS)
def test_places_touch_at_least_what_lives_at_once(decision: str) -> None:
    halves, plan = graphs(decision)
    peak_bytes = device_peak(halves, plan)
    assert touched_bytes(halves, plan) >= peak_bytes
    assign_buffers(halves, plan, room_bytes=1 << 30)
    brought = sum(p.bytes for p in plan.parameters) + sum(a.bytes for a in plan.activations)
    assert peak_bytes <= touched_bytes(halves, plan) <= 2 * peak_bytes + brought


@pytest.mark.parametrize("decision", ["keep", "swap-nvme"])
def test_together_the_values_of_all_places_are_all_values(decision: str) -> None:
    halves, plan = graphs(decision)
    plan = dataclasses.replace(  # what leaves is bounded by a window each time it is counted: here it all counts
        plan, windows=dataclasses.replace(plan.windows, gradient_bytes=1 << 40, swap_out_bytes=1 << 40)
    )
    assign_buffers(halves, plan, room_bytes=1 << 30)
    outliving, every = _outliving(halves), _every(halves)
    others = {half: names - outliving[half] for half, names in every.items()}
    for total, *parts in zip(
        (nbytes for _, _, nbytes in alive(halves, plan)),
        _alive(halves, plan, outliving),
        _alive(halves, plan, others),
        strict=True,
    ):
        assert total == sum(parts)


@pytest.mark.parametrize("decision", DECISIONS)
def test_what_kernels_take_is_counted_in_the_heap_alone(decision: str) -> None:
    halves, plan = graphs(decision)
    assign_buffers(halves, plan, room_bytes=1 << 30)
    found, before = (heap_rises, brought_rises, outliving_rises), touched_bytes(halves, plan)
    rises_before = [each(halves, plan) for each in found]
    take_scratch(halves, 1 << 30)
    assert touched_bytes(halves, plan) - before == pytest.approx(1 << 30, rel=1e-3)
    in_heap, *others = (each(halves, plan) for each in found)
    assert others == rises_before[1:]
    assert all(max(nbytes.values()) >= 1 << 30 for nbytes in in_heap.values())


@pytest.mark.parametrize("decision", DECISIONS)
def test_rises_of_all_places_are_at_least_those_of_what_lives(decision: str) -> None:
    """What dies in one place leaves no room in another."""
    halves, plan = graphs(decision)
    assign_buffers(halves, plan, room_bytes=1 << 30)
    apart = {half: one.offsets.keys() for half, one in halves.assigned.items()}
    parts = [found(halves, plan) for found in (heap_rises, brought_rises, outliving_rises)]
    for half, of_half in rises(halves, plan, elsewhere=apart).items():
        assert all(part[half].keys() == of_half.keys() for part in parts)
        for slot, nbytes in of_half.items():
            assert nbytes <= sum(part[half][slot] for part in parts)
    assert any(nbytes for of_half in parts[2].values() for nbytes in of_half.values())


def test_what_the_forward_leaves_counts_in_the_backward_too() -> None:
    halves, plan = graphs("keep")
    assert outliving_bytes(halves, plan) == 0  # nothing has a place yet
    assign_buffers(halves, plan, room_bytes=1 << 30)
    crossing = {n.name for n in halves.crossing()} & halves.assigned["forward"].outliving
    in_backward = [nbytes for half, _, nbytes in alive_of(halves, plan) if half == "backward"]
    assert crossing and in_backward[0] > 0  # before the first op of the backward has run


def alive_of(halves: Halves, plan: Plan) -> list[tuple[str, str, int]]:
    others = {half: names - _outliving(halves)[half] for half, names in _every(halves).items()}
    return list(alive(halves, plan, elsewhere=others))


def test_what_drives_bring_has_a_stretch_of_its_own_whatever_is_fetched_ahead() -> None:
    halves, plan = graphs("swap-nvme")
    assign_buffers(halves, plan, room_bytes=1 << 30)
    most = brought_bytes(halves, plan)
    assert most >= max(p.bytes for p in plan.parameters)
    assert touched_bytes(halves, plan) >= shared_bytes(halves.assigned) + outliving_bytes(halves, plan) + most
    none = dataclasses.replace(
        plan.windows, fetch_bytes=0, swap_in_bytes=0
    )  # what is brought just in time is brought too
    assert brought_bytes(halves, dataclasses.replace(plan, windows=none)) == most
