"""insert_recompute: what is not saved is computed again, late, once, and with the same numbers."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

from lohan_fx import meta
from lohan_fx.meta import Phase
from lohan_fx.passes.activation_graph import closure
from lohan_fx.passes.halves import outputs_of
from lohan_fx.passes.insert_recompute import insert_recompute
from lohan_fx.passes.verify import verify
from lohan_fx.plan import Keep, Plan, Recompute
from tests.passes.fake_runtime import at_another_size, eager, run
from tests.passes.graphs import DECISIONS, MODELS, both, captured, graph_of, plan_for, rewrite, starts_with, text


def test_golden() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_recompute)
    assert halves.backward is not None
    assert text(halves.forward).splitlines()[-1] == "return (mean, primals_3, primals_4, primals_2, primals_1)"
    assert text(halves.backward) == (
        "(primals_3, primals_4, primals_2, primals_1, tangents_1):\n"
        "expand = expand(tangents_1, (3, 4))\n"
        "div = div.Scalar(expand, 12)\n"
        "recompute_t = t(primals_1)\n"
        "recompute_addmm = addmm(primals_2, primals_3, recompute_t)\n"
        "recompute_relu = relu(recompute_addmm)\n"
        "recompute_t_1 = t(primals_4)\n"
        "recompute_mm = mm(recompute_relu, recompute_t_1)\n"
        "pow_2 = pow.Tensor_Scalar(recompute_mm, 1.0)\n"
        "mul = mul.Scalar(pow_2, 2.0)\n"
        "mul_1 = mul.Tensor(div, mul)\n"
        "t_2 = t(mul_1)\n"
        "mm_1 = mm(t_2, recompute_relu)\n"
        "t_3 = t(mm_1)\n"
        "t_1 = t(primals_4)\n"
        "t_4 = t(t_1)\n"
        "mm_2 = mm(mul_1, t_4)\n"
        "t_5 = t(t_3)\n"
        "detach = detach(recompute_relu)\n"
        "detach_1 = detach(detach)\n"
        "threshold_backward = threshold_backward(mm_2, detach_1, 0)\n"
        "t_6 = t(threshold_backward)\n"
        "mm_3 = mm(t_6, primals_3)\n"
        "t_7 = t(mm_3)\n"
        "sum_1 = sum.dim_IntList(threshold_backward, (0), True)\n"
        "view = view(sum_1, (8))\n"
        "t_8 = t(t_7)\n"
        "return (t_8, view, None, t_5)"
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", ["recompute", "mixed"])
def test_the_numbers_stay(name: str, decision: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, DECISIONS[decision](found)), upto=insert_recompute)
    assert run(halves, found).equals(eager(found))


@pytest.mark.parametrize("name", ["two-layers", "branches"])
def test_symbolic_sizes_that_recomputation_needs_cross_too(name: str) -> None:
    found = captured(name, dynamic=True)
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_recompute)
    other = at_another_size(found, torch.linspace(-2, 2, 28).view(7, 4))
    assert run(halves, other).equals(eager(other))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_recomputed_is_the_closure_of_what_is_saved(name: str) -> None:
    found = captured(name)
    graph = graph_of(found)
    plan = plan_for(found, DECISIONS["mixed"](found))
    halves = rewrite(found, plan, upto=insert_recompute)
    saved = {a.node for a in plan.activations if not isinstance(a.decision, Recompute)}
    again = {name.removeprefix("recompute_") for name in starts_with(both(halves)[1], "recompute_")}
    tensors = set(graph.activations)
    assert again & tensors == closure(graph, saved) & tensors


@pytest.mark.parametrize("name", MODELS)
def test_each_op_is_recomputed_once_and_right_before_it_is_needed(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_recompute)
    assert halves.backward is not None
    nodes = list(halves.backward.graph.nodes)
    again = [n for n in nodes if n.name.startswith("recompute_")]
    assert len({meta.origin(n) for n in again}) == len(again) > 0
    for node in again:
        assert meta.cost(node).phase is Phase.BACKWARD
        if node.target is not operator.getitem:
            parts = [part for part in node.users if part.target is operator.getitem]
            readers = [user for shown in (node, *parts) for user in shown.users if user not in parts]
            first = min(nodes.index(reader) for reader in readers)
            assert all(n in again for n in nodes[nodes.index(node) : first])


def test_parts_are_taken_right_behind_the_op_that_made_them() -> None:
    """Else the tuple would keep the large part alive as long as the small one is awaited."""
    found = captured("transformer")
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_recompute)
    assert halves.backward is not None
    nodes = list(halves.backward.graph.nodes)
    parts = [n for n in nodes if n.name.startswith("recompute_getitem")]
    assert len(parts) > 9
    for part in parts:
        parent = part.all_input_nodes[0]
        between = nodes[nodes.index(parent) + 1 : nodes.index(part)]
        assert all(n.all_input_nodes == [parent] for n in between)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_crosses_that_the_backward_does_not_read(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_recompute)
    assert halves.saved_placeholders()
    assert [n for n, node in halves.saved_placeholders().items() if not node.users] == []
    names = [n.name for n in halves.crossing()]
    assert sorted(names) == sorted(halves.saved_placeholders())


def test_where_everything_is_kept_nothing_is_recomputed() -> None:
    found = captured("transformer")
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_recompute)
    assert starts_with(both(halves)[1], "recompute_") == []


def test_masks_of_dropout_cross_and_are_not_drawn_again() -> None:
    found = captured("dropout")
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_recompute)
    _, backward = both(halves)
    assert [n.name for n in backward.graph.nodes if n.op == "call_function" and meta.cost(n).is_random] == []
    masks = [n for n in halves.crossing() if (value := meta.tensor(n)) is not None and value.dtype is torch.bool]
    assert len(masks) == 4


def test_a_plan_that_replays_a_random_op_is_refused() -> None:
    found = captured("dropout")
    plan = plan_for(found, Recompute())
    mask = next(a for a in plan.activations if a.op == "aten.native_dropout")
    with pytest.raises(ValueError, match=rf"activation {mask.node} must be saved"):
        plan.with_decisions({mask.node: Recompute()})
    with pytest.raises(ValueError, match=r"native_dropout.*would draw other random numbers.*kept or swapped"):
        rewrite(found, _forced(plan), upto=insert_recompute)


def _forced(plan: Plan) -> Plan:
    activations = tuple(replace(a, decision=Recompute(), mandatory=False) for a in plan.activations)
    return replace(plan, activations=activations)


def test_recomputation_starts_from_outputs_of_the_forward() -> None:
    """``middle`` is returned and the rest is computed from it: it need not be, and must not be, drawn again."""
    found = captured("branches")
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_recompute)
    assert outputs_of(halves.forward)[0] in halves.crossing()
    assert run(halves, found).equals(eager(found))


@pytest.mark.parametrize("name", ["branches", "two-layers"])
def test_an_input_gets_its_name_also_where_a_clone_has_had_it(name: str) -> None:
    """Clones are made under the name of a free number, and then renamed; fx does not give that name out again."""
    found = captured(name)
    plan = plan_for(found, Recompute())
    halves = rewrite(found, plan, upto=None)
    assert halves.backward is not None
    present = set(halves.saved_placeholders())
    for node in halves.forward.graph.nodes:
        if node.name not in present:
            halves.backward.graph._graph_namespace.create_name(node.name, None)
    insert_recompute(halves, plan)
    assert set(halves.saved_placeholders()) - present, "nothing crosses that did not before"
    verify(halves, plan, after="insert_recompute")
    assert run(halves, found).equals(eager(found))


def test_inference_has_nothing_to_recompute() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    halves.backward = None
    before = text(halves.forward)
    insert_recompute(halves, plan_for(found, Recompute()))
    assert text(halves.forward) == before
