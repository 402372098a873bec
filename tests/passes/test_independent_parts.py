"""independent_parts: parts that are independent, equal ones together, and counts that say as much as names."""

from __future__ import annotations

import itertools
from dataclasses import replace

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.passes.activation_graph import Activation, ActivationGraph, closure
from lohan_fx.passes.independent_parts import Parts, independent_parts, saved_names
from tests.passes.graphs import reachable
from tests.passes.paper_transformer import BLOCKS, SIZES, Transformer, machine
from tests.passes.small_graphs import activation_graphs, repeated


@given(activation_graphs())
def test_every_savable_value_that_could_be_recomputed_is_in_one_part(found: ActivationGraph) -> None:
    names = [name for block in independent_parts(found) for copy in block.copies for name in copy]
    assert len(names) == len(set(names))
    recomputed = closure(found, found.mandatory)
    assert recomputed & set(found.activations) <= set(names) <= recomputed


@given(activation_graphs(), st.data())
def test_seconds_of_recomputation_add_up_over_the_parts(found: ActivationGraph, data: st.DataObject) -> None:
    saved = found.mandatory | data.draw(st.sets(st.sampled_from(sorted(found.activations))))
    total = 0.0
    for block in independent_parts(found):
        for copy in block.copies:
            inside = replace(found, graph=found.graph.subgraph(copy), needed=found.needed & set(copy))
            total += sum(found.seconds[name] for name in reachable(inside, saved))
    assert total == sum(found.seconds[name] for name in reachable(found, saved))


@given(activation_graphs(ops=4), st.integers(1, 4))
def test_copies_are_counted(found: ActivationGraph, times: int) -> None:
    alone, many = independent_parts(found), independent_parts(repeated(found, times))
    assert sum(block.count for block in many) == times * sum(block.count for block in alone)
    assert len(many) == len(alone)


def test_a_transformer_is_one_block_and_its_copies() -> None:
    (block,) = independent_parts(Transformer(8, machine(), as_captured=True).graph)
    # All but the output, which is saved, and fc2, which only the output reads.
    assert (block.count, len(block.seconds)) == (BLOCKS, len(SIZES) - 2)
    assert {name.partition(".")[2] for name in block.copies[3]} == {"3"}


def test_a_view_of_what_is_there_anyway_does_not_tie_blocks_together() -> None:
    graph = nx.DiGraph([("mask", "view"), ("view", "a"), ("view", "b")])
    activations = {name: Activation(name, "op", name, "", "", 1) for name in ("mask", "a", "b")}
    seconds = {"mask": 1.0, "view": 0.0, "a": 1.0, "b": 1.0}
    found = ActivationGraph(graph, {}, seconds, activations, frozenset("ab"), frozenset({"mask"}))
    (block,) = independent_parts(found)
    assert block.copies == (("a",), ("b",))


def test_names_that_are_not_in_order_are_put_in_order() -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from(["b", "a"])
    graph.add_edge("a", "b")
    activations = {name: Activation(name, "op", name, "", "", 1) for name in "ab"}
    found = ActivationGraph(graph, {}, {"a": 1.0, "b": 1.0}, activations, frozenset("b"), frozenset())
    (block,) = independent_parts(found)
    assert (block.copies, block.readers) == ((("a", "b"),), ((1,), ()))


def _least_again(block: Parts, found: ActivationGraph, counts: tuple[int, ...]) -> float:
    """Fewest seconds of recomputation with so many copies of each value saved, by trying all choices of copies."""
    columns = [
        [copies[place] for copies in block.copies]
        for place in range(len(block.seconds))
        if block.bytes[place] is not None
    ]
    wanted = [counts[place] for place in range(len(block.seconds)) if block.bytes[place] is not None]
    choices = [list(itertools.combinations(column, count)) for column, count in zip(columns, wanted, strict=True)]
    return min(
        sum(found.seconds[n] for n in reachable(found, found.mandatory.union(*chosen)))
        for chosen in itertools.product(*choices)
    )


@given(activation_graphs(ops=3), st.data())
@settings(max_examples=60)
def test_counts_say_as_much_as_names(alone: ActivationGraph, data: st.DataObject) -> None:
    """No choice of copies with these counts recomputes less than the one that ``saved_names`` makes."""
    found = repeated(alone, 3)
    blocks = independent_parts(found)
    if len(blocks) != 1:
        return
    (block,) = blocks
    counts = tuple(data.draw(st.integers(0, 3)) if nbytes is not None else 0 for nbytes in block.bytes)
    saved = saved_names(block, counts)
    for place, count in enumerate(counts):
        assert sum(copy[place] in saved for copy in block.copies) <= count
    seconds = sum(found.seconds[name] for name in reachable(found, found.mandatory | saved))
    assert seconds == _least_again(block, found, counts)
