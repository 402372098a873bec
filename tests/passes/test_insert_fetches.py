"""insert_fetches: parameters come by node, per layer, right before their first use."""

from __future__ import annotations

import pytest

from lohan_fx import meta, ops
from lohan_fx.passes.insert_fetches import insert_fetches
from lohan_fx.plan import Keep, Recompute
from tests.passes.fake_runtime import eager, run
from tests.passes.graphs import MODELS, captured, nodes, plan_for, rewrite, starts_with, text


def test_golden() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_fetches)
    assert halves.backward is not None
    assert text(halves.forward) == (
        "(primals_1, primals_2, primals_3, primals_4):\n"
        "fetch_first_weight = fetch(primals_1, 0)\n"
        "wait_first_weight = wait(fetch_first_weight)\n"
        "t = t(wait_first_weight)\n"
        "fetch_first_bias = fetch(primals_2, 1)\n"
        "wait_first_bias = wait(fetch_first_bias)\n"
        "addmm = addmm(wait_first_bias, primals_3, t)\n"
        "relu = relu(addmm)\n"
        "fetch_second_weight = fetch(primals_4, 2)\n"
        "wait_second_weight = wait(fetch_second_weight)\n"
        "t_1 = t(wait_second_weight)\n"
        "mm = mm(relu, t_1)\n"
        "pow_1 = pow.Tensor_Scalar(mm, 2)\n"
        "mean = mean(pow_1)\n"
        "return (mean, primals_3, primals_4, relu, mm)"
    )
    assert text(halves.backward).splitlines()[9:14] == [
        "fetch_second_weight = fetch(primals_4, 2)",
        "wait_second_weight = wait(fetch_second_weight)",
        "t_1 = t(wait_second_weight)",
        "t_4 = t(t_1)",
        "mm_2 = mm(mul_1, t_4)",
    ]


@pytest.mark.parametrize("name", MODELS)
def test_the_numbers_stay(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_fetches)
    assert run(halves, found).equals(eager(found))


@pytest.mark.parametrize("name", MODELS)
def test_only_fetches_read_shells_and_each_stands_right_before_its_wait_and_first_use(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_fetches)
    for _, gm in halves.graphs():
        order = list(gm.graph.nodes)
        for shell in gm.graph.find_nodes(op="placeholder"):
            if shell.name in halves.parameters:
                assert {u.target for u in shell.users if u.op != "output"} <= {ops.FETCH}
        for fetch in nodes(gm, ops.FETCH):
            (wait,) = fetch.users
            assert order[order.index(fetch) + 1] is wait
            between = order[order.index(wait) + 1 : min(order.index(user) for user in wait.users)]
            assert all(n.target in (ops.FETCH, ops.WAIT) for n in between)
            assert fetch.args[1] == halves.parameters[fetch.all_input_nodes[0].name].slot
            assert meta.origin(fetch) == meta.origin(wait) == halves.parameters[fetch.all_input_nodes[0].name].name


@pytest.mark.parametrize("name", ["transformer", "dropout"])
def test_a_layer_fetches_each_of_its_parameters_once(name: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, Recompute()), upto=insert_fetches)
    parameters = sorted(p.name for p in found.parameters.values())
    forward, backward = ([str(meta.origin(n)) for n in nodes(gm, ops.FETCH)] for _, gm in halves.graphs())
    assert sorted(forward) == parameters
    assert len(set(backward)) == len(backward)


def test_a_tied_weight_is_fetched_at_both_ends() -> None:
    found = captured("tied")
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_fetches)
    assert starts_with(halves.forward, "fetch_embed_weight") == ["fetch_embed_weight", "fetch_embed_weight_1"]
    layers = [meta.cost(n).layer for n in nodes(halves.forward, ops.FETCH) if meta.origin(n) == "embed.weight"]
    assert layers == ["embed", "head"]


def test_a_fetch_holds_the_bytes_of_its_parameter() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=insert_fetches)
    sizes = {meta.origin(n): meta.cost(n).bytes for n in nodes(halves.forward, ops.FETCH)}
    assert sizes == {"first.weight": 4 * 32, "first.bias": 4 * 8, "second.weight": 4 * 32}


def test_inference_fetches_too() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    halves.backward = None
    insert_fetches(halves, plan_for(found, Keep()))
    assert len(nodes(halves.forward, ops.FETCH)) == 3
