"""partition: what crosses, in which order, and that the halves compute what the whole did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lohan_fx import meta
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.partition import partition
from lohan_fx.plan import Keep, Recompute
from tests.passes.fake_runtime import at_another_size, eager, run
from tests.passes.graphs import DECISIONS, MODELS, captured, mixed, plan_for, rewrite, text


def crossing(halves: Halves) -> list[str]:
    return [n.name for n in halves.crossing()]


def test_golden() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, {"pow_1": Recompute()}), upto=None)
    assert halves.backward is not None
    assert text(halves.forward) == (
        "(primals_1, primals_2, primals_3, primals_4):\n"
        "t = t(primals_1)\n"
        "addmm = addmm(primals_2, primals_3, t)\n"
        "relu = relu(addmm)\n"
        "t_1 = t(primals_4)\n"
        "mm = mm(relu, t_1)\n"
        "pow_1 = pow.Tensor_Scalar(mm, 2)\n"
        "mean = mean(pow_1)\n"
        "return (mean, primals_3, primals_4, addmm, relu, mm)"
    )
    assert text(halves.backward) == (
        "(primals_3, primals_4, addmm, relu, mm, tangents_1):\n"
        "expand = expand(tangents_1, (3, 4))\n"
        "div = div.Scalar(expand, 12)\n"
        "pow_2 = pow.Tensor_Scalar(mm, 1.0)\n"
        "mul = mul.Scalar(pow_2, 2.0)\n"
        "mul_1 = mul.Tensor(div, mul)\n"
        "t_2 = t(mul_1)\n"
        "mm_1 = mm(t_2, relu)\n"
        "t_3 = t(mm_1)\n"
        "t_1 = t(primals_4)\n"
        "t_4 = t(t_1)\n"
        "mm_2 = mm(mul_1, t_4)\n"
        "t_5 = t(t_3)\n"
        "detach = detach(relu)\n"
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
@pytest.mark.parametrize("decision", ["keep", "recompute"])
def test_the_halves_compute_what_the_model_does(name: str, decision: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, DECISIONS[decision](found)), upto=None)
    assert run(halves, found).equals(eager(found))


@pytest.mark.parametrize("name", ["two-layers", "branches"])
def test_symbolic_sizes_cross_first_and_hold_for_other_sizes(name: str) -> None:
    found = captured(name, dynamic=True)
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    assert halves.backward is not None
    values = [meta.value(n) for n in halves.backward.graph.find_nodes(op="placeholder")]
    kinds = [isinstance(value, torch.Tensor) for value in values]
    assert kinds == sorted(kinds) and not kinds[0]
    assert [meta.tensor(n) is None for n in halves.crossing()][-1]
    other = at_another_size(found, torch.linspace(-2, 2, 28).view(7, 4))
    assert run(halves, other).equals(eager(other))


@pytest.mark.parametrize("name", MODELS)
def test_each_storage_crosses_once_and_no_view_does(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    names = crossing(halves)
    assert len(names) == len(set(names))
    assert [n.name for n in halves.crossing() if n.op == "call_function" and meta.cost(n).is_view] == []


def test_what_a_plan_saves_crosses_also_where_the_backward_would_not_read_it() -> None:
    found = captured("two-layers")
    assert "addmm" in crossing(rewrite(found, plan_for(found, Keep()), upto=None))
    assert "addmm" not in crossing(rewrite(found, plan_for(found, Recompute()), upto=None))


def test_a_forward_view_stands_right_before_its_first_use() -> None:
    found = captured("transformer")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    assert halves.backward is not None
    nodes = list(halves.backward.graph.nodes)
    copied = [n for n in nodes if n.op == "call_function" and n.meta["partitioner_tag"] == "is_forward"]
    assert copied
    for node in copied:
        between = nodes[nodes.index(node) + 1 : min(nodes.index(user) for user in node.users)]
        assert all(meta.cost(n).is_view for n in between)


def test_the_joint_graph_stays_as_it_is_and_shares_no_notes_with_the_halves() -> None:
    found = captured("two-layers")
    before = text(found.joint)
    halves = rewrite(found, plan_for(found, mixed(found)))
    assert text(found.joint) == before
    original = next(n for n in found.joint.graph.nodes if n.name == "mm")
    copy = next(n for n in halves.forward.graph.nodes if n.name == "mm")
    meta.set_origin(copy, "something else")
    assert meta.origin(original) is None


def test_gradients_are_found_by_the_place_of_their_parameter() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    assert {place: p.name for place, p in halves.gradients.items()} == {
        0: "first.weight",
        1: "first.bias",
        3: "second.weight",
    }


def test_frozen_parameters_have_no_gradient() -> None:
    found = captured("branches")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    assert {p.name for p in halves.gradients.values()} == {"second.weight", "second.bias"}


def test_tied_weights_are_one_parameter() -> None:
    found = captured("tied")
    names = [p.name for p in found.parameters.values()]
    assert names.count("embed.weight") == 1 and "head.weight" not in names


def test_inputs_of_the_halves_cost_no_flops() -> None:
    found = captured("transformer")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    inputs = [n for _, gm in halves.graphs() for n in gm.graph.find_nodes(op="placeholder")]
    assert {meta.cost(n).flops for n in inputs} == {0}
    tensors = [n for n in inputs if (value := meta.tensor(n)) is not None and value.numel()]
    assert all(meta.cost(n).bytes == n.meta["val"].nbytes for n in tensors)


def test_a_plan_of_another_model_is_refused() -> None:
    found = captured("two-layers")
    plan = plan_for(captured("transformer"), Keep())
    with pytest.raises(ValueError, match=r"names activation .*, which this graph lacks: the plan is of another model"):
        partition(
            found.joint,
            replace(plan, parameters=()),
            num_outputs=1,
            parameters=found.parameters,
            activation_slots=range(0),
        )
