"""step_bounds: which wait and which gradient bound a step most, by hand and never above the simulator."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx import cost, ops, simulate
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.step_bounds import Bound, fetch_bound, update_bound
from lohan_fx.passes.step_ends import NEGLIGIBLE
from lohan_fx.passes.traffic import traffic
from lohan_fx.plan import Keep, OptimizerTiming, ParameterPlan, Plan, Recompute, Swap, Tier
from tests.exhaustive import examples
from tests.lohan_fx.simulation.simulated import PAGE, drive, machine, second_each, windows
from tests.passes.graphs import captured, plan_for, rewrite

NOTHING = Bound(0.0, 0, 0)
STREAMED = Tier.NVME, Tier.NVME, OptimizerTiming.IN_BACKWARD, None
KINDS = (
    STREAMED,
    (Tier.NVME, Tier.HOST, OptimizerTiming.IN_BACKWARD, None),
    (Tier.DEVICE, Tier.HOST, OptimizerTiming.IN_BACKWARD, None),
    (Tier.NVME, Tier.NVME, OptimizerTiming.NEXT_FORWARD, Tier.HOST),
    (Tier.NVME, Tier.NVME, OptimizerTiming.NEXT_FORWARD, Tier.NVME),
    (Tier.NVME, Tier.NVME, OptimizerTiming.AFTER_BACKWARD, Tier.HOST),
)


def in_turns(read: int, written: int) -> float:
    return read + 2.0 * written


def with_kinds(plan: Plan, kinds: list[tuple[Tier, Tier, OptimizerTiming, Tier | None]]) -> Plan:
    def of(p: ParameterPlan, kind: tuple[Tier, Tier, OptimizerTiming, Tier | None]) -> ParameterPlan:
        home, states, runs, gradient = kind
        return dataclasses.replace(p, home=home, states_home=states, optimizer_runs=runs, gradient_home=gradient)

    return dataclasses.replace(plan, parameters=tuple(map(of, plan.parameters, itertools.cycle(kinds))))


def two_layers() -> tuple[Halves, Plan]:
    """Forward: addmm of the first layer, relu, mm of the second; two parameters of 32 elements, a bias of 8."""
    plan = plan_for(found := captured("two-layers"), Keep(), windows=windows(gradient_bytes=1))
    return rewrite(found, plan), plan


def fetched(halves: Halves, plan: Plan, beside: dict[str, tuple[int, int]], drives_s: object = in_turns) -> Bound:
    homes = {p.name: p for p in plan.parameters}
    return fetch_bound(halves.forward, beside, homes, second_each, drives_s, NOTHING)  # type: ignore[arg-type]


def test_the_wait_that_bounds_the_forward_is_the_last_one_unless_what_is_behind_it_is_small() -> None:
    halves, plan = two_layers()
    waits = halves.forward.graph.find_nodes(op="call_function", target=ops.WAIT)
    assert [str(node.args[0].args[0]) for node in waits] and len(waits) == 3  # type: ignore[union-attr]
    total = sum(p.bytes for p in plan.parameters)
    second = next(p for p in plan.parameters if p.name.startswith("second"))
    # Bytes take long: all of them count, and the ops behind the last.
    last = fetched(halves, plan, {})
    assert (last.read_bytes, last.written_bytes) == (total, 0)
    # They take next to no time: the wait in front of most of the ops does.
    first = fetched(halves, plan, {}, lambda read, written: 1e-9 * read)
    assert first.compute_s > last.compute_s and first.read_bytes == total - second.bytes


def test_an_update_beside_the_forward_is_moved_before_its_fetch_and_not_before_earlier_ones() -> None:
    halves, plan = two_layers()
    second = next(p.name for p in plan.parameters if p.name.startswith("second"))
    total = sum(p.bytes for p in plan.parameters)
    assert fetched(halves, plan, {second: (1000, 10)}) == Bound(fetched(halves, plan, {}).compute_s, total + 1000, 10)
    first = next(p.name for p in plan.parameters if p.name.startswith("first") and p.numel == 32)
    slow = fetched(halves, plan, {first: (1000, 10)}, lambda read, written: (read + written) / 1000)
    assert (slow.read_bytes, slow.written_bytes) == (
        1000 + total - 128,
        10,
    )  # the wait before the ops of the first layer


def bound_of_updates(halves: Halves, plan: Plan, moved: dict[str, tuple[int, int]], **blocking_s: float) -> Bound:
    assert halves.backward is not None
    named = {name.replace("_", "."): seconds for name, seconds in blocking_s.items()}
    return update_bound(halves.backward, plan, moved, named, second_each, in_turns, NOTHING)


def test_gradients_whose_states_stay_bound_nothing_and_those_behind_them_begin_later() -> None:
    halves, plan = two_layers()
    both = {p.name: (12 * p.numel, 12 * p.numel) for p in plan.parameters if p.numel == 32}
    of_all = bound_of_updates(halves, plan, both)
    assert (of_all.read_bytes, of_all.written_bytes) == (2 * 12 * 32, 2 * 12 * 32)  # fetches are begun before
    later = bound_of_updates(halves, plan, {name: both[name] for name in both if name.startswith("first")})
    assert (later.read_bytes, later.written_bytes) == (12 * 32, 12 * 32)
    assert later.compute_s > of_all.compute_s


def test_compute_waits_for_an_update_in_memory_that_leaves_no_room() -> None:
    halves, plan = two_layers()
    first = {p.name: (12 * 32, 12 * 32) for p in plan.parameters if p.numel == 32 and p.name.startswith("first")}
    free = bound_of_updates(halves, plan, first)
    hidden_s = free.compute_s - bound_of_updates(halves, plan, {"second.weight": (1, 0)}).compute_s
    assert bound_of_updates(halves, plan, first, second_weight=hidden_s / 2) == free
    waiting = bound_of_updates(halves, plan, first, second_weight=hidden_s + 5.0)
    assert waiting == dataclasses.replace(free, compute_s=free.compute_s + 5.0)


rates = st.floats(1e3, 1e6)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("decision", [Keep(), Recompute(), Swap(Tier.NVME)], ids=str)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=8),
    read=rates,
    write=rates,
    adam=rates,
    node_s=st.floats(1e-4, 1.0),
)
@examples(20)
def test_no_bound_is_above_the_simulator(
    decision: Keep | Recompute | Swap,
    device: str,
    kinds: list[tuple[Tier, Tier, OptimizerTiming, Tier | None]],
    read: float,
    write: float,
    adam: float,
    node_s: float,
) -> None:
    given_windows = windows(io_buffers=4, optimizer_buffers=2, gradient_bytes=PAGE)
    plan = dataclasses.replace(plan_for(found := captured("dropout"), decision, windows=given_windows), device=device)
    plan = with_kinds(plan, kinds)
    halves = rewrite(found, plan)
    hw = machine(
        device=device,
        nvme=(drive(read, write),),
        adam_parameters_per_s=adam,
        h2d_bytes_per_s=1e12,
        d2h_bytes_per_s=1e12,
    )

    def seconds(found: cost.Cost) -> float:
        return 0.0 if found.is_view else node_s

    drives_s, by_lane_s = functools.partial(cost.ssd_seconds, hw=hw), functools.partial(cost.lane_update_s, hw=hw)
    work = traffic(halves, plan, seconds, drives_s=drives_s, by_lane_s=by_lane_s)
    step = simulate(halves, plan, hw, node_seconds=seconds)
    fetches_s = work.behind_fetches_s + drives_s(work.fetches_read_bytes, work.fetches_written_bytes)
    updates_s = work.before_updates_s + drives_s(work.updates_read_bytes, work.updates_written_bytes)
    almost = 1 - NEGLIGIBLE
    assert step.step_s >= almost * max(fetches_s, updates_s)
    if device == "cpu":  # beside a GPU the thread that launches may begin the backward before the forward has ended
        assert step.step_s >= almost * (fetches_s + updates_s)
    if device == "cpu" and not work.swapped_bytes:
        assert step.forward_s >= almost * fetches_s
        assert step.backward_s + step.tail_s >= almost * updates_s
    ends = traffic(halves, plan, seconds)
    assert fetches_s >= ends.behind_fetches_s + drives_s(ends.fetches_read_bytes, ends.fetches_written_bytes)
    assert updates_s >= ends.before_updates_s + drives_s(ends.updates_read_bytes, ends.updates_written_bytes)
