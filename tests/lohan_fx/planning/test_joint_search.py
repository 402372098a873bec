"""joint_search: against brute force and the grid it replaced; what more and faster hardware may never do; its speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from lohan_fx.errors import InfeasiblePlan, NoDrive
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import Activation, ActivationGraph
from lohan_fx.passes.search import useful
from lohan_fx.plan import Decision, Keep, OptimizerTiming, Plan, Recompute, Swap, Tier, Use
from lohan_fx.planning.joint_search import joint_search
from lohan_fx.planning.memory_model import resident_bytes
from lohan_fx.planning.plan_builder import build_plan, default_homes
from lohan_fx.planning.problem import ParameterFacts, Problem
from tests.exhaustive import examples
from tests.lohan_fx.planning.quarters import by_quarters
from tests.lohan_fx.planning.test_planner import (
    FIXED,
    MIB,
    PEAK,
    PROBLEMS,
    WINDOWS,
    blocks,
    facts,
    fits,
    hardware,
    problem,
    saved,
    step_s,
)
from tests.passes.small_graphs import activation_graphs

CLOSE = 1 + 1e-6
MEMORY = st.integers(90, 1500).map(lambda megabytes: megabytes * MIB)
TIGHT = st.integers(72, 160).map(lambda megabytes: megabytes * MIB)
MOST_DECIDED = 6
"""Of the activations of a small graph: 4096 plans."""
LEAST_DECIDED = 3
"""Of those that anything reads: with fewer there is little to decide."""
FASTER = st.sampled_from([1.0, 1.1, 2.0, 30.0])


def planned(asked: Problem, hw: HardwareProfile) -> Plan | None:
    try:
        return joint_search(asked, hw)
    except InfeasiblePlan:
        return None


def seconds(plan: Plan) -> float:
    assert plan.division is not None
    return plan.division.step_s


UPDATED = list(itertools.product((Tier.HOST, Tier.NVME), (None, Tier.HOST, Tier.NVME)))
"""States and waiting gradient: among them also updates in the next forward of what is in memory, which is never offered."""
FROZEN = [(Tier.NVME, None)]


# --- the best -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("megabytes", "in_memory"), [(100, 0), (140, 0), (500, 3), (1500, 4)])
def test_what_the_graph_does_not_read_gets_the_memory_that_is_left(megabytes: int, in_memory: int) -> None:
    """Beside four such parameters a step is as long as without them, and of them as many are in memory as fit."""
    without = problem(megabytes * MIB, megabytes * MIB)
    unread = tuple(ParameterFacts(f"head.{n}", 8 * MIB, 16 * MIB, True) for n in range(4))
    fetches = {p.name: (1, 1) for p in without.parameters}
    asked = replace(without, parameters=(*without.parameters, *unread), fetches=fetches)
    plan, alone = joint_search(asked, hardware(True)), joint_search(without, hardware(True))
    assert seconds(plan) == pytest.approx(seconds(alone), rel=1e-3)
    heads = [p for p in plan.parameters if p.name.startswith("head.")]
    assert sum(p.home is Tier.DEVICE for p in heads) == in_memory


def all_plans(asked: Problem) -> Iterator[Plan]:
    """Every plan of a small problem: any decision for each activation, any home for each large parameter."""
    found = asked.activations
    saving: list[Decision] = [Keep(), Swap(Tier.HOST), Swap(Tier.NVME)]
    choices = [saving if name in found.mandatory else [Recompute(), *saving] for name in found.activations]
    large = [p for p in asked.parameters if p.numel > 1 << 15]
    homes = [[(h, s, g) for h in Tier for s, g in (UPDATED if p.trainable else FROZEN)] for p in large]
    least = default_homes(asked, Tier.NVME)
    for decided in itertools.product(*choices):
        decisions = dict(zip(found.activations, decided, strict=True))
        for placed in itertools.product(*homes):
            at = dict(zip((p.name for p in large), placed, strict=True))
            resident = {name for name, (_, states, _) in at.items() if states is Tier.HOST}
            waiting = {name: gradient for name, (_, _, gradient) in at.items() if gradient is not None}
            placed_at = {**least, **{name: home for name, (home, _, _) in at.items()}}
            yield build_plan(asked, decisions, placed_at, Tier.NVME, resident, waiting=waiting)


@given(
    st.booleans(),
    TIGHT,
    st.integers(20, 60).map(lambda megabytes: megabytes * MIB),
    st.sampled_from([1, 2]),
    st.sampled_from([0.002, 0.02]),
    st.sampled_from([1, 6]),
    st.booleans(),
    st.sampled_from([0.0, 0.001, 0.01]),
    st.sampled_from([1, 1, 2]),
)
@examples(16)
def test_no_plan_at_all_is_faster(
    shared: bool,
    host: int,
    device: int,
    scale: int,
    time: float,
    megabytes: int,
    tail: bool,
    handover_s: float,
    forwards: int,
) -> None:
    asked = problem(
        host,
        host if shared else device,
        shared=shared,
        activations=blocks(1, scale=scale, seconds=time),
        parameters=facts(2, megabytes=megabytes),
        forward_s=4 * time,
        first=frozenset({"layers.0.fc.weight"} if tail else ()),
        last=frozenset({"layers.0.fc.weight"} if tail else ()),
    )
    asked, hw = replace(asked, handover_s=handover_s, forwards=forwards), hardware(shared)
    best = min((step_s(asked, plan, hw) for plan in all_plans(asked) if fits(asked, plan)), default=None)
    plan = planned(asked, hw)
    assert (plan is None) == (best is None)
    if plan is not None and best is not None:
        assert fits(asked, plan)
        assert step_s(asked, plan, hw) <= best * CLOSE
        assert plan.division is not None
        assert plan.division.bound_s <= best * CLOSE


def scaled(found: ActivationGraph, *, seconds: float) -> ActivationGraph:
    """A small graph with megabytes for its bytes, and its times in ``seconds``; what must be saved is read."""
    return replace(
        found,
        needed=found.needed | found.mandatory,
        seconds={name: seconds * time for name, time in found.seconds.items()},
        activations={name: replace(a, bytes=a.bytes * MIB) for name, a in found.activations.items()},
    )


@given(
    activation_graphs().filter(
        lambda found: len(useful(found)) >= LEAST_DECIDED and len(found.activations) <= MOST_DECIDED
    ),
    st.booleans(),
    st.integers(0, 120).map(lambda megabytes: megabytes * MIB),
    st.integers(0, 80).map(lambda megabytes: megabytes * MIB),
    st.sampled_from([1e-4, 1e-3, 0.01]),
    st.sampled_from([1e-4, 0.01, 0.1]),
    st.sampled_from([0.0, 0.001]),
    st.booleans(),
    st.sampled_from([1, 1, 2, 3]),
)
@examples(120, suppress_health_check=[HealthCheck.filter_too_much])
def test_no_plan_of_any_small_graph_is_faster_and_one_is_found_where_any_fits(
    found: ActivationGraph,
    shared: bool,
    host: int,
    device: int,
    time: float,
    forward_s: float,
    handover_s: float,
    has_drive: bool,
    forwards: int,
) -> None:
    """Every way to keep, swap or recompute, with prices for all of them: memory, links, drives (or none), seconds, handing
    over; and with memory for as many forwards as wait at once."""
    asked = problem(
        FIXED + host + (PEAK if shared else 0),
        FIXED + host + PEAK if shared else PEAK + device,
        shared=shared,
        activations=scaled(found, seconds=time),
        parameters=(),
        forward_s=forward_s,
    )
    asked, hw = replace(asked, handover_s=handover_s, forwards=forwards), hardware(shared)
    hw = hw if has_drive else replace(hw, nvme=())
    best = min((step_s(asked, plan, hw) for plan in all_plans(asked) if fits(asked, plan)), default=math.inf)
    plan = planned(asked, hw)
    assert (plan is None) == math.isinf(best)
    if plan is not None:
        assert fits(asked, plan)
        assert step_s(asked, plan, hw) <= best * CLOSE
        assert plan.division is not None and plan.division.bound_s <= best * CLOSE


def side_by_side(*megabytes: int) -> ActivationGraph:
    """Values of these sizes that must all be saved."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(f"v{place}" for place in range(len(megabytes)))
    sizes = dict(zip(graph, megabytes, strict=True))
    activations = {name: Activation(name, "op", name, "", "", size * MIB) for name, size in sizes.items()}
    none = dict.fromkeys(graph, 0)
    return ActivationGraph(graph, none, dict.fromkeys(graph, 0.0), activations, frozenset(graph), frozenset(graph))


def without_drives(host: int, device: int, *megabytes: int) -> Plan:
    asked = problem(
        FIXED + host * MIB,
        PEAK + device * MIB,
        shared=False,
        activations=side_by_side(*megabytes),
        parameters=(),
        forward_s=0.01,
    )
    return joint_search(replace(asked, handover_s=0.001), replace(hardware(False), nvme=()))


def test_where_the_solver_fails_the_best_is_found_all_the_same() -> None:
    """HiGHS 1.12 ends this one with an error. The link is handed one value, and not the three that leave the device first."""
    plan = without_drives(61, 62, 19, 11, 14, 44, 10)
    assert {a.node for a in plan.activations if isinstance(a.decision, Swap)} == {"v3"}
    assert plan.division is not None and plan.division.bound_s == pytest.approx(plan.division.step_s)


def test_what_memory_holds_in_pieces_only_needs_a_drive() -> None:
    assert {a.decision for a in without_drives(1, 17, 17).activations} == {Keep()}
    with pytest.raises(NoDrive):
        without_drives(1, 16, 17)


@given(PROBLEMS, MEMORY, MEMORY)
@examples(40)
def test_it_is_never_worse_than_the_grid_of_quarters(
    make: Callable[[int, int], Problem], host: int, device: int
) -> None:
    asked = make(host, device)
    hw = hardware(asked.budgets.shared)
    plan = planned(asked, hw)
    if plan is None:
        with pytest.raises(InfeasiblePlan):
            by_quarters(asked, hw)
    else:
        assert step_s(asked, plan, hw) <= step_s(asked, by_quarters(asked, hw), hw) * CLOSE


# --- what hardware may never do -------------------------------------------------------------------------------


@given(PROBLEMS, MEMORY, MEMORY, MEMORY, MEMORY)
@examples(30)
def test_more_memory_is_never_slower(
    make: Callable[[int, int], Problem], host: int, device: int, more_host: int, more_device: int
) -> None:
    asked, larger = make(host, device), make(host + more_host, device + more_device)
    plan = planned(asked, hardware(asked.budgets.shared))
    if plan is not None:
        assert seconds(joint_search(larger, hardware(asked.budgets.shared))) <= seconds(plan) * CLOSE


@given(PROBLEMS, MEMORY, MEMORY, FASTER, FASTER, FASTER, st.integers(1, 4))
@examples(40)
def test_faster_links_and_more_drives_are_never_slower(
    make: Callable[[int, int], Problem], host: int, device: int, h2d: float, d2h: float, ssd: float, drives: int
) -> None:
    asked = make(host, device)
    hw = hardware(asked.budgets.shared)
    drive = hw.nvme[0]
    faster = replace(
        drive,
        read_bytes_per_s=ssd * drive.read_bytes_per_s,
        write_bytes_per_s=ssd * drive.write_bytes_per_s,
        mixed_bytes_per_s=ssd * drive.mixed_bytes_per_s,
    )
    better = replace(
        hw,
        h2d_bytes_per_s=h2d * hw.h2d_bytes_per_s,
        d2h_bytes_per_s=d2h * hw.d2h_bytes_per_s,
        nvme=(faster,) * len(hw.nvme) * drives,
    )
    plan = planned(asked, hw)
    if plan is not None:
        assert seconds(joint_search(asked, better)) <= seconds(plan) * CLOSE


@given(PROBLEMS, MEMORY, MEMORY)
@examples(30)
def test_all_rates_doubled_halve_the_time(make: Callable[[int, int], Problem], host: int, device: int) -> None:
    asked = make(host, device)
    hw = hardware(asked.budgets.shared)
    plan = planned(asked, hw)
    if plan is None:
        return
    drive = hw.nvme[0]
    twice = replace(
        hw,
        h2d_bytes_per_s=2 * hw.h2d_bytes_per_s,
        d2h_bytes_per_s=2 * hw.d2h_bytes_per_s,
        host_memory_bytes_per_s=2 * hw.host_memory_bytes_per_s,
        adam_parameters_per_s=2 * hw.adam_parameters_per_s,
        io_core_s_per_request=hw.io_core_s_per_request / 2,
        io_core_s_per_byte=hw.io_core_s_per_byte / 2,
        nvme=tuple(
            replace(
                drive,
                read_bytes_per_s=2 * drive.read_bytes_per_s,
                write_bytes_per_s=2 * drive.write_bytes_per_s,
                mixed_bytes_per_s=2 * drive.mixed_bytes_per_s,
            )
            for drive in hw.nvme
        ),
    )
    halved = {name: time / 2 for name, time in asked.activations.seconds.items()}
    faster = replace(
        asked,
        activations=replace(asked.activations, seconds=halved),
        forward_s=asked.forward_s / 2,
        backward_s=asked.backward_s / 2,
        ends=replace(asked.ends, last_fetch_s=asked.ends.last_fetch_s / 2),
    )
    assert drive.read_bytes_per_s > 0
    assert seconds(joint_search(faster, twice)) == pytest.approx(seconds(plan) / 2, rel=1e-6)


@given(PROBLEMS, MEMORY, MEMORY)
@examples(40)
def test_a_plan_keeps_its_budgets_and_survives_json(
    make: Callable[[int, int], Problem], host: int, device: int
) -> None:
    asked = make(host, device)
    plan = planned(asked, hardware(asked.budgets.shared))
    if plan is not None:
        assert fits(asked, plan)
        assert asked.activations.mandatory <= saved(plan)
        assert Plan.from_json(plan.to_json()) == plan


def test_where_the_time_is_not_convex_the_plan_says_so_and_is_still_the_best() -> None:
    """Two large values that come from one slow op: to save one of them costs its traffic and spares nothing much."""
    graph = nx.DiGraph([("slow", "a"), ("slow", "b"), ("a", "out"), ("b", "out")])
    times = {"slow": 0.050, "a": 0.0002, "b": 0.0002, "out": 0.0001}
    sizes = {"slow": 9000, "a": 8, "b": 8, "out": 1}
    asked = problem(
        10_000 * MIB,
        PEAK + 2 * MIB,
        shared=False,
        activations=ActivationGraph(
            graph=graph,
            flops=dict.fromkeys(times, 1),
            seconds=times,
            activations={n: Activation(n, n, n, "h.0", "Block", size * MIB) for n, size in sizes.items()},
            needed=frozenset({"a", "b", "out"}),
            mandatory=frozenset({"out"}),
        ),
        parameters=(),
        forward_s=0.0001,
    )
    plan = joint_search(asked, hardware(False))
    assert any("not convex" in note and "went on" in note for note in plan.notes)
    assert saved(plan) == {"a", "b", "out"}
    assert not any("convex" in note for note in joint_search(problem(10**9, 10**9), hardware(True)).notes)


# --- the division ---------------------------------------------------------------------------------------------


@given(PROBLEMS, MEMORY, MEMORY)
@examples(40)
def test_the_division_adds_up_to_the_budgets(make: Callable[[int, int], Problem], host: int, device: int) -> None:
    asked = make(host, device)
    plan = planned(asked, hardware(asked.budgets.shared))
    if plan is None:
        return
    division = plan.division
    assert division is not None
    budgets = {Tier.HOST: host} if asked.budgets.shared else {Tier.HOST: host, Tier.DEVICE: device}
    for tier, nbytes in budgets.items():
        assert sum(share.bytes for share in division.shares if share.tier is tier) == nbytes
    assert {share.tier for share in division.shares} == set(budgets)
    assert all(share.bytes >= 0 and share.saves_s >= 0 for share in division.shares)
    assert division.bound_s <= division.step_s * CLOSE
    assert division.step_s <= division.walk_s * CLOSE
    assert division.step_s == pytest.approx(step_s(asked, plan, hardware(asked.budgets.shared)))


@pytest.mark.parametrize("shared", [True, False])
def test_the_states_of_the_last_gradient_stay_in_memory_before_others(shared: bool) -> None:
    """Compute hides the states of all but one: there is no room for all, and that one has some."""
    room = 12 * 4 * MIB + 8 * MIB
    for last in ("layers.0.fc.weight", "layers.2.fc.weight"):
        asked = problem(
            FIXED + (PEAK + 60 * MIB if shared else 0) + room,
            PEAK + 60 * MIB,
            shared=shared,
            activations=blocks(seconds=0.0005),
            forward_s=2.0,
            first=frozenset({last}),
            last=frozenset({last}),
        )
        plan = joint_search(asked, one_core(shared))
        at_home = {p.name for p in plan.parameters if p.states_home is Tier.HOST and p.numel > 1 << 15}
        assert last in at_home and len(at_home) < 3
        assert step_s(asked, plan, one_core(shared)) == pytest.approx(seconds(plan))


def one_core(shared: bool) -> HardwareProfile:
    """Where a core updates beside compute, no other waits for it, and requests to the drives cost it next to nothing."""
    return replace(hardware(shared), cpu_cores=1, io_core_s_per_request=1e-12)


@pytest.mark.parametrize("shared", [True, False])
def test_updates_are_put_off_where_the_drives_rest_in_the_forward(shared: bool) -> None:
    """Drives bind in the backward and compute in the forward: some is moved from one to the other, and nothing of
    what the forward fetches first."""
    first = frozenset({"layers.0.fc.weight"})
    host = FIXED + (PEAK if shared else 0) + 90 * MIB
    few = dict(shared=shared, activations=blocks(seconds=1e-6), parameters=facts(8, megabytes=32), first=first)
    hw = one_core(shared)
    busy = problem(host, host, forward_s=0.8 if shared else 0.03, **few)  # type: ignore[arg-type]
    plan = joint_search(busy, hw)
    put_off = {p.name for p in plan.parameters if p.optimizer_runs is OptimizerTiming.NEXT_FORWARD}
    assert put_off and not put_off & first
    assert all(p.states_home is Tier.NVME for p in plan.parameters if p.name in put_off)
    inside = tuple(
        replace(p, optimizer_runs=OptimizerTiming.IN_BACKWARD, gradient_home=None) if p.name in put_off else p
        for p in plan.parameters
    )
    assert step_s(busy, plan, hw) < 0.97 * step_s(busy, replace(plan, parameters=inside), hw)
    division = plan.division
    assert division is not None
    waiting = sum(share.bytes for share in division.shares if share.use is Use.GRADIENTS)
    assert waiting == sum(p.bytes for p in plan.parameters if p.gradient_home is Tier.HOST)


def test_homes_are_spread_over_the_layers() -> None:
    asked = problem(FIXED + 250 * MIB, PEAK + 30 * MIB, shared=False, parameters=facts(12), forward_s=0.01)
    plan = joint_search(asked, hardware(False))
    states = [p.states_home for p in plan.parameters if p.numel > 1 << 15 and p.trainable]
    assert {Tier.HOST, Tier.NVME} == set(states)
    rows = [len(list(row)) for _, row in itertools.groupby(states)]
    few = min(states.count(Tier.HOST), states.count(Tier.NVME))
    assert states[0] is Tier.HOST
    assert max(rows) <= -(-len(states) // few) + 1


def test_memory_is_worth_seconds_where_it_is_short_and_none_where_it_is_not() -> None:
    asked = problem(FIXED + 40 * MIB, PEAK + 9 * MIB, shared=False, activations=blocks(seconds=0.0005), forward_s=0.002)
    division = joint_search(asked, hardware(False)).division
    assert division is not None and division.per_byte_s["host"] > 0
    uses = {share.use for share in division.shares if share.tier is Tier.HOST and share.saves_s > 0}
    assert uses & {Use.ACTIVATIONS, Use.PARAMETERS, Use.STATES}
    plenty = joint_search(problem(10_000 * MIB, 10_000 * MIB), hardware(True)).division
    assert plenty is not None and plenty.per_byte_s == {"device": 0.0, "host": 0.0}


def test_a_machine_without_drives_plans_in_memory_or_says_that_it_has_none() -> None:
    hw = replace(hardware(False), nvme=())
    plan = joint_search(problem(2000 * MIB, PEAK + 30 * MIB, shared=False), hw)
    assert Swap(Tier.NVME) not in {a.decision for a in plan.activations}
    assert Tier.NVME not in {tier for p in plan.parameters for tier in (p.home, p.states_home)}
    with pytest.raises(NoDrive, match=r"needs a drive, and .* has none: parameters and states take [\d,]+ bytes"):
        joint_search(problem(FIXED + 20 * MIB, PEAK + 30 * MIB, shared=False), hw)


# --- what the graphs really need ------------------------------------------------------------------------------


def counted(asked: Problem, peak: Callable[[Plan], int]) -> tuple[Problem, list[Plan]]:
    calls: list[Plan] = []

    def device_peak(plan: Plan) -> int:
        calls.append(plan)
        return peak(plan)

    return replace(asked, device_peak=device_peak), calls


def kept(plan: Plan) -> int:
    return sum(a.bytes for a in plan.activations if isinstance(a.decision, Keep))


def test_the_graphs_are_rewritten_as_seldom_as_can_be() -> None:
    roomy, calls = counted(problem(10_000 * MIB, 10_000 * MIB), lambda plan: PEAK + kept(plan))
    joint_search(roomy, hardware(True))
    assert len(calls) == 1
    tight, calls = counted(problem(FIXED + 60 * MIB, 10_000 * MIB), lambda plan: PEAK + kept(plan))
    joint_search(tight, hardware(True))
    assert len(calls) == 2


def test_graphs_that_need_more_than_the_least_plans_are_planned_again() -> None:
    """Each recomputation needs a megabyte of its own; what is kept must leave room for that."""

    def peak(plan: Plan) -> int:
        again = sum(isinstance(a.decision, Recompute) for a in plan.activations)
        return PEAK + kept(plan) + (0 if again > 11 else 9 * MIB)

    asked, calls = counted(problem(10_000 * MIB, PEAK + 30 * MIB, shared=False, forward_s=2.0), peak)
    plan = joint_search(asked, hardware(False))
    assert peak(plan) + sum(p.bytes for p in plan.parameters if p.home is Tier.DEVICE) <= PEAK + 30 * MIB
    assert len(calls) <= 6
    assert kept(plan) > 0


def test_memory_that_graphs_turn_out_not_to_need_is_used() -> None:
    """The least plan keeps nothing and has much in flight; with outputs kept, the graphs need far less."""

    def peak(plan: Plan) -> int:
        return PEAK + kept(plan) + (0 if kept(plan) else 20 * MIB)

    fast = problem(10_000 * MIB, PEAK + 40 * MIB, shared=False, activations=blocks(seconds=0.0005), forward_s=0.0001)
    asked, calls = counted(fast, peak)
    plan = joint_search(asked, hardware(False))
    assert kept(plan) + sum(p.bytes for p in plan.parameters if p.home is Tier.DEVICE) > 30 * MIB
    assert len(calls) <= 5


def test_little_is_not_swapped_where_what_is_on_its_way_takes_more_memory_than_that() -> None:
    """The least plan swaps, and so do all that are found with what its graphs need, windows included."""

    def peak(plan: Plan) -> int:
        swaps = any(isinstance(a.decision, Swap) for a in plan.activations)
        return PEAK + kept(plan) + (40 * MIB if swaps else 0)

    windows = replace(WINDOWS, swap_in_bytes=20 * MIB, swap_out_bytes=20 * MIB)
    tight = replace(problem(FIXED + PEAK + 42 * MIB, 10_000 * MIB), windows=windows)
    asked, calls = counted(tight, peak)
    plan = joint_search(asked, hardware(True))
    assert not any(isinstance(a.decision, Swap) for a in plan.activations)
    assert peak(plan) + sum(resident_bytes(plan)) <= PEAK + 42 * MIB
    assert len(calls) <= 6


def test_windows_shrink_where_not_even_the_least_plan_fits_with_them() -> None:
    wide = replace(WINDOWS, fetch_bytes=16 * MIB, swap_in_bytes=8 * MIB, gradient_bytes=16 * MIB)

    def peak(plan: Plan) -> int:
        windows = plan.windows
        return PEAK + kept(plan) + windows.fetch_bytes + windows.swap_in_bytes + windows.gradient_bytes

    for room, share in ((41, 1.0), (30, 0.25), (5, 0.0)):
        asked = problem(10_000 * MIB, PEAK + room * MIB, shared=False, parameters=facts(megabytes=64))
        plan = joint_search(replace(asked, windows=wide, device_peak=peak), hardware(False))
        assert plan.windows.gradient_bytes == share * wide.gradient_bytes
        assert peak(plan) + sum(p.bytes for p in plan.parameters if p.home is Tier.DEVICE) <= PEAK + room * MIB


# --- prefetch -------------------------------------------------------------------------------------------------


def test_windows_take_device_memory_that_is_left_and_stay_within_it() -> None:
    asked = problem(10_000 * MIB, PEAK + 16 * MIB, shared=False, parameters=facts(megabytes=64))
    plan = joint_search(asked, hardware(False))
    used = PEAK + kept(plan) + sum(p.bytes for p in plan.parameters if p.home is Tier.DEVICE)
    room = plan.windows.fetch_bytes + plan.windows.swap_in_bytes
    assert 0 < room <= asked.budgets.device_memory_bytes - used


def test_on_a_cpu_the_windows_stay_as_they_are() -> None:
    asked = problem(FIXED + 60 * MIB, 10_000 * MIB)
    assert joint_search(asked, hardware(True)).windows == asked.windows


# --- size -----------------------------------------------------------------------------------------------------


def deep(layers: int, each: int = 40, tensors: int = 10) -> Problem:
    """Blocks of ``each`` activations in a row, read by the backward but for every third, and ``tensors`` parameters."""
    graph: nx.DiGraph = nx.DiGraph()
    names = [f"op{i}.{layer}" for layer in range(layers) for i in range(each)]
    nx.add_path(graph, names)
    numbers = {name: int(name[2:].partition(".")[0]) for name in names}
    activations = {
        name: Activation(name, f"op{i}", name, f"h.{name.partition('.')[2]}", "Block", (1 + i % 5) * 40 * MIB)
        for name, i in numbers.items()
    }
    found = ActivationGraph(
        graph=graph,
        flops={name: (i % 7) * 10**12 for name, i in numbers.items()},
        seconds={name: 0.0002 + (i % 7) * 0.006 for name, i in numbers.items()},
        activations=activations,
        needed=frozenset(name for name, i in numbers.items() if i % 3),
        mandatory=frozenset(name for name, i in numbers.items() if i == each - 1),
    )
    numels = [10**4 if i % 2 else (1 + i) * 10**7 for i in range(tensors)]
    parameters = tuple(
        ParameterFacts(f"h.{layer}.w{i}", numel, 2 * numel, True)
        for layer in range(layers)
        for i, numel in enumerate(numels)
    )
    total = sum(found.seconds.values())
    asked = problem(200 << 30, 20 << 30, shared=False, activations=found, parameters=parameters, forward_s=total)
    return replace(asked, device_peak=lambda plan: (2 << 30) + kept(plan))


def test_a_deep_model_is_no_larger_a_problem_than_a_shallow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 equal layers: thousands of activations and a thousand parameters are a hundred whole numbers to find."""
    from lohan_fx.planning import joint_search as module

    sizes: list[int] = []
    solve = module.optimum

    def noted(model: module.Model, **options: float) -> object:  # type: ignore[name-defined]
        sizes.append(model.integers)
        return solve(model, **options)

    monkeypatch.setattr(module, "optimum", noted)
    for layers in (4, 96):
        asked, calls = counted(deep(layers), deep(layers).device_peak)
        plan = joint_search(asked, hardware(False))
        assert len(calls) <= 3
        assert len(plan.activations) >= 39 * layers
        assert plan.division is not None
        assert plan.division.step_s <= 1.0001 * plan.division.bound_s
    assert sizes[0] == sizes[-1] < 200
