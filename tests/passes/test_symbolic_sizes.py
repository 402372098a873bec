"""symbolic_sizes: what a call's inputs tell of the sizes of a graph's values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from lohan_fx import meta
from lohan_fx.passes.symbolic_sizes import CallSizes, hold_up_to_traced, is_dense, is_symbolic
from tests.passes.graphs import DECISIONS, both, captured, plan_for, rewrite


def test_which_graphs_are_symbolic() -> None:
    assert is_symbolic(captured("two-layers", dynamic=True).joint)
    assert not is_symbolic(captured("two-layers").joint)


def test_shapes_are_those_of_the_inputs_of_a_call() -> None:
    found = captured("two-layers", dynamic=True)
    halves = rewrite(found, plan_for(found, DECISIONS["keep"](found)))
    rows = found.inputs[0].shape[0]
    for gm in both(halves):
        sizes = CallSizes(gm)
        assert sizes.planned == (rows,)
        values = {n.name: value for n in gm.graph.nodes if (value := meta.tensor(n)) is not None}
        assert all(map(sizes.know, values.values()))
        for now in (rows, 5):
            shaped = sizes.shaped(values, (now,))
            for name, (shape, stride) in shaped.items():
                wanted = [now if isinstance(size, torch.SymInt) else size for size in values[name].shape]
                assert list(shape) == wanted and len(stride) == len(shape)
                if values[name].is_contiguous() and shape.numel():
                    assert stride == torch.empty(shape, device="meta").stride()


def test_inputs_that_are_sizes_and_those_that_have_them_tell_the_same() -> None:
    found = captured("two-layers", dynamic=True)
    halves = rewrite(found, plan_for(found, DECISIONS["keep"](found)))
    placeholders = halves.forward.graph.find_nodes(op="placeholder")
    inputs = [
        9
        if isinstance(meta.value(n), torch.SymInt)
        else torch.empty([9 if isinstance(s, torch.SymInt) else s for s in v.shape])
        for n in placeholders
        for v in [meta.tensor(n)]
        if v is not None or isinstance(meta.value(n), torch.SymInt)
    ]
    assert CallSizes(halves.forward).of(inputs) == (9,)


def test_what_fills_its_memory() -> None:
    assert is_dense(torch.empty(3, 4)) and is_dense(torch.empty(4, 3).t())
    assert not is_dense(torch.empty(3, 4)[:, :2]) and not is_dense(torch.empty(1, 4).expand(3, 4))
    found = captured("two-layers", dynamic=True)
    values = [v for n in found.joint.graph.nodes if (v := meta.tensor(n)) is not None and not meta.cost(n).is_view]
    assert any(not all(isinstance(s, int) for s in v.shape) for v in values) and all(map(is_dense, values))


def fills_up(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(66 - x.shape[0], x.shape[1])])


def largest_half_way(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1, None] * x.new_ones(66 - x.shape[0], 1) * x.new_ones(1024)


def depends_on_values(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero() * 2


@pytest.mark.parametrize(
    ("function", "width", "smaller"),
    [
        (torch.sin, 512, True),
        (fills_up, 512, False),
        (fills_up, 8, True),  # by 2 KB
        (largest_half_way, 8, False),
        (depends_on_values, 8, False),
    ],
)
def test_graphs_hold_for_smaller_inputs_where_nothing_gets_larger(
    function: Callable[[torch.Tensor], torch.Tensor], width: int, smaller: bool
) -> None:
    traced = torch.ones(64, width)
    gm = make_fx(function, tracing_mode="symbolic")(traced)
    rows = meta.value(gm.graph.find_nodes(op="placeholder")[0]).shape[0]
    shapes = rows.node.shape_env
    hold_up_to_traced(gm)
    found = shapes.bound_sympy(shapes.replace(rows.node.expr))
    assert (int(found.lower) < 64) is smaller and int(found.upper) == 64
