"""insert_gradient_offload: every gradient of a parameter leaves once, complete, and after the parameter's last use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lohan_fx import meta, ops
from lohan_fx.passes.halves import outputs_of
from lohan_fx.passes.insert_gradient_offload import insert_gradient_offload
from lohan_fx.plan import Keep, Recompute
from tests.passes.fake_runtime import eager, run
from tests.passes.graphs import DECISIONS, MODELS, TwoLayers, capture, captured, nodes, plan_for, rewrite, text


def test_golden() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_gradient_offload)
    assert halves.backward is not None
    assert text(halves.backward).splitlines()[9:] == [
        "fetch_second_weight = fetch(primals_4, 2)",
        "wait_second_weight = wait(fetch_second_weight)",
        "t_1 = t(wait_second_weight)",
        "t_4 = t(t_1)",
        "mm_2 = mm(mul_1, t_4)",
        "t_5 = t(t_3)",
        "offload_grad_second_weight = offload_grad(t_5, 2)",
        "detach = detach(relu)",
        "detach_1 = detach(detach)",
        "threshold_backward = threshold_backward(mm_2, detach_1, 0)",
        "t_6 = t(threshold_backward)",
        "mm_3 = mm(t_6, primals_3)",
        "t_7 = t(mm_3)",
        "sum_1 = sum.dim_IntList(threshold_backward, (0), True)",
        "view = view(sum_1, (8))",
        "offload_grad_first_bias = offload_grad(view, 1)",
        "t_8 = t(t_7)",
        "offload_grad_first_weight = offload_grad(t_8, 0)",
        "return (None, None, None, None)",
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", ["recompute", "mixed"])
def test_the_numbers_stay(name: str, decision: str) -> None:
    """The fake runtime spoils a parameter when its gradient has left, as an optimizer at home on the device would."""
    found = captured(name)
    halves = rewrite(found, plan_for(found, DECISIONS[decision](found)), upto=insert_gradient_offload)
    every = range(len(found.parameters))
    assert run(halves, found, resident=every).equals(eager(found))


@pytest.mark.parametrize("name", MODELS)
def test_each_trainable_parameter_leaves_once_and_is_not_returned(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_gradient_offload)
    assert halves.backward is not None
    slots = [str(n.args[1]) for n in nodes(halves.backward, ops.OFFLOAD_GRAD)]
    assert sorted(slots) == sorted(str(p.slot) for p in found.parameters.values() if p.trainable)
    assert {outputs_of(halves.backward)[place] for place in halves.gradients} == {None}


@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_leaves_as_soon_as_it_is_complete_and_its_parameter_unused(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_gradient_offload)
    assert halves.backward is not None
    order = list(halves.backward.graph.nodes)
    for offload in nodes(halves.backward, ops.OFFLOAD_GRAD):
        showing = {n for n in nodes(halves.backward, ops.FETCH) if meta.origin(n) == meta.origin(offload)}
        last = order.index(offload.all_input_nodes[0])
        for place, node in enumerate(order):
            if showing & set(node.all_input_nodes):
                last = max(last, place)
                showing |= {node} if node.op == "call_function" and meta.cost(node).is_view else set()
        since = order[last + 1 : order.index(offload)]
        assert last < order.index(offload)
        assert all(n.target is ops.OFFLOAD_GRAD for n in since)


def test_gradients_of_inputs_stay_outputs() -> None:
    found = capture(TwoLayers(), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_())
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_gradient_offload)
    assert halves.backward is not None
    returned = outputs_of(halves.backward)
    assert [value is None for value in returned] == [True, True, False, True]


class Scaled(torch.nn.Module):
    """Its weight's gradient is there before the weight has been used for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, 12).view(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(self.first(x)) * self.weight).sum()


def test_a_gradient_that_is_complete_waits_for_the_last_use_of_its_parameter() -> None:
    found = capture(Scaled(), torch.linspace(-1, 1, 12).view(3, 4))
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_gradient_offload)
    assert halves.backward is not None
    order = list(halves.backward.graph.nodes)
    offload = next(n for n in order if n.name == "offload_grad_weight")
    wait = next(n for n in order if n.name == "wait_weight")
    complete = order.index(offload.all_input_nodes[0])
    assert complete < max(order.index(user) for user in wait.users) < order.index(offload)
    assert run(halves, found, resident=range(3)).equals(eager(found))


def test_the_gradient_of_a_parameter_that_is_not_trained_stays_an_output() -> None:
    found = captured("two-layers")
    frozen = {name: replace(p, trainable=p.name != "first.bias") for name, p in found.parameters.items()}
    halves = rewrite(replace(found, parameters=frozen), plan_for(found, Keep()), upto=insert_gradient_offload)
    assert halves.backward is not None
    assert [value is None for value in outputs_of(halves.backward)] == [True, False, True, True]


class Bias(torch.nn.Module):
    """Its parameter's gradient is the gradient that autograd hands in."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def test_a_gradient_that_is_an_input_of_the_backward_leaves_as_a_copy_after_all_inputs() -> None:
    found = capture(Bias(), torch.ones(4))
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_gradient_offload)
    assert halves.backward is not None
    assert text(halves.backward).splitlines()[1:] == [
        "own_bias = clone(tangents_1)",
        "offload_grad_bias = offload_grad(own_bias, 0)",
        "return (None, None)",
    ]
    assert run(halves, found).equals(eager(found))


class Positions(torch.nn.Module):
    """The gradient of one parameter is that of the input, transposed; the gradient of another is no view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Parameter(torch.linspace(0, 1, 12).view(4, 3))
        self.factor = torch.nn.Parameter(torch.linspace(1, 2, 12).view(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x + self.positions.t()) * self.factor).sum()


@pytest.mark.parametrize("trained", [False, True])
def test_a_gradient_that_is_returned_too_leaves_as_a_copy(trained: bool) -> None:
    found = capture(Positions(), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(trained))
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_gradient_offload)
    assert halves.backward is not None
    sources = {str(n.name): n.all_input_nodes[0] for n in nodes(halves.backward, ops.OFFLOAD_GRAD)}
    assert [n.name for n in nodes(halves.backward, torch.ops.aten.clone.default)] == ["own_positions"] * trained
    assert (sources["offload_grad_positions"].name == "own_positions") == trained
    assert (value := meta.tensor(sources["offload_grad_positions"])) is not None and value.is_contiguous() == trained
    assert run(halves, found).equals(eager(found))


def test_inference_has_no_gradients() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    halves.backward = None
    before = text(halves.forward)
    insert_gradient_offload(halves, plan_for(found, Keep()))
    assert text(halves.forward) == before
