"""literal_search: Algorithm 1 as printed, with the faults that the paper's text has."""

from __future__ import annotations

import math

import networkx as nx
import pytest

from lohan_fx.passes.activation_graph import Activation, ActivationGraph
from lohan_fx.passes.literal_search import LiteralChoice, literal_search
from lohan_fx.passes.search import search
from tests.passes.paper_transformer import MATMULS, Transformer, machine

GB = 1e9
RATE = 164e12


def literal(model: Transformer) -> LiteralChoice:
    return literal_search(model.graph, lambda nbytes, flops: model.step_s(nbytes, flops / RATE))


def test_it_can_return_less_than_its_minimum_and_the_corrected_one_cannot() -> None:
    """9.8 < 10.1 GB at batch 24 (mechanisms c3.3)."""
    model = Transformer(24, machine())
    inter_block = sum(model.graph.activations[name].bytes for name in model.graph.mandatory)
    assert (literal(model).swapped_bytes / GB, inter_block / GB) == pytest.approx((9.8, 10.1), abs=0.05)
    assert search(model.graph, model.step_s).saved_bytes == inter_block


def test_it_never_swaps_what_recomputation_starts_from() -> None:
    model = Transformer(32, machine())
    found = literal(model)
    assert {name.partition(".")[0] for name in found.swap_list} <= MATMULS.keys()
    assert not model.graph.mandatory & set(found.swap_list)


def _layers(*flops: int, mandatory: str = "") -> ActivationGraph:
    names = [f"v{i}" for i in range(len(flops))]
    graph: nx.DiGraph = nx.DiGraph()
    nx.add_path(graph, names)
    activations = {name: Activation(name, "op", name, "", "", 1) for name in names}
    costs = dict(zip(names, flops, strict=True))
    seconds = {name: float(flop) for name, flop in costs.items()}
    return ActivationGraph(graph, costs, seconds, activations, frozenset(names), frozenset(mandatory.split()))


def test_it_walks_by_descending_benefit_and_counts_flops_of_layers() -> None:
    found = literal_search(_layers(3, 9, 5), lambda nbytes, flops: 100 - nbytes)
    assert (found.swap_list, found.swapped_bytes, found.recompute_flops) == (("v1", "v2", "v0"), 3, 0)
    assert literal_search(_layers(3, 9, 5), lambda nbytes, flops: flops, forward_flops=20).recompute_flops == 3


def test_it_stops_on_a_plateau() -> None:
    times = {1: 9.0, 2: 9.0, 3: 1.0}
    assert literal_search(_layers(3, 9, 5), lambda nbytes, flops: times[nbytes]).swap_list == ("v1",)


def test_states_below_the_minimum_spoil_the_least_time() -> None:
    """Nothing stops it below A_interBlock, but what it sees there is what later states are held against."""
    times = {1: 2.0, 2: 9.0, 3: 3.0}
    found = literal_search(_layers(3, 9, 5, mandatory="v0 v1 v2"), lambda nbytes, flops: times[nbytes])
    assert (found.swap_list, found.swapped_bytes, found.least_s) == (("v1", "v2"), 2, 2.0)


def test_nothing_to_swap() -> None:
    assert literal_search(_layers(), lambda nbytes, flops: 1.0) == LiteralChoice((), 0, 0, math.inf)
