"""insert_swaps: swapped activations leave after their last use and come back before their first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.fx import Node

from lohan_fx import meta, ops
from lohan_fx.passes.halves import outputs_of
from lohan_fx.passes.insert_recompute import insert_recompute
from lohan_fx.passes.insert_swaps import insert_swaps
from lohan_fx.plan import Decision, Keep, Recompute, Swap, Tier
from tests.passes.fake_runtime import eager, run
from tests.passes.graphs import (
    DECISIONS,
    FIRST_ACTIVATION_SLOT,
    MODELS,
    captured,
    graph_of,
    nodes,
    plan_for,
    rewrite,
    text,
)


def test_golden() -> None:
    found = captured("two-layers")
    decisions: dict[str, Decision] = {"addmm": Recompute(), "relu": Swap(Tier.NVME), "mm": Swap(Tier.HOST)}
    halves = rewrite(found, plan_for(found, decisions), upto=insert_swaps)
    assert halves.backward is not None
    assert text(halves.forward).splitlines()[7:] == [
        "relu = relu(addmm)",
        "fetch_second_weight = fetch(primals_4, 2)",
        "wait_second_weight = wait(fetch_second_weight)",
        "t_1 = t(wait_second_weight)",
        "mm = mm(relu, t_1)",
        "swap_out_relu = swap_out(relu, 1000, nvme)",
        "pow_1 = pow.Tensor_Scalar(mm, 2)",
        "swap_out_mm = swap_out(mm, 1001, host)",
        "mean = mean(pow_1)",
        "return (mean, primals_3, primals_4, swap_out_relu, swap_out_mm)",
    ]
    assert text(halves.backward).splitlines()[:16] == [
        "(primals_3, primals_4, relu, mm, tangents_1):",
        "expand = expand(tangents_1, (3, 4))",
        "div = div.Scalar(expand, 12)",
        "swap_in_mm = swap_in(mm, 1001)",
        "wait_mm = wait(swap_in_mm)",
        "pow_2 = pow.Tensor_Scalar(wait_mm, 1.0)",
        "mul = mul.Scalar(pow_2, 2.0)",
        "mul_1 = mul.Tensor(div, mul)",
        "t_2 = t(mul_1)",
        "swap_in_relu = swap_in(relu, 1000)",
        "wait_relu = wait(swap_in_relu)",
        "mm_1 = mm(t_2, wait_relu)",
        "t_3 = t(mm_1)",
        "fetch_second_weight = fetch(primals_4, 2)",
        "wait_second_weight = wait(fetch_second_weight)",
        "t_1 = t(wait_second_weight)",
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", ["swap-host", "mixed"])
def test_the_numbers_stay(name: str, decision: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, DECISIONS[decision](found)), upto=insert_swaps)
    assert run(halves, found).equals(eager(found))


@pytest.mark.parametrize("name", MODELS)
def test_what_crosses_is_a_handle_without_bytes(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Swap(Tier.HOST)), upto=insert_swaps)
    outputs = outputs_of(halves.forward)[: halves.num_outputs]
    activations = graph_of(found).activations
    for node in halves.crossing():
        assert node.name not in activations or node in outputs
        if node.target is ops.SWAP_OUT:
            placeholder = halves.saved_placeholders()[str(meta.origin(node))]
            for value in (meta.tensor(node), meta.tensor(placeholder)):
                assert value is not None and value.numel() == 0 and str(value.dtype) == "torch.uint8"
            assert (meta.cost(node).bytes, meta.cost(placeholder).bytes) == (0, 0)


@pytest.mark.parametrize("name", MODELS)
def test_swap_out_stands_after_the_last_use_and_swap_in_before_the_first(name: str) -> None:
    found = captured(name)
    before = rewrite(found, plan_for(found, Swap(Tier.HOST)), upto=insert_recompute)
    last_uses = {n.name: _last_reader(n) for n in before.forward.graph.nodes if n.op == "call_function"}
    halves = rewrite(found, plan_for(found, Swap(Tier.HOST)), upto=insert_swaps)
    assert halves.backward is not None
    order = [n.name for n in halves.forward.graph.nodes]
    for node in nodes(halves.forward, ops.SWAP_OUT):
        since = order[order.index(last_uses[str(meta.origin(node))]) + 1 : order.index(node.name)]
        assert all(name.startswith("swap_out") for name in since)
    backward = list(halves.backward.graph.nodes)
    for node in nodes(halves.backward, ops.SWAP_IN):
        (wait,) = node.users
        between = backward[backward.index(wait) + 1 : min(backward.index(user) for user in wait.users)]
        assert all(n.target in ops.ALL for n in between)


def _last_reader(node: Node) -> str:
    """By walking everything after ``node`` that shows its storage."""
    order = list(node.graph.nodes)
    showing, last = {node}, node
    for other in order[order.index(node) :]:
        if other.op == "call_function" and showing & set(other.all_input_nodes):
            last = other
            if meta.cost(other).is_view:
                showing.add(other)
    return last.name


def test_slots_are_given_out_one_by_one_and_tiers_are_the_plans() -> None:
    found = captured("transformer")
    plan = plan_for(found, DECISIONS["mixed"](found))
    halves = rewrite(found, plan, upto=insert_swaps)
    swaps = nodes(halves.forward, ops.SWAP_OUT)
    assert sorted(str(n.args[1]) for n in swaps) == [str(FIRST_ACTIVATION_SLOT + i) for i in range(len(swaps))]
    assert [str(plan.decision(str(meta.origin(n)))) for n in swaps] == [f"swap:{n.args[2]}" for n in swaps]


def test_outputs_of_the_model_are_never_swapped() -> None:
    """Not even by a plan that says so."""
    found = captured("branches")
    plan = plan_for(found, Swap(Tier.HOST))
    middle = str(outputs_of(found.joint)[0])
    named = replace(plan, activations=(*plan.activations, replace(plan.activations[0], node=middle)))
    halves = rewrite(found, named, upto=insert_swaps)
    outputs = {str(n) for n in outputs_of(halves.forward)[: halves.num_outputs]}
    assert outputs and not outputs & {meta.origin(n) for n in nodes(halves.forward, ops.SWAP_OUT)}


def test_where_nothing_is_swapped_nothing_changes() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_swaps)
    assert nodes(halves.forward, ops.SWAP_OUT) == []


def test_inference_has_nothing_to_swap() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    halves.backward = None
    before = text(halves.forward)
    insert_swaps(halves, plan_for(found, Swap(Tier.HOST)))
    assert text(halves.forward) == before
