"""step_program: instructions in the order of the nodes; memory and seconds as others count them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest

from lohan_fx import meta, ops
from lohan_fx.meta import Cost
from lohan_fx.passes.liveness import peaks
from lohan_fx.passes.traffic import traffic
from lohan_fx.plan import Decision, Keep, Recompute, Swap, Tier
from lohan_fx.simulation.step_program import Compute, Fetch, Instruction, Offload, SwapIn, SwapOut, Wait, step_program
from tests.passes import graphs
from tests.passes.graphs import captured, flops_as_seconds, plan_for, rewrite

DECISIONS: tuple[Decision, ...] = (Keep(), Recompute(), Swap(Tier.NVME))


def replayed(base_bytes: int, program: Iterable[Instruction]) -> tuple[int, int]:
    """(most, last) device bytes, transfers taking no time."""
    live = most = base_bytes
    for found in program:
        match found:
            case Compute():
                most = max(most, live + found.peak_bytes)
                live += found.change_bytes
            case Fetch() | SwapIn():
                live += found.change_bytes
                most = max(most, live)
            case SwapOut() | Offload():
                live -= found.held_bytes
            case Wait():
                pass
    return most, live


@pytest.mark.parametrize("scratch_bytes", [0, 1 << 20])
@pytest.mark.parametrize("home", [Tier.DEVICE, Tier.NVME])
@pytest.mark.parametrize("decision", DECISIONS, ids=str)
@pytest.mark.parametrize("name", graphs.MODELS)
def test_memory_is_what_liveness_finds(name: str, decision: Decision, home: Tier, scratch_bytes: int) -> None:
    found = captured(name)
    plan = plan_for(found, decision, home=home)
    halves = rewrite(found, plan)
    graphs.take_scratch(halves, scratch_bytes)
    program, expected = step_program(halves, plan, flops_as_seconds), peaks(halves, plan)
    forward, backward = expected["forward"], expected["backward"]
    assert replayed(program.forward_base_bytes, program.forward) == (forward.bytes, forward.end_bytes)
    assert replayed(program.backward_base_bytes, program.backward) == (backward.bytes, backward.end_bytes)


@pytest.mark.parametrize("handover_s", [0.0, 3.0])
@pytest.mark.parametrize("decision", DECISIONS, ids=str)
def test_seconds_are_those_of_traffic(decision: Decision, handover_s: float) -> None:
    found = captured("transformer")
    plan = plan_for(found, decision)
    halves = rewrite(found, plan)
    program = step_program(halves, plan, flops_as_seconds, handover_s)
    work = traffic(halves, plan, flops_as_seconds, handover_s)
    assert seconds(program.forward) == work.forward_s
    assert seconds(program.backward) == work.backward_s + work.recompute_s


@pytest.mark.parametrize("decision", DECISIONS, ids=str)
def test_what_is_launched_is_what_traffic_counts(decision: Decision) -> None:
    found = captured("transformer")
    plan = dataclasses.replace(plan_for(found, decision), device="cuda")
    halves = rewrite(found, plan)
    program, work = step_program(halves, plan, flops_as_seconds), traffic(halves, plan, flops_as_seconds)
    for instructions, launches in (
        (program.forward, work.forward_launches),
        (program.backward, work.backward_launches),
    ):
        assert sum(i.launches for i in instructions if isinstance(i, Compute)) == launches > 0


def seconds(program: Iterable[Instruction]) -> float:
    return sum(found.seconds for found in program if isinstance(found, Compute))


def test_transfers_stand_where_their_nodes_do() -> None:
    found = captured("transformer")
    plan = plan_for(found, Swap(Tier.HOST))
    halves = rewrite(found, plan)
    program = step_program(halves, plan, flops_as_seconds)
    for gm, instructions in ((halves.forward, program.forward), (halves.backward, program.backward)):
        assert gm is not None
        nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in ops.ALL]
        kinds = {
            ops.FETCH: Fetch,
            ops.SWAP_OUT: SwapOut,
            ops.SWAP_IN: SwapIn,
            ops.WAIT: Wait,
            ops.OFFLOAD_GRAD: Offload,
        }
        transfers = [i for i in instructions if not isinstance(i, Compute)]
        assert [type(i) for i in transfers] == [kinds[n.target] for n in nodes]
        fetched = [i.parameter for i in transfers if isinstance(i, Fetch)]
        assert fetched == [meta.origin(n) for n in nodes if n.target is ops.FETCH]
    out = {i.slot: (i.activation, i.bytes) for i in program.forward if isinstance(i, SwapOut)}
    back = {i.slot: i.activation for i in program.backward if isinstance(i, SwapIn)}
    assert back == {slot: activation for slot, (activation, _) in out.items()}
    assert all(nbytes > 0 for _, nbytes in out.values())


def test_inference_has_no_backward() -> None:
    found = captured("two-layers")
    plan = plan_for(found, Keep())
    halves = rewrite(found, plan)
    halves.backward = None
    program = step_program(halves, plan, flops_as_seconds)
    assert program.backward == () and program.backward_base_bytes == 0
    assert any(isinstance(i, Fetch) for i in program.forward)


def test_node_seconds_are_asked_per_node() -> None:
    asked: list[Cost] = []

    def note(found: Cost) -> float:
        asked.append(found)
        return 0.0

    found = captured("two-layers")
    plan = plan_for(found, Keep())
    step_program(rewrite(found, plan), plan, note)
    assert len(asked) > 10 and all(isinstance(cost, Cost) for cost in asked)
