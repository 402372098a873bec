"""search: closures against reachability, Algorithm 1 against brute force and against the paper's own numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx import cost
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import Activation, ActivationGraph, closure
from lohan_fx.passes.search import RecomputeClosure, search
from lohan_fx.presets import preset
from tests.passes.graphs import reachable

StepSeconds = Callable[[int, float], float]
GB = 1e9


# --- any small graph ------------------------------------------------------------------------------------------


@st.composite
def activation_graphs(draw: st.DrawFn) -> ActivationGraph:
    """Up to eight savable values: results of ops, parts of ops that return two, views between them."""
    graph: nx.DiGraph = nx.DiGraph()
    seconds: dict[str, float] = {}
    activations: dict[str, Activation] = {}
    readable: list[str] = []

    def add(name: str, sources: list[str], time: float) -> None:
        graph.add_node(name)
        graph.add_edges_from((source, name) for source in sources)
        seconds[name] = time

    def savable(name: str, producer: str) -> None:
        activations[name] = Activation(name, "op", producer, "", "", draw(st.integers(1, 50)))
        readable.append(name)

    for number in range(draw(st.integers(1, 6))):
        sources = draw(st.lists(st.sampled_from(readable), max_size=3, unique=True)) if readable else []
        kind = draw(st.sampled_from(["op", "op", "op", "view", "pair"]))
        name = f"{kind}{number}"
        if kind == "view" or (kind == "pair" and len(activations) > 6):
            add(f"view{number}", sources, 0.0)
            readable.append(f"view{number}")
        elif kind == "op":
            add(name, sources, float(draw(st.integers(0, 20))))
            savable(name, name)
        else:
            add(name, sources, float(draw(st.integers(0, 20))))
            for part in (f"{name}.0", f"{name}.1"):
                add(part, [name], 0.0)
                savable(part, name)
    needed = draw(st.sets(st.sampled_from(readable)))
    mandatory = draw(st.sets(st.sampled_from(sorted(activations)))) if activations else set()
    flops = {name: int(time) for name, time in seconds.items()}
    return ActivationGraph(graph, flops, seconds, activations, frozenset(needed), frozenset(mandatory))


@st.composite
def step_times(draw: st.DrawFn) -> StepSeconds:
    """T_f + T_b of mechanisms B2, with any constants."""
    compute, other, per_byte_forward, per_byte_backward, states = (draw(st.integers(0, 40)) for _ in range(5))

    def step_s(saved_bytes: int, recompute_s: float) -> float:
        forward = max(compute, saved_bytes * per_byte_forward / 20, other)
        return forward + max(2 * compute + recompute_s, states + saved_bytes * per_byte_backward / 20)

    return step_s


def state(found: ActivationGraph, saved: set[str]) -> tuple[int, float]:
    saved_bytes = sum(found.activations[name].bytes for name in saved)
    return saved_bytes, sum(found.seconds[name] for name in reachable(found, saved))


@given(activation_graphs(), st.data())
def test_closure_is_what_reaches_the_backward_without_being_saved(found: ActivationGraph, data: st.DataObject) -> None:
    saved = data.draw(st.sets(st.sampled_from(sorted(found.activations)))) if found.activations else set()
    assert closure(found, saved) == reachable(found, saved)


@given(activation_graphs(), st.data())
def test_incremental_closure_stays_equal_to_the_full_one(found: ActivationGraph, data: st.DataObject) -> None:
    names = st.sampled_from(sorted(found.activations)) if found.activations else st.nothing()
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


LAYERS = {"qkv": (3, 6.0), "attention": (1, 0.0), "proj": (1, 2.0), "fc1": (4, 8.0), "fc2": (1, 8.0)}
"""Size in units u = 2bsh bytes and FLOPs in units k = bsh^2 (mechanisms B4)."""
WITHOUT_FLOPS = {"norm1": 1, "norm2": 1, "gelu": 4}
HIDDEN, BLOCKS, LENGTH, VOCABULARY = 5120, 40, 1024, 50257
PARAMETERS = 13e9


class Blocks:
    """The papers' 13B model at one batch size: a chain of layers, all of whose outputs the backward needs.

    The block's output is a tensor of its own, which costs no FLOPs (accounting B of mechanisms c3.5).
    """

    def __init__(self, batch: int, hw: HardwareProfile, *, blocks: int = BLOCKS) -> None:
        tokens, self.hw = batch * LENGTH, hw
        unit, k = 2 * tokens * HIDDEN, tokens * HIDDEN**2
        graph: nx.DiGraph = nx.DiGraph()
        flops: dict[str, int] = {}
        activations: dict[str, Activation] = {}
        sizes = {name: units for name, (units, _) in LAYERS.items()} | WITHOUT_FLOPS | {"out": 1}
        work = {name: int(flop * k) for name, (_, flop) in LAYERS.items()}
        work["attention"] = 4 * batch * LENGTH**2 * HIDDEN
        order = ("norm1", "qkv", "attention", "proj", "norm2", "fc1", "gelu", "fc2", "out")
        previous = None
        for block, layer in itertools.product(range(blocks), order):
            name = f"{layer}.{block}"
            graph.add_node(name)
            if previous:
                graph.add_edge(previous, name)
            activations[name] = Activation(name, layer, name, f"layers.{block}", "Block", sizes[layer] * unit)
            flops[name] = work.get(layer, 0)
            previous = name
        self.rate = hw.matmul_rate_flops
        seconds = {name: flop / self.rate for name, flop in flops.items()}
        outs = frozenset(f"out.{block}" for block in range(blocks))
        self.graph = ActivationGraph(graph, flops, seconds, activations, frozenset(activations), outs)
        self.blocks, self.forward_flops = blocks, sum(flops.values()) + 2 * tokens * HIDDEN * VOCABULARY
