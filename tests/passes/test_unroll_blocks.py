"""unroll_blocks: the graph of many equal blocks, instantiated from that of five, against the really traced one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from lohan_fx import meta
from lohan_fx.passes.activation_graph import is_tangent
from lohan_fx.passes.annotate import annotate, layer_of
from lohan_fx.passes.unroll_blocks import LEAST_BLOCKS, BlocksDiffer, unroll_blocks
from tests.exhaustive import combinations
from tests.passes.graphs import VOCABULARY, WIDTH, Block, Captured, Transformer, capture

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def captured_blocks(model: nn.Module) -> Captured:
    found = capture(model, TOKENS)
    annotate(found.joint)
    return found


def unrolled(found: Captured, count: int) -> tuple[GraphModule, dict[str, str]]:
    return unroll_blocks(
        found.joint, prefix="layers", count=count, num_outputs=found.num_outputs, parameters=found.parameters
    )


def described(joint: GraphModule, names: dict[str, str]) -> list[tuple[object, ...]]:
    """Each node by everything that a pass looks at, its own name aside."""
    place = {node: number for number, node in enumerate(joint.graph.nodes)}

    def one(node: Node) -> tuple[object, ...]:
        arguments = [repr(map_arg(part, lambda n: place[n])) for part in (node.args, node.kwargs)]
        value = meta.tensor(node)
        shape = None if value is None else (value.shape, value.dtype, value.stride())
        cost = meta.cost(node) if node.op == "call_function" else None
        what = node.target if node.op == "call_function" else names.get(node.name)
        stack = layer_of(node), node.meta.get("partitioner_tag")
        return node.op, what, *arguments, shape, cost, stack, is_tangent(node), repr(node.meta.get("desc"))

    return [one(node) for node in joint.graph.nodes]


@pytest.mark.parametrize(("rate", "tied"), combinations([0.0, 0.1], [False, True]))
def test_the_instantiated_graph_is_the_traced_one(rate: float, tied: bool) -> None:
    few = captured_blocks(Transformer(blocks=LEAST_BLOCKS, rate=rate, tied=tied))
    many = captured_blocks(Transformer(blocks=9, rate=rate, tied=tied))
    joint, names = unrolled(few, 9)
    assert described(joint, names) == described(many.joint, {k: p.name for k, p in many.parameters.items()})
    joint.graph.lint()


def test_the_least_number_of_blocks_is_a_copy() -> None:
    few = captured_blocks(Transformer(blocks=LEAST_BLOCKS))
    before = described(few.joint, {})
    joint, names = unrolled(few, LEAST_BLOCKS)
    assert described(joint, names) == described(few.joint, {k: p.name for k, p in few.parameters.items()})
    assert described(few.joint, {}) == before


def test_too_few_blocks() -> None:
    few = captured_blocks(Transformer(blocks=LEAST_BLOCKS))
    with pytest.raises(ValueError, match="count is 4: expected at least 5"):
        unrolled(few, 4)


class Odd(Transformer):
    """One inner block is narrower inside."""

    def __init__(self) -> None:
        super().__init__(blocks=LEAST_BLOCKS)
        block = self.layers[2]
        assert isinstance(block, Block)
        block.fc1, block.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


class Gathered(Transformer):
    """What every block returns is used at the end."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return torch.stack(seen).square().mean()


class Crossed(Transformer):
    """Each block also reads what the block before the last one returned, but the third, which reads the first's."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x + (first if number == 3 else x))
            first = x if number == 0 else first
        return nn.functional.cross_entropy(self.head(x).view(-1, VOCABULARY), tokens.flatten())


@pytest.mark.parametrize("model", [Odd, Gathered, Crossed])
def test_blocks_that_are_not_equal_are_found_out(model: type[nn.Module]) -> None:
    kwargs = {} if model is Odd else {"blocks": LEAST_BLOCKS}
    with pytest.raises(BlocksDiffer, match=r"layers\.|outside of the blocks") as caught:
        unrolled(captured_blocks(model(**kwargs)), 8)
    assert "%" not in str(caught.value) and "num_users" not in str(caught.value)  # users read it, who see no graph


def test_a_model_without_such_blocks() -> None:
    found = captured_blocks(Transformer(blocks=LEAST_BLOCKS))
    with pytest.raises(BlocksDiffer):
        unroll_blocks(found.joint, prefix="stages", count=8, num_outputs=found.num_outputs, parameters=found.parameters)
