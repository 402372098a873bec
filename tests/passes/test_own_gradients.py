"""Gradients that a custom backward returns without having made them are copied; others are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Node

from lohan_fx import meta
from lohan_fx.meta import Phase
from lohan_fx.passes.activation_graph import crossing_values
from lohan_fx.passes.halves import outputs_of
from lohan_fx.passes.own_gradients import own_gradients
from tests.passes.graphs import MODELS, capture, captured


class ReturnsWhatItRead(torch.autograd.Function):
    """A product whose gradients are what went into it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return weight.view(-1).view(weight.shape), x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 12).view(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ReturnsWhatItRead.apply(x, self.weight).sum()


class Shifted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def test_inputs_and_their_views_are_copied_in_the_backward() -> None:
    found = capture(Scaled(), torch.linspace(-1, 1, 12).view(3, 4).requires_grad_())
    returned = outputs_of(found.joint)[found.num_outputs :]
    own_gradients(found.joint, found.num_outputs)
    owned = outputs_of(found.joint)[found.num_outputs :]
    assert [n.all_input_nodes for n in owned if isinstance(n, Node)] == [[n] for n in returned]
    for node in owned:
        assert isinstance(node, Node)
        assert node.target is torch.ops.aten.clone.default
        assert meta.cost(node).phase is Phase.BACKWARD
        assert not meta.cost(node).is_view
    assert {n.op for n in crossing_values(found.joint, found.num_outputs)} == {"placeholder"}
    found.joint.graph.lint()


@pytest.mark.parametrize("name", MODELS)
def test_what_the_backward_makes_is_left_alone(name: str) -> None:
    found = captured(name)
    before = str(found.joint.graph)
    own_gradients(found.joint, found.num_outputs)
    assert str(found.joint.graph) == before


def test_gradients_of_outputs_that_come_back_are_left_to_who_takes_them() -> None:
    found = capture(Shifted(), torch.ones(3, 4, requires_grad=True))
    assert outputs_of(found.joint)[-1] in found.joint.graph.find_nodes(op="placeholder")
    before = str(found.joint.graph)
    own_gradients(found.joint, found.num_outputs)
    assert str(found.joint.graph) == before
