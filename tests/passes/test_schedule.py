"""schedule: starts are hoisted in order and within the windows; nothing else moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.insert_gradient_offload import insert_gradient_offload
from lohan_fx.passes.schedule import schedule
from lohan_fx.plan import Keep, Plan, Swap, Tier
from tests.passes.fake_runtime import eager, run
from tests.passes.graphs import DECISIONS, MODELS, WINDOWS, Captured, captured, nodes, plan_for, rewrite, text

SIZES_BYTES = (0, 64, 1100, 5000, 1 << 30)
SOME_MODELS = ("two-layers", "dropout", "tied")


def windowed(found: Captured, nbytes: int, **keywords: Tier) -> Plan:
    windows = replace(WINDOWS, fetch_bytes=nbytes, swap_in_bytes=nbytes)
    return plan_for(found, DECISIONS["mixed"](found), windows=windows, **keywords)  # type: ignore[arg-type]


def test_golden() -> None:
    """160 bytes take the first weight (128) and bias (32); the second weight waits until there is room again."""
    found = captured("two-layers")
    windows = replace(WINDOWS, fetch_bytes=160, swap_in_bytes=48)
    halves = rewrite(found, plan_for(found, Swap(Tier.HOST), windows=windows))
    assert halves.backward is not None
    assert text(halves.forward) == (
        "(primals_1, primals_2, primals_3, primals_4):\n"
        "fetch_first_weight = fetch(primals_1, 0)\n"
        "fetch_first_bias = fetch(primals_2, 1)\n"
        "wait_first_weight = wait(fetch_first_weight)\n"
        "fetch_second_weight = fetch(primals_4, 2)\n"
        "t = t(wait_first_weight)\n"
        "wait_first_bias = wait(fetch_first_bias)\n"
        "addmm = addmm(wait_first_bias, primals_3, t)\n"
        "relu = relu(addmm)\n"
        "wait_second_weight = wait(fetch_second_weight)\n"
        "t_1 = t(wait_second_weight)\n"
        "mm = mm(relu, t_1)\n"
        "swap_out_relu = swap_out(relu, 1000, host)\n"
        "pow_1 = pow.Tensor_Scalar(mm, 2)\n"
        "swap_out_mm = swap_out(mm, 1001, host)\n"
        "mean = mean(pow_1)\n"
        "return (mean, primals_3, primals_4, swap_out_relu, swap_out_mm)"
    )
    assert text(halves.backward).splitlines()[:8] == [
        "(primals_3, primals_4, relu, mm, tangents_1):",
        "swap_in_mm = swap_in(mm, 1001)",
        "fetch_second_weight = fetch(primals_4, 2)",
        "expand = expand(tangents_1, (3, 4))",
        "div = div.Scalar(expand, 12)",
        "wait_mm = wait(swap_in_mm)",
        "swap_in_relu = swap_in(relu, 1000)",
        "pow_2 = pow.Tensor_Scalar(wait_mm, 1.0)",
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_the_numbers_stay(name: str, decision: str) -> None:
    found = captured(name)
    halves = rewrite(found, plan_for(found, DECISIONS[decision](found)))
    assert run(halves, found).equals(eager(found))


@pytest.mark.parametrize("nbytes", SIZES_BYTES)
def test_the_numbers_stay_in_any_window(nbytes: int) -> None:
    found = captured("dropout")
    assert run(rewrite(found, windowed(found, nbytes)), found).equals(eager(found))


@pytest.mark.parametrize("name", SOME_MODELS)
@pytest.mark.parametrize("nbytes", SIZES_BYTES)
def test_only_starts_move(name: str, nbytes: int) -> None:
    found = captured(name)
    plan = windowed(found, nbytes)
    before, after = rewrite(found, plan, upto=insert_gradient_offload), rewrite(found, plan)
    for (_, unscheduled), (_, scheduled) in zip(before.graphs(), after.graphs(), strict=True):
        rest = [[n.name for n in gm.graph.nodes if n.target not in ops.STARTS] for gm in (unscheduled, scheduled)]
        assert rest[0] == rest[1]
        assert {n.name for n in unscheduled.graph.nodes} == {n.name for n in scheduled.graph.nodes}


def events(gm: GraphModule, op: object) -> list[tuple[str, Node]]:
    """("start", node) and ("wait", its start), in order, of one kind of transfer."""
    found = []
    for node in gm.graph.nodes:
        if node.target is op:
            found.append(("start", node))
        elif node.target is ops.WAIT and node.all_input_nodes[0].target is op:
            found.append(("wait", node.all_input_nodes[0]))
    return found


@pytest.mark.parametrize("name", SOME_MODELS)
@pytest.mark.parametrize("nbytes", SIZES_BYTES)
def test_starts_are_first_in_first_out(name: str, nbytes: int) -> None:
    found = captured(name)
    for _, gm in rewrite(found, windowed(found, nbytes)).graphs():
        for op in ops.STARTS:
            order = events(gm, op)
            assert [n for kind, n in order if kind == "start"] == [n for kind, n in order if kind == "wait"]


@pytest.mark.parametrize("name", SOME_MODELS)
@pytest.mark.parametrize("nbytes", SIZES_BYTES)
def test_what_is_under_way_stays_within_the_window_and_fills_it(name: str, nbytes: int) -> None:
    """Within: at each start, or it is alone. Filled: it could not have started before the wait that precedes it."""
    found = captured(name)
    for _, gm in rewrite(found, windowed(found, nbytes)).graphs():
        for op in ops.STARTS:
            under_way: list[Node] = []
            previous: Node | None = None
            for kind, node in events(gm, op):
                if kind == "wait":
                    under_way.remove(node)
                    previous = node
                    continue
                assert not under_way or sum(map(_bytes, [*under_way, node])) <= nbytes
                if previous is not None:
                    assert sum(map(_bytes, [*under_way, previous, node])) > nbytes
                under_way.append(node)
                previous = None if previous is None else previous
            assert not under_way


def _bytes(node: Node) -> int:
    return meta.cost(node).bytes


@pytest.mark.parametrize("name", MODELS)
def test_in_a_window_without_bounds_everything_starts_at_once(name: str) -> None:
    found = captured(name)
    for _, gm in rewrite(found, windowed(found, 1 << 30)).graphs():
        order = [n for n in gm.graph.nodes if n.op == "call_function"]
        starts = sum(n.target in ops.STARTS for n in order)
        assert all(n.target in ops.STARTS for n in order[:starts])


def test_without_a_window_a_transfer_starts_when_the_one_before_has_arrived() -> None:
    found = captured("two-layers")
    halves = rewrite(found, windowed(found, 0))
    kinds = [kind for kind, _ in events(halves.forward, ops.FETCH)]
    assert kinds == ["start", "wait"] * 3
    names = [n.name for n in halves.forward.graph.nodes]
    assert names[names.index("wait_first_weight") + 1] == "fetch_first_bias"


def test_resident_parameters_move_nothing_and_stay() -> None:
    found = captured("two-layers")
    plan = windowed(found, 1 << 30, home=Tier.DEVICE)
    before, after = rewrite(found, plan, upto=insert_gradient_offload), rewrite(found, plan)
    assert text(before.forward) == text(after.forward)
    assert nodes(after.forward, ops.FETCH)


@pytest.mark.parametrize("nbytes", SIZES_BYTES)
def test_scheduling_again_changes_nothing(nbytes: int) -> None:
    found = captured("transformer")
    plan = windowed(found, nbytes)
    halves = rewrite(found, plan)
    before = [text(gm) for _, gm in halves.graphs()]
    schedule(halves, plan)
    assert [text(gm) for _, gm in halves.graphs()] == before


def test_a_graph_without_inputs_has_nothing_to_hoist() -> None:
    found = captured("two-layers")
    halves = rewrite(found, plan_for(found, Keep()), upto=None)
    graph = type(halves.forward.graph)()
    graph.output(())
    halves.forward, halves.backward = GraphModule({}, graph), None
    schedule(halves, plan_for(found, Keep()))
    assert [n.op for n in halves.forward.graph.nodes] == ["output"]
