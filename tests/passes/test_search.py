"""search: closures against reachability, Algorithm 1 against brute force and against the paper's own numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.passes.activation_graph import Activation, ActivationGraph, closure
from lohan_fx.passes.search import (
    Benefit,
    RecomputeClosure,
    bend,
    flops_per_byte,
    flops_per_swap_second,
    search,
    seconds_per_byte,
    useful,
)
from tests.exhaustive import examples
from tests.passes.graphs import reachable
from tests.passes.paper_transformer import (
    BLOCKS,
    MATMULS,
    PATH,
    READ_BY_BACKWARD,
    RESIDUAL,
    SIZES,
    Transformer,
    machine,
)
from tests.passes.small_graphs import activation_graphs

StepSeconds = Callable[[int, float], float]
GB = 1e9


# --- any small graph ------------------------------------------------------------------------------------------


@st.composite
def step_times(draw: st.DrawFn) -> StepSeconds:
    """T_f + T_b of mechanisms B2, with any constants."""
    compute, other, per_byte_forward, per_byte_backward, states = (draw(st.integers(0, 40)) for _ in range(5))

    def step_s(saved_bytes: int, recompute_s: float) -> float:
        forward = max(compute, saved_bytes * per_byte_forward / 20, other)
        return forward + max(2 * compute + recompute_s, states + saved_bytes * per_byte_backward / 20)

    return step_s


def state(found: ActivationGraph, saved: Collection[str]) -> tuple[int, float]:
    saved_bytes = sum(found.activations[name].bytes for name in saved)
    return saved_bytes, sum(found.seconds[name] for name in reachable(found, saved))


@given(activation_graphs(), st.data())
def test_closure_is_what_reaches_the_backward_without_being_saved(found: ActivationGraph, data: st.DataObject) -> None:
    saved = data.draw(st.sets(st.sampled_from(sorted(found.activations))))
    assert closure(found, saved) == reachable(found, saved)


@given(activation_graphs())
def test_useful_is_what_must_be_saved_and_what_would_be_recomputed(found: ActivationGraph) -> None:
    wanted = found.mandatory | reachable(found, found.mandatory)
    assert useful(found) == [name for name in found.activations if name in wanted]


@given(activation_graphs(), st.data())
def test_incremental_closure_stays_equal_to_the_full_one(found: ActivationGraph, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(found.activations))
    saved = set(found.mandatory)
    exact = RecomputeClosure(found, saved)
    for group in data.draw(st.lists(st.lists(names, max_size=3), max_size=6)):
        before = set(exact.recomputed)
        freed = exact.freed_by(group)
        assert exact.recomputed == before
        exact.save(group)
        saved.update(group)
        assert exact.recomputed == reachable(found, saved)
        assert freed == before - exact.recomputed


@given(activation_graphs(), step_times())
def test_search_returns_a_true_account_of_what_it_saves(found: ActivationGraph, step_s: StepSeconds) -> None:
    choice = search(found, step_s)
    assert found.mandatory <= choice.saved <= set(found.activations)
    assert choice.recomputed == reachable(found, choice.saved)
    assert (choice.saved_bytes, choice.recompute_s) == state(found, set(choice.saved))
    assert choice.recompute_flops == sum(found.flops[name] for name in choice.recomputed)
    assert choice.step_s == step_s(choice.saved_bytes, choice.recompute_s)


@given(activation_graphs(), step_times())
def test_search_is_never_worse_than_saving_only_what_must_be(found: ActivationGraph, step_s: StepSeconds) -> None:
    least = step_s(*state(found, set(found.mandatory)))
    assert search(found, step_s).step_s <= least * (1 + 1e-6)


@given(activation_graphs(), step_times())
def test_brute_force_finds_nothing_better_where_saving_is_free(found: ActivationGraph, step_s: StepSeconds) -> None:
    """Then more is never worse, and Algorithm 1 has to come out at the optimum of all subsets."""

    def free(saved_bytes: int, recompute_s: float) -> float:
        return step_s(0, recompute_s)

    rest = sorted(set(found.activations) - found.mandatory)
    subsets = itertools.chain.from_iterable(itertools.combinations(rest, n) for n in range(len(rest) + 1))
    best = min(free(*state(found, found.mandatory | set(extra))) for extra in subsets)
    assert search(found, free).step_s == pytest.approx(best)


@given(activation_graphs())
def test_nothing_more_is_saved_where_every_byte_costs_more_than_it_spares(found: ActivationGraph) -> None:
    choice = search(found, lambda saved_bytes, recompute_s: 1000.0 * saved_bytes + recompute_s + 1)
    assert choice.saved == found.mandatory


# --- transformer blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_captured", [False, True])
@pytest.mark.parametrize("batch", [8, 24, 32, 64])
@pytest.mark.parametrize(("ssd", "host_bytes"), [(6e9, 0), (28e9, 0), (28e9, 60 * 10**9), (28e9, 10**15), (100e9, 0)])
def test_a_transformer_is_within_one_percent_of_the_best_block_pattern(
    batch: int, ssd: float, host_bytes: int, as_captured: bool
) -> None:
    model = Transformer(batch, machine(ssd=ssd), host_bytes=host_bytes, as_captured=as_captured)
    assert search(model.graph, model.step_s).step_s <= 1.01 * model.best_pattern_s()


def test_fc2_goes_first_and_norms_last() -> None:
    """fc2 spares four times as many FLOPs per byte as the other layers (mechanisms B4)."""
    model = Transformer(32, machine())
    saved = search(model.graph, model.step_s).saved - model.graph.mandatory
    layers = {name.partition(".")[0] for name in saved}
    assert {f"fc2.{block}" for block in range(BLOCKS)} <= saved
    assert "fc2" in layers and layers <= MATMULS.keys()

    def only_so_many(saved_bytes: int, recompute_s: float) -> float:
        return recompute_s if saved_bytes <= (BLOCKS + 7) * model.unit_bytes else math.inf

    few = search(model.graph, only_so_many).saved - model.graph.mandatory
    assert {name.partition(".")[0] for name in few} == {"fc2"} and len(few) == 7


def test_the_papers_13b_numbers_come_out() -> None:
    """Batch 32 with MEM_avail = 0 (mechanisms d2, F2, accounting B): 30.9 GB, 33.0% recomputed, 19.40 s."""
    model = Transformer(32, machine())
    choice = search(model.graph, model.step_s)
    assert choice.saved_bytes / GB == pytest.approx(30.9, abs=4 * model.unit_bytes / GB)
    recomputed = (choice.recompute_s + model.head_s) / (2 * model.forward_s)
    assert recomputed == pytest.approx(0.330, abs=0.005)
    assert choice.step_s == pytest.approx(19.40, rel=0.002)


def test_smaller_batches_are_bound_by_the_drives_and_save_only_what_must_be() -> None:
    """Figure 9b: batch 24 is case 1, larger ones are not (mechanisms d3)."""
    model = Transformer(24, machine())
    assert search(model.graph, model.step_s).saved == model.graph.mandatory
    for batch in (32, 36, 48, 60):
        model = Transformer(batch, machine())
        assert search(model.graph, model.step_s).saved > model.graph.mandatory


# Invented blocks: any widths of the feed-forward part, rates of single matmuls and of memory, and prices.
LAYERS = tuple(SIZES)
REPEATED = 16


@dataclass(frozen=True)
class Block:
    """One block as captured, by layer: units of bytes, and seconds."""

    sizes: dict[str, int]
    seconds: dict[str, float]

    def graph(self, count: int) -> ActivationGraph:
        """So many of them in a row."""
        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from(f"{layer}.{number}" for number in range(count) for layer in LAYERS)
        for number, (source, user) in itertools.product(range(count), RESIDUAL + PATH):
            before = f"out.{number - 1}" if source == "in" else f"{source}.{number}"
            graph.add_edges_from([(before, f"{user}.{number}")] if before in graph else [])
        layer_of = {name: name.partition(".")[0] for name in graph}
        return ActivationGraph(
            graph,
            {name: int(MATMULS.get(layer, 0)) for name, layer in layer_of.items()},
            {name: self.seconds[layer] for name, layer in layer_of.items()},
            {name: Activation(name, layer, name, "", "Block", self.sizes[layer]) for name, layer in layer_of.items()},
            frozenset(name for name, layer in layer_of.items() if layer in READ_BY_BACKWARD),
            frozenset(name for name, layer in layer_of.items() if layer == "out"),
        )

    def patterns(self) -> list[tuple[int, float]]:
        """(bytes saved, seconds of recomputation) of every way to save some of a block's layers."""
        found = self.graph(1)
        free = sorted(set(found.activations) - found.mandatory)
        sets = itertools.chain.from_iterable(itertools.combinations(free, n) for n in range(len(free) + 1))
        saved = [found.mandatory | set(extra) for extra in sets]
        return [
            (
                sum(found.activations[name].bytes for name in names),
                sum(found.seconds[name] for name in closure(found, names)),
            )
            for names in saved
        ]


@st.composite
def invented_blocks(draw: st.DrawFn) -> Block:
    wide = draw(st.integers(2, 8))
    sizes = {**SIZES, "qkv": draw(st.sampled_from([2, 3])), "fc1": wide, "gelu": wide}
    work = {"qkv": 2 * sizes["qkv"], "proj": 2, "fc1": 2 * wide, "fc2": 2 * wide, "attention": draw(st.integers(1, 4))}
    pointwise_s = draw(st.sampled_from([0.0, 0.02, 0.2]))
    rate = st.sampled_from([0.7, 1.0, 1.4])
    seconds = {layer: work[layer] / draw(rate) if layer in work else pointwise_s * sizes[layer] for layer in LAYERS}
    return Block(sizes, seconds)


def best_mix_s(block: Block, step_s: StepSeconds) -> float:
    """The fastest step in which every block saves one of two sets of layers, by trying all. Of sets, those that no other is
    better than in both bytes and seconds."""
    best: list[tuple[int, float]] = []
    for nbytes, seconds in sorted(set(block.patterns())):
        if not best or seconds < best[-1][1]:
            best.append((nbytes, seconds))
    return min(
        step_s(n * one[0] + (REPEATED - n) * other[0], n * one[1] + (REPEATED - n) * other[1])
        for one, other in itertools.combinations_with_replacement(best, 2)
        for n in range(REPEATED + 1)
    )


@given(
    invented_blocks(),
    st.sampled_from([0.02, 0.5, 2.0]),
    st.sampled_from([0.0, 0.5, 2.0, 4.0]),
    st.integers(0, REPEATED * 4),
    st.integers(0, REPEATED * 20),
)
@examples(60)
def test_invented_blocks_are_within_one_percent_of_the_best_mix(
    block: Block, per_unit_s: float, states: float, kept: int, swapped: int
) -> None:
    """Of the units saved, ``kept`` stay, the others are swapped at ``per_unit_s``, no more than ``swapped``. The backward
    brings in states for ``states`` times what the forward computes."""
    forward_s = REPEATED * sum(block.seconds.values())

    def step_s(saved_bytes: int, recompute_s: float) -> float:
        away = max(0, saved_bytes - kept)
        if away > swapped:
            return math.inf
        return max(forward_s, away * per_unit_s) + max(
            2 * forward_s + recompute_s, states * forward_s + away * per_unit_s
        )

    found, best_s = search(block.graph(REPEATED), step_s), best_mix_s(block, step_s)
    assert math.isfinite(found.step_s) == math.isfinite(best_s)
    assert math.isinf(best_s) or found.step_s <= 1.01 * best_s


# --- how the walk ends ----------------------------------------------------------------------------------------


def _chain(*seconds: float) -> ActivationGraph:
    """Values of a byte each, all needed; the first is mandatory."""
    names = [f"v{i}" for i in range(len(seconds))]
    graph: nx.DiGraph = nx.DiGraph()
    nx.add_path(graph, names)
    activations = {name: Activation(name, "op", name, "", "", 1) for name in names}
    times = dict(zip(names, seconds, strict=True))
    return ActivationGraph(graph, dict.fromkeys(names, 0), times, activations, frozenset(names), frozenset({"v0"}))


def _by_size(*times: float) -> StepSeconds:
    return lambda saved_bytes, _: times[saved_bytes - 1]


def test_a_plateau_is_crossed() -> None:
    choice = search(_chain(1, 4, 3, 2, 1), _by_size(9, 9, 9, 7, 8))
    assert (set(choice.saved), choice.step_s) == ({"v0", "v1", "v2", "v3"}, 7)


def test_the_fastest_state_of_a_convex_walk_is_where_it_first_rises() -> None:
    choice = search(_chain(1, 4, 3, 2, 1), _by_size(9, 8, 8.5, 10, 12))
    assert (set(choice.saved), choice.step_s, choice.bend, choice.went_on) == ({"v0", "v1"}, 8, 0.0, False)


def test_where_the_walk_is_not_convex_the_search_goes_on_and_says_so() -> None:
    choice = search(_chain(1, 4, 3, 2, 1), _by_size(9, 8, 8.5, 1, 1))
    assert (len(choice.saved), choice.step_s, choice.went_on) == (4, 1, True)
    assert choice.bend == pytest.approx((8.5 - (9 - 2 * 8 / 3)) / 8.5)


def test_of_equally_fast_states_the_one_that_saves_least_is_taken() -> None:
    assert search(_chain(1, 4, 3, 2, 1), _by_size(9, 8, 8, 8, 9)).saved == {"v0", "v1"}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 50)), min_size=1, max_size=8))
def test_the_bend_is_the_distance_to_the_lowest_chord(steps: list[tuple[int, int]]) -> None:
    sizes = list(itertools.accumulate(size for size, _ in steps))
    walk = [(size, float(time)) for size, (_, time) in zip(sizes, steps, strict=True)]

    def hull(x: int) -> float:
        chords = [
            ly + (ry - ly) * (x - lx) / (rx - lx)
            for (lx, ly), (rx, ry) in itertools.product(walk, walk)
            if lx <= x <= rx and lx < rx
        ]
        return min(chords + [y for at, y in walk if at == x])

    assert bend(walk) == pytest.approx(max((y - hull(x)) / y for x, y in walk), abs=1e-8)


@given(st.lists(st.integers(-20, 20), max_size=8), st.integers(200, 300))
def test_a_convex_walk_has_no_bend(slopes: list[int], start: int) -> None:
    times = itertools.accumulate(sorted(slopes), initial=float(start))
    assert bend([(size, time) for size, time in enumerate(times)]) == 0.0


# --- orders ---------------------------------------------------------------------------------------------------


def _saved_first(benefit: Benefit) -> str:
    """Which of three independent values the walk saves first: one slow, one with many FLOPs, one small."""
    names = {"slow": (8.0, 10, 4), "heavy": (2.0, 80, 5), "small": (1.0, 15, 1)}
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(names)
    found = ActivationGraph(
        graph,
        {name: flops for name, (_, flops, _) in names.items()},
        {name: seconds for name, (seconds, _, _) in names.items()},
        {name: Activation(name, "op", name, "", "", nbytes) for name, (_, _, nbytes) in names.items()},
        frozenset(names),
        frozenset(),
    )
    steps: list[int] = []

    def step_s(saved_bytes: int, recompute_s: float) -> float:
        steps.append(saved_bytes)
        return 9 - len(steps) if len(steps) < 3 else 99

    return next(iter(search(found, step_s, benefit=benefit).saved))


def test_each_order_saves_its_own_first() -> None:
    assert _saved_first(seconds_per_byte) == "slow"
    assert _saved_first(flops_per_byte) == "heavy"
    assert _saved_first(flops_per_swap_second(lambda nbytes: nbytes / 4)) == "heavy"
    # A transfer that costs the same whatever its size favours large values, one that grows faster small ones.
    assert _saved_first(flops_per_swap_second(lambda nbytes: 1.0)) == "heavy"
    assert _saved_first(flops_per_swap_second(lambda nbytes: float(nbytes**3))) == "small"


def test_lohans_and_fuyous_orders_find_the_same_for_a_transformer() -> None:
    """Mechanisms B4: SBF is equivalent to OB where a swap takes time by its bytes."""
    model = Transformer(32, machine())
    fuyou = flops_per_swap_second(lambda nbytes: nbytes / 21.2e9)
    found = [search(model.graph, model.step_s, benefit=order) for order in (flops_per_byte, fuyou)]
    assert found[0] == found[1]
    assert found[0].step_s == pytest.approx(search(model.graph, model.step_s).step_s, rel=1e-3)


def test_rounding_is_not_slower() -> None:
    times = 9.0, 9.0 + 1e-12, 9.0 - 1e-12, 7.0, 8.0
    assert search(_chain(1, 4, 3, 2, 1), _by_size(*times)).step_s == 7


def test_parts_of_one_op_are_saved_together() -> None:
    """Half of an op's results would not spare the op."""
    graph = nx.DiGraph([("op", "a"), ("op", "b"), ("b", "c")])
    activations = {name: Activation(name, "op", producer, "", "", 1) for name, producer in (("a", "op"), ("b", "op"))}
    activations["c"] = Activation("c", "op", "c", "", "", 1)
    seconds = {"op": 8.0, "a": 0.0, "b": 0.0, "c": 1.0}
    found = ActivationGraph(graph, {}, seconds, activations, frozenset({"a", "b", "c"}), frozenset())
    choice = search(replace(found, flops=dict.fromkeys(seconds, 0)), lambda saved, again: again if saved < 3 else 99)
    assert (set(choice.saved), set(choice.recomputed)) == ({"a", "b"}, {"c"})


def _values(graph: nx.DiGraph, seconds: dict[str, float], savable: str) -> ActivationGraph:
    """Savable ones (a letter each) of a byte, all needed."""
    activations = {name: Activation(name, "op", name, "", "", 1) for name in savable}
    return ActivationGraph(graph, dict.fromkeys(seconds, 0), seconds, activations, frozenset(savable), frozenset())


def test_a_value_that_spares_nothing_yet_is_tried_again() -> None:
    """Both read ``shared``, which can go when both are saved; ``a`` is looked at first and spares nothing alone."""
    graph = nx.DiGraph([("shared", "a"), ("shared", "b"), ("own", "b")])
    found = _values(graph, {"shared": 5.0, "own": 1.0, "a": 0.0, "b": 0.0}, "ab")
    choice = search(found, lambda saved, again: again)
    assert (set(choice.saved), set(choice.recomputed)) == ({"a", "b"}, set())


def test_what_nothing_reads_once_a_later_value_is_saved_is_not_saved() -> None:
    """``a`` is only an input of ``b``, as a matmul is of a ReLU that the backward reads alone."""
    found = _values(nx.DiGraph([("a", "b")]), {"a": 5.0, "b": 1.0}, "ab")
    choice = search(replace(found, needed=frozenset("b")), lambda saved, again: again)
    assert (set(choice.saved), choice.saved_bytes, choice.recompute_s) == ({"b"}, 1, 0)
