"""activation_graph: the forward half as numbers, and recompute closures against reachability."""

from __future__ import annotations

import operator

import networkx as nx
import pytest
import torch
from torch.fx import Graph, GraphModule

from lohan_fx import meta
from lohan_fx.passes.activation_graph import (
    ActivationGraph,
    activation_graph,
    closure,
    crossing_values,
    forward_nodes,
    is_savable,
)
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.search import useful
from tests.passes.graphs import MODELS, capture, captured, flops_as_seconds, graph_of, reachable


@pytest.mark.parametrize("name", MODELS)
def test_closure_is_what_reaches_the_backward_without_being_saved(name: str) -> None:
    found = graph_of(captured(name))
    names = list(found.activations)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        saved = {n for n in names if torch.rand((), generator=generator) < 0.5}
        assert closure(found, saved) == reachable(found, saved)


def test_closure_notes_the_saved_values_that_it_starts_from() -> None:
    chain = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "d")])
    found = ActivationGraph(chain, {}, {}, {}, frozenset({"d"}), frozenset())
    reached: set[str] = set()
    assert closure(found, {"a", "b"}, reached=reached) == {"c", "d"}
    assert reached == {"b"}


@pytest.mark.parametrize("name", MODELS)
def test_views_cost_nothing_also_where_they_are_timed(name: str) -> None:
    subject = captured(name)
    found = activation_graph(subject.joint, num_outputs=subject.num_outputs, node_seconds=lambda cost: 1.0)
    views = {n.name for n in forward_nodes(subject.joint, subject.num_outputs) if meta.cost(n).is_view}
    assert views and found.seconds == {name: float(name not in views) for name in found.graph}


def test_two_layers_by_hand() -> None:
    found = graph_of(captured("two-layers"))
    assert list(found.graph) == ["t", "addmm", "relu", "t_1", "mm", "pow_1"]
    assert set(found.graph.edges) == {
        ("t", "addmm"),
        ("addmm", "relu"),
        ("relu", "mm"),
        ("t_1", "mm"),
        ("mm", "pow_1"),
    }
    assert {a.name: a.bytes for a in found.activations.values()} == {"addmm": 96, "relu": 96, "mm": 48, "pow_1": 48}
    assert found.needed == {"relu", "t_1", "mm"}
    assert found.mandatory == frozenset()
    assert found.flops["addmm"] == 2 * 3 * 4 * 8
    assert found.activations["relu"].op == "aten.relu"
    assert (found.activations["mm"].layer, found.activations["mm"].layer_kind) == ("second", "Linear")


def test_outputs_and_inputs_are_there_anyway() -> None:
    found = captured("branches")
    graph = graph_of(found)
    outputs = {n.name for n in found.joint.graph.output_node().all_input_nodes[:2]}
    assert outputs and not outputs & set(graph.graph)
    assert not {n for n in graph.graph if n.startswith(("primals", "tangents"))}


def test_blocks_hand_over_what_must_be_saved() -> None:
    found = captured("transformer")
    graph = graph_of(found)
    kinds = {n.name: n.target for n in found.joint.graph.nodes}
    between = {n for n in graph.mandatory if kinds[n] is torch.ops.aten.add.Tensor}
    assert {graph.activations[n].layer for n in between} == {"layers.0", "layers.1", "layers.2"}
    assert graph.mandatory - between == {"embedding"}
    assert len(between) == 3


def test_the_closure_of_a_block_stays_inside_it() -> None:
    found = captured("transformer")
    graph = graph_of(found)
    layers = {n.name: meta.cost(n).layer for n in found.joint.graph.nodes}
    for name in graph.needed - graph.mandatory:
        alone = ActivationGraph(graph.graph, {}, {}, {}, frozenset({name}), frozenset())
        recomputed = closure(alone, graph.mandatory) & set(graph.activations)
        assert {layers[n] for n in recomputed} <= {layers[name]}


def test_outputs_of_random_ops_must_be_saved() -> None:
    found = captured("dropout")
    graph = graph_of(found)
    drawn = {a.name for a in graph.activations.values() if a.op == "aten.native_dropout"}
    masks = {n for n in drawn if graph.activations[n].bytes == 2 * 8 * 16}
    assert len(masks) == 4 and masks <= graph.mandatory
    assert not closure(graph, graph.mandatory) & drawn


def test_a_random_value_that_nothing_would_replay_may_go() -> None:
    """The last dropout's value is read only by the sum after it, which is saved."""
    graph = graph_of(captured("dropout"))
    last = [a.name for a in graph.activations.values() if a.op == "aten.native_dropout"][-2]
    assert graph.activations[last].bytes == 4 * 2 * 8 * 16
    assert last not in graph.mandatory


@pytest.mark.parametrize("name", MODELS)
def test_what_is_useful_is_all_that_can_be_needed(name: str) -> None:
    graph = graph_of(captured(name))
    found = useful(graph)
    assert set(found) == (closure(graph, graph.mandatory) | graph.mandatory) & set(graph.activations)
    assert found == [n for n in graph.activations if n in set(found)]
    assert graph.mandatory <= set(found)


def test_forward_has_all_parts_of_what_its_ops_return() -> None:
    found = captured("transformer")
    forward = forward_nodes(found.joint, found.num_outputs)
    parents = {n.all_input_nodes[0] for n in forward if n.target is operator.getitem}
    for parent in parents:
        assert all(part in forward for part in parent.users if part.target is operator.getitem)


@pytest.mark.parametrize("name", MODELS)
def test_forward_ops_are_those_that_autograd_tagged(name: str) -> None:
    found = captured(name)
    forward = forward_nodes(found.joint, found.num_outputs)
    assert forward
    for node in forward:
        assert node.meta["partitioner_tag"] == "is_forward"
    left_out = [n for n in found.joint.graph.nodes if n not in forward and n.op == "call_function"]
    for node in left_out:
        assert node.meta["partitioner_tag"] == "is_backward" or node.target is torch.ops.aten.detach.default


def test_crossing_values_are_the_forward_values_and_inputs_that_the_backward_reads() -> None:
    found = captured("two-layers")
    assert [n.name for n in crossing_values(found.joint, 1)] == ["primals_3", "relu", "t_1", "mm"]


def test_a_forward_value_that_is_itself_a_gradient_crosses() -> None:
    graph = Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    doubled = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2))
    out = graph.call_function(torch.ops.aten.mul.Tensor, (doubled, 3))
    graph.output((out, doubled))
    gm = GraphModule({}, graph)
    for node in gm.graph.nodes:
        node.meta["val"] = torch.ones(2)
    annotate(gm)
    assert tangent.users == {}
    assert [n.name for n in crossing_values(gm, 1)] == ["mul_tensor"]
    assert activation_graph(gm, num_outputs=1, node_seconds=flops_as_seconds).needed == {"mul_tensor"}


def test_views_and_tuples_cannot_be_saved() -> None:
    nodes = {n.name: n for n in captured("transformer").joint.graph.nodes}
    assert [is_savable(nodes[n]) for n in ("addmm", "getitem", "native_layer_norm", "split", "view")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not is_savable(nodes["getitem_3"])  # a part of the split
    assert not is_savable(nodes["primals_1"])


class _Chain(torch.nn.Module):
    """Numbered layers that are single modules."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x).sum()


def test_in_a_plain_sequence_every_module_is_a_block() -> None:
    graph = graph_of(capture(_Chain(), torch.ones(2, 4)))
    assert graph.mandatory == {"tanh"}


class _Normed(torch.nn.Module):
    """Changes its running statistics in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(torch.sin(self.first(x)))).sum()


def test_ops_that_read_what_the_forward_changes_run_once() -> None:
    graph = graph_of(capture(_Normed(), torch.linspace(-1, 1, 12).view(3, 4)))
    normed = {name for name, a in graph.activations.items() if "batch_norm" in a.op}
    assert normed & graph.mandatory
    assert not closure(graph, graph.mandatory) & normed
    assert {a.op for name, a in graph.activations.items() if name in graph.mandatory} == {
        "aten._native_batch_norm_legit_functional"
    }
