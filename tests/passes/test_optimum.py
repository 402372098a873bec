"""optimum: integer programming against brute force, and bounds that hold."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import OptimizeResult

from lohan_fx.passes import optimum as module
from lohan_fx.passes.activation_graph import ActivationGraph
from lohan_fx.passes.decision_model import Adds, LaneTime, Line, Model, Quantity, Size, Thing
from lohan_fx.passes.independent_parts import independent_parts, saved_names
from lohan_fx.passes.optimum import optimum, relaxed
from lohan_fx.passes.search import read, search
from lohan_fx.passes.solver import milp
from tests.exhaustive import examples
from tests.passes.graphs import reachable
from tests.passes.paper_transformer import Transformer, machine
from tests.passes.small_graphs import activation_graphs, repeated

CLOSE = 1e-6
Q = Quantity


def places(nbytes: int) -> tuple[Adds, ...]:
    """Kept, swapped to host, swapped to NVMe."""
    return (
        {Q.DEVICE: nbytes},
        {Q.SWAPPED: nbytes, Q.HOST: nbytes},
        {Q.SWAPPED: nbytes, Q.SWAPPED_NVME: nbytes},
    )


def sizes_of(found: ActivationGraph) -> tuple[Size, ...]:
    mandatory = Counter(found.activations[name].bytes for name in found.mandatory)
    sizes = sorted({a.bytes for a in found.activations.values()})
    return tuple(Size(nbytes, mandatory[nbytes], places(nbytes)) for nbytes in sizes)


rates = st.integers(0, 20).map(lambda rate: rate / 10)
lines = st.builds(Line, st.integers(0, 40).map(float), st.dictionaries(st.sampled_from(Quantity), rates, max_size=4))
lanes = st.builds(lambda found: LaneTime(tuple(found)), st.lists(lines, min_size=1, max_size=2))
stages = st.lists(lanes, min_size=1, max_size=3).map(tuple)
moved = [quantity for quantity in Quantity if quantity is not Quantity.RECOMPUTE_S]
adds = st.dictionaries(st.sampled_from(moved), st.integers(0, 30).map(float), max_size=4)
things = st.builds(Thing, st.integers(1, 3), st.lists(adds, min_size=1, max_size=3).map(tuple))


@st.composite
def models(draw: st.DrawFn) -> tuple[ActivationGraph, Model]:
    found = draw(activation_graphs(ops=3))
    if draw(st.booleans()):
        found = repeated(draw(activation_graphs(ops=1)), 3)
    device, host = draw(st.integers(0, 80)), draw(st.integers(0, 80))
    return found, Model(
        blocks=independent_parts(found),
        sizes=sizes_of(found),
        things=tuple(draw(st.lists(things, max_size=2))),
        stages=tuple(draw(st.lists(stages, min_size=1, max_size=2))),
        limits={Q.DEVICE: float(device), Q.HOST: float(host)},
    )


def added(parts: Sequence[Adds]) -> dict[Quantity, float]:
    return {quantity: sum(part.get(quantity, 0.0) for part in parts) for quantity in Quantity}


def outcomes(found: ActivationGraph, model: Model) -> Iterator[tuple[float, dict[Quantity, float]]]:
    """(seconds, quantities) of every way to decide, name by name, that keeps the limits."""
    ways: list[dict[Quantity, float]] = []
    free = sorted(set(found.activations) - found.mandatory)
    for count in range(len(free) + 1):
        for extra in itertools.combinations(free, count):
            saved = found.mandatory | set(extra)
            again = sum(found.seconds[name] for name in reachable(found, saved))
            for placed in itertools.product(*(places(found.activations[name].bytes) for name in sorted(saved))):
                ways.append(added([{Q.RECOMPUTE_S: again}, *placed]))
    each = [thing.options for thing in model.things for _ in range(thing.count)]
    for treated in itertools.product(*each):
        of_things = added(treated)
        for way in ways:
            total = {quantity: way[quantity] + of_things[quantity] for quantity in Quantity}
            if all(total[quantity] <= limit for quantity, limit in model.limits.items()):
                yield model.seconds(total), total


def distinct(model: Model) -> int:
    """How many ways brute force would try."""
    ways = 1
    for block in model.blocks:
        ways *= 4 ** (block.count * sum(nbytes is not None for nbytes in block.bytes))
    ways *= 3 ** sum(size.mandatory for size in model.sizes)
    for thing in model.things:
        ways *= len(thing.options) ** thing.count
    return ways


@given(models())
@examples(150)
def test_the_optimum_is_that_of_brute_force(case: tuple[ActivationGraph, Model]) -> None:
    found, model = case
    if distinct(model) > 20_000:
        return
    best = min((seconds for seconds, _ in outcomes(found, model)), default=None)
    solution = optimum(model)
    if best is None:
        assert solution is None
        return
    assert solution is not None and solution.exact
    assert solution.seconds == pytest.approx(best, rel=CLOSE, abs=CLOSE)
    assert solution.bound_s <= best * (1 + CLOSE) + CLOSE
    assert all(solution.quantities[quantity] <= limit for quantity, limit in model.limits.items())


def test_a_lane_takes_the_less_of_two_lines() -> None:
    """Ten things by one lane, which takes 1 s more for each up to 5 s in all, or by another, 2 s each."""
    bent = LaneTime((Line(1.0, {Q.STATES: 1.0}), Line(5.0, {})))
    model = Model(
        blocks=(),
        sizes=(),
        things=(Thing(10, ({Q.STATES: 1.0}, {Q.COPIED: 1.0})),),
        stages=((bent, LaneTime((Line(0.0, {Q.COPIED: 2.0}),), is_work=False)),),
        limits={},
    )
    solution = optimum(model)
    assert solution is not None and solution.exact and solution.seconds == solution.bound_s == 5.0
    assert solution.treated == ((8.0, 2.0),), "as few as make it no slower: they are more work"


def test_no_option_is_left_that_is_less_work_and_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the second search, for the least work, leaves: here it finds nothing."""
    made: list[OptimizeResult] = []

    def only_first(*args: Any, **options: Any) -> OptimizeResult:
        made.append(milp(*args, **options) if not made else OptimizeResult(x=None))
        return made[-1]

    monkeypatch.setattr(module, "milp", only_first)
    away, near = {Q.LATE_HELD_NVME: 1.0}, {Q.HOST: 1.0}
    lanes = (LaneTime((Line(9.0, {}),)), LaneTime((Line(0.0, {Q.LATE_HELD_NVME: 1.0}),)))
    model = Model(
        blocks=(), sizes=(), things=(Thing(6, (away, near)),), stages=(lanes,), limits={Q.HOST: 4.5, Q.DEVICE: 0.0}
    )
    solution = optimum(model)
    assert solution is not None and len(made) == 2
    assert solution.seconds == 9.0 and solution.treated == ((2.0, 4.0),) and solution.quantities[Q.HOST] == 4.0


@given(models())
@examples(100)
def test_what_the_solution_says_is_what_its_decisions_add_up_to(case: tuple[ActivationGraph, Model]) -> None:
    found, model = case
    solution = optimum(model)
    if solution is None:
        return
    saved = set(found.mandatory)
    for block, counts in zip(model.blocks, solution.saved, strict=True):
        saved |= saved_names(block, [int(count) for count in counts])
    again = sum(found.seconds[name] for name in reachable(found, saved))
    assert solution.quantities[Q.RECOMPUTE_S] == pytest.approx(again)
    assert solution.seconds == pytest.approx(model.seconds(solution.quantities))
    for size, counts in zip(model.sizes, solution.placed, strict=True):
        assert sum(counts) >= sum(found.activations[name].bytes == size.bytes for name in read(found, saved))
    for thing, counts in zip(model.things, solution.treated, strict=True):
        assert sum(counts) == thing.count


@given(models())
@examples(100)
def test_fractions_are_a_bound_and_tell_what_a_byte_is_worth(case: tuple[ActivationGraph, Model]) -> None:
    _, model = case
    solution, bound = optimum(model), relaxed(model)
    if solution is None:
        return
    assert bound is not None
    assert bound.bound_s <= solution.seconds * (1 + CLOSE) + CLOSE
    more = {quantity: limit + 1 for quantity, limit in model.limits.items()}
    larger = relaxed(replace(model, limits=more))
    assert larger is not None
    worth = sum(bound.per_byte_s.values())
    assert bound.bound_s - larger.bound_s <= worth + CLOSE  # a byte more is never worth more than the last one


@given(models(), st.integers(0, 50), st.integers(0, 50))
@examples(60)
def test_more_memory_is_never_slower(case: tuple[ActivationGraph, Model], device: int, host: int) -> None:
    _, model = case
    solution = optimum(model)
    if solution is None:
        return
    limits = {Q.DEVICE: model.limits[Q.DEVICE] + device, Q.HOST: model.limits[Q.HOST] + host}
    larger = optimum(replace(model, limits=limits))
    assert larger is not None
    assert larger.seconds <= solution.seconds * (1 + CLOSE) + CLOSE


# --- transformer blocks ---------------------------------------------------------------------------------------


def lines_of(model: Transformer) -> tuple[tuple[LaneTime, ...], ...]:
    """LoHan's T_f and T_b for what is saved, all of it on NVMe, as lines through three points of ``step_s``'s lanes."""
    hw = model.hw
    parameters = 13e9
    ssd = hw.ssd_read_bytes_per_s
    link = hw.d2h_bytes_per_s
    forward = (
        LaneTime((Line(model.forward_s, {}),)),
        LaneTime((Line(2 * parameters / link, {}),)),
        LaneTime((Line(0.0, {Q.SWAPPED: 1 / link}),)),
        LaneTime((Line(2 * parameters / ssd, {Q.SWAPPED_NVME: 1 / ssd}),)),
    )
    backward = (
        LaneTime((Line(2 * model.forward_s + model.head_s, {Q.RECOMPUTE_S: 1.0}),)),
        LaneTime((Line(2 * parameters / link, {Q.SWAPPED: 1 / link}),)),
        LaneTime((Line(28 * parameters / ssd, {Q.SWAPPED_NVME: 1 / ssd}),)),
    )
    return forward, backward


def model_of(model: Transformer, host_bytes: int) -> Model:
    return Model(
        independent_parts(model.graph),
        tuple(replace(size, options=size.options[1:]) for size in sizes_of(model.graph)),
        (),
        lines_of(model),
        {Q.HOST: float(host_bytes)},
    )


@pytest.mark.parametrize("as_captured", [False, True])
@pytest.mark.parametrize("batch", [8, 24, 32, 64])
@pytest.mark.parametrize(("ssd", "host_bytes"), [(6e9, 0), (28e9, 0), (28e9, 60 * 10**9), (28e9, 10**15), (100e9, 0)])
def test_the_search_is_within_one_percent_of_the_optimum_of_a_transformer(
    batch: int, ssd: float, host_bytes: int, as_captured: bool
) -> None:
    model = Transformer(batch, machine(ssd=ssd), host_bytes=host_bytes, as_captured=as_captured)
    best = optimum(model_of(model, host_bytes))
    assert best is not None and best.seconds <= best.bound_s * 1.0001
    walked = search(model.graph, model.step_s)
    assert walked.step_s <= 1.01 * best.seconds
    assert walked.step_s >= best.bound_s * (1 - CLOSE) - model.unit_bytes * 8 / ssd


# --- how long it may take -----------------------------------------------------------------------------------------


def test_work_is_limited_and_not_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes by how many whole numbers there are, a fifth of them for tidying; the clock is far away from both."""
    asked: list[Mapping[str, float]] = []

    def counting(*args: Any, options: Mapping[str, float], **more: Any) -> OptimizeResult:
        asked.append(options)
        return milp(*args, options=options, **more)

    monkeypatch.setattr(module, "milp", counting)
    model = model_of(Transformer(32, machine(ssd=28e9), host_bytes=60 * 10**9, as_captured=True), 60 * 10**9)
    optimum(model)
    first, second = asked
    assert first["node_limit"] == module.WORK // model.integers > module.LEAST_NODES
    assert second["node_limit"] == int(first["node_limit"] * module.TIDYING)
    assert first["time_limit"] == second["time_limit"] == module.TIME_LIMIT_S >= 10.0
    monkeypatch.setattr(module, "WORK", 0)
    optimum(model)
    assert asked[2]["node_limit"] == module.LEAST_NODES
