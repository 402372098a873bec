"""cut_segments: where graphs are cut, and that calls in place of the pieces compute and free the same."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen

from lohan_fx import meta, ops
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.cut_segments import Run, Segment, extract, replace_segments, segments_of
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Keep, Recompute, Swap, Tier
from tests.passes import graphs
from tests.passes.fake_runtime import eager, run
from tests.passes.graphs import captured

DECISIONS = [Keep(), Recompute(), Swap(Tier.NVME)]


def rewritten(name: str, decision: Keep | Recompute | Swap = Recompute()) -> Halves:  # noqa: B008
    found = captured(name)
    return graphs.rewrite(found, graphs.plan_for(found, decision))


def op_by_op(segment: Segment) -> Run:
    """Stands for a compiled segment: the same ops, boxed."""
    gm = extract(segment)
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()

    def call(args: list[Any]) -> Any:
        made = gm.forward(args)
        assert args == []
        return made

    return call


def with_calls(gm: GraphModule, make: Callable[[Segment], Run] = op_by_op) -> GraphModule:
    return replace_segments(gm, {segment.name: make(segment) for segment in segments_of(gm)})


def traced(function: Callable[..., Any], *inputs: torch.Tensor, fake: bool = True) -> GraphModule:
    gm = make_fx(function, tracing_mode="fake" if fake else "real")(*inputs)
    annotate(gm)
    return gm


def keys(gm: GraphModule) -> list[Any]:
    return [segment.key for segment in segments_of(gm)]


@pytest.mark.parametrize("name", graphs.MODELS)
@pytest.mark.parametrize("decision", DECISIONS, ids=str)
def test_calls_in_place_of_segments_compute_what_the_model_does(name: str, decision: Keep | Recompute | Swap) -> None:
    found, halves = captured(name), rewritten(name, decision)
    assert halves.backward is not None
    called = dataclasses.replace(halves, forward=with_calls(halves.forward), backward=with_calls(halves.backward))
    assert run(called, found).equals(eager(found))


@pytest.mark.parametrize("name", ["transformer", "dropout"])
def test_segments_hold_no_node_of_ours_no_matmul_and_nothing_random(name: str) -> None:
    for _, gm in rewritten(name, Swap(Tier.NVME)).graphs():
        order = graphs_order(gm)
        for segment in segments_of(gm):
            between = [n for n in gm.graph.nodes if order[segment.nodes[0]] <= order[n] <= order[segment.nodes[-1]]]
            assert not any(n.target in ops.ALL or meta.cost(n).flops or meta.cost(n).is_random for n in between)
            assert len(segment.computing) >= 2


def graphs_order(gm: GraphModule) -> Mapping[Any, int]:
    return {node: place for place, node in enumerate(gm.graph.nodes)}


def test_segments_of_equal_blocks_are_equal() -> None:
    for _, gm in rewritten("transformer").graphs():
        found = keys(gm)
        inner = [k for k in set(found) if found.count(k) >= 2]
        assert inner and len(set(found)) < len(found)


def test_segments_that_differ_in_a_number_a_shape_or_an_output_are_not_equal() -> None:
    def scaled(by: float) -> Callable[[torch.Tensor], Any]:
        return lambda x: (x * by).sin()

    x = torch.ones(3, 4)
    one = keys(traced(scaled(2.0), x))
    assert one == keys(traced(scaled(2.0), x))
    assert one != keys(traced(scaled(3.0), x))
    assert one != keys(traced(scaled(2.0), torch.ones(4, 3)))
    assert one != keys(traced(scaled(2.0), torch.ones(4, 3).t()))
    assert one != keys(traced(scaled(2.0), x.double()))
    assert one != keys(traced(lambda x: ((made := x * 2.0), made.sin()), x))


def test_a_view_that_leaves_is_taken_outside() -> None:
    gm = traced(lambda x: ((x + 1).sin().t().contiguous().mm(x), (x * 2).sin().view(-1)), torch.rand(3, 3))
    for segment in segments_of(gm):
        assert not any(meta.cost(n).is_view for n in segment.outputs)
    x = torch.rand(3, 3)
    assert all(map(torch.equal, with_calls(gm)(x), gm(x)))


def test_ops_that_share_nothing_are_segments_of_their_own() -> None:
    gm = traced(lambda x, y: (x.sin().cos(), y.exp().log()), torch.ones(3), torch.ones(4))
    assert [len(segment.inputs) for segment in segments_of(gm)] == [1, 1]


def test_a_single_op_is_no_segment() -> None:
    assert segments_of(traced(lambda x: x.sin().sum().cos(), torch.ones(3))) == []


def test_ops_on_sizes_that_are_not_known_are_no_segment() -> None:
    gm = make_fx(lambda x: x.sin().cos(), tracing_mode="symbolic")(torch.ones(5))
    annotate(gm)
    assert segments_of(gm) == []


def test_an_input_dies_inside_the_segment_that_reads_it_last() -> None:
    seen: list[bool] = []

    def watching(segment: Segment) -> Run:
        compiled = op_by_op(segment)

        def call(args: list[Any]) -> Any:
            made = compiled(args)
            gc.collect()
            seen.append(reference() is None)
            return made

        return call

    gm = with_calls(traced(lambda x: x.sin().cos(), torch.ones(3)), watching)
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    x = torch.ones(3)
    reference = weakref.ref(x)
    arguments: list[Any] = [x]
    del x
    assert torch.equal(gm.forward(arguments), torch.ones(3).sin().cos())
    assert seen == [True]
