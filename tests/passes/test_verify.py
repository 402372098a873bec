"""verify: every way to break a rewritten graph that we know breaks either its check or the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.errors import VerifyError
from lohan_fx.passes.halves import Halves, outputs_of, set_outputs
from lohan_fx.passes.insert_recompute import insert_recompute
from lohan_fx.passes.liveness import device_peaks
from lohan_fx.passes.verify import ORDER, verify
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from tests.passes.fake_runtime import eager, run
from tests.passes.graphs import (
    DECISIONS,
    MODELS,
    PASSES,
    Captured,
    both,
    capture,
    captured,
    mixed,
    nodes,
    plan_for,
    rewrite,
)

aten = torch.ops.aten


def scheduled(name: str, decision: str = "mixed") -> tuple[Halves, Plan]:
    found = captured(name)
    plan = plan_for(found, DECISIONS[decision](found))
    return rewrite(found, plan), plan


def refused(halves: Halves, plan: Plan, *, after: str = "schedule") -> str:
    with pytest.raises(VerifyError) as caught:
        verify(halves, plan, after=after)
    message = str(caught.value)
    assert message.startswith(f"after {after}: ")
    return message


# --- good graphs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decision", DECISIONS)
def test_good_graphs_pass_after_every_pass(name: str, decision: str) -> None:
    scheduled(name, decision)


def test_checks_belong_to_passes() -> None:
    assert ("partition", *(apply.__name__ for apply in PASSES)) == ORDER
    halves, plan = scheduled("two-layers")
    with pytest.raises(ValueError, match="no pass is called 'fuse': expected one of partition, insert_recompute"):
        verify(halves, plan, after="fuse")


def test_inference_graphs_pass() -> None:
    halves, plan = scheduled("two-layers")
    halves.backward = None
    halves.gradients.clear()
    set_outputs(halves.forward, outputs_of(halves.forward)[: halves.num_outputs])
    verify(halves, plan, after="schedule")


# --- one node less --------------------------------------------------------------------------------------------


def remove(gm: GraphModule, node: Node) -> None:
    """Take ``node`` out; its users read what it read (its largest input) instead."""
    sources = [n for n in node.all_input_nodes if n is not node]
    if node.users:
        node.replace_all_uses_with(sources[0])
    gm.graph.erase_node(node)


def fetches(gm: GraphModule) -> list[Node]:
    return nodes(gm, ops.FETCH)


def waits_of(op: object) -> Callable[[GraphModule], list[Node]]:
    return lambda gm: [n for n in nodes(gm, ops.WAIT) if n.all_input_nodes[0].target is op]


def recomputed(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.name.startswith("recompute_")]


KINDS: dict[str, Callable[[GraphModule], list[Node]]] = {
    "fetch": fetches,
    "wait-for-fetch": waits_of(ops.FETCH),
    "swap-out": lambda gm: nodes(gm, ops.SWAP_OUT),
    "swap-in": lambda gm: nodes(gm, ops.SWAP_IN),
    "wait-for-swap-in": waits_of(ops.SWAP_IN),
    "offload-grad": lambda gm: nodes(gm, ops.OFFLOAD_GRAD),
    "recompute": recomputed,
}


@pytest.mark.parametrize("name", ["two-layers", "dropout"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_node_can_be_spared(name: str, kind: str) -> None:
    halves, plan = scheduled(name)
    places = [(half, i) for half, gm in enumerate(both(halves)) for i in range(len(KINDS[kind](gm)))]
    assert places
    for half, i in places[:: max(1, len(places) // 12)]:
        halves, plan = scheduled(name)
        node = KINDS[kind](both(halves)[half])[i]
        subject, users = meta.origin(node) or "", [u.name for u in node.users]
        remove(both(halves)[half], node)
        message = refused(halves, plan)
        assert any(word in message for word in [node.name, subject, subject.replace(".", "_"), *users])
        assert "\n  -> " in message or "hands over" in message


@pytest.mark.parametrize("kind", ["wait-for-fetch", "wait-for-swap-in"])
def test_without_a_wait_the_numbers_are_wrong_too(kind: str) -> None:
    """So the fake runtime would have noticed what the verifier did not."""
    found = captured("two-layers")
    halves, _ = scheduled("two-layers", "swap-host")
    _, backward = both(halves)
    remove(backward, KINDS[kind](backward)[0])
    assert not run(halves, found).equals(eager(found))


def test_after_an_early_swap_out_the_numbers_are_wrong_too() -> None:
    found = captured("two-layers")
    halves, _ = scheduled("two-layers", "swap-host")
    forward, _ = both(halves)
    (swap,) = (n for n in nodes(forward, ops.SWAP_OUT) if meta.origin(n) == "relu")
    swap.all_input_nodes[0].append(swap)
    assert not run(halves, found).equals(eager(found))


# --- other ways to break them ---------------------------------------------------------------------------------


def last(gm: GraphModule) -> Node:
    return gm.graph.output_node()


def test_a_fetch_after_the_gradient_has_left() -> None:
    halves, plan = scheduled("two-layers", "recompute")
    _, backward = both(halves)
    fetch = next(n for n in fetches(backward) if meta.origin(n) == "second.weight")
    (wait,) = fetch.users
    with backward.graph.inserting_before(last(backward)):
        again = backward.graph.call_function(ops.FETCH, fetch.args)
        later = backward.graph.call_function(ops.WAIT, (again,))
    for copy, original in ((again, fetch), (later, wait)):
        copy.meta = dict(original.meta)
    message = refused(halves, plan)
    assert f"reads the parameter of {again.name} after offload_grad_second_weight updated it" in message


def test_a_use_of_a_parameter_after_its_gradient_has_left_also_through_views() -> None:
    halves, plan = scheduled("two-layers", "recompute")
    _, backward = both(halves)
    offload = next(n for n in nodes(backward, ops.OFFLOAD_GRAD) if meta.origin(n) == "second.weight")
    use = next(n for n in backward.graph.nodes if n.name == "mm_2")
    offload.append(use)
    message = refused(halves, plan)
    assert "mm_2: reads the parameter of fetch_second_weight after offload_grad_second_weight updated it" in message


def test_a_use_after_swap_out_also_through_views() -> None:
    halves, plan = scheduled("transformer", "swap-host")
    forward, _ = both(halves)
    swap = next(n for n in nodes(forward, ops.SWAP_OUT) if meta.origin(n) == "addmm")
    reader = next(
        n for n in forward.graph.nodes if n.target is aten._scaled_dot_product_flash_attention_for_cpu.default
    )
    reader.prev.append(swap)
    message = refused(halves, plan)
    assert f"{reader.name}: reads addmm after swap_out_addmm has sent it away" in message


def test_two_offload_grads_of_one_parameter() -> None:
    halves, plan = scheduled("two-layers")
    _, backward = both(halves)
    offload = nodes(backward, ops.OFFLOAD_GRAD)[0]
    with backward.graph.inserting_after(offload):
        twin = backward.graph.call_function(ops.OFFLOAD_GRAD, offload.args)
    twin.meta = dict(offload.meta)
    message = refused(halves, plan)
    assert message.startswith(f"after schedule: {twin.name}: the gradient of second.weight reaches 2 offload_grad")


def test_an_offload_grad_of_a_slot_that_has_no_gradient() -> None:
    halves, plan = scheduled("branches")
    _, backward = both(halves)
    offload = nodes(backward, ops.OFFLOAD_GRAD)[0]
    with backward.graph.inserting_after(offload):
        stray = backward.graph.call_function(ops.OFFLOAD_GRAD, (offload.args[0], 0))
    stray.meta = dict(offload.meta)
    assert f"{stray.name}: offloads a gradient that no trainable parameter gets" in refused(halves, plan)


class Shifted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.bias).sum()


def test_a_gradient_that_an_input_of_the_model_has_too() -> None:
    found = capture(Shifted(), torch.ones(4, requires_grad=True))
    plan = plan_for(found, Keep())
    halves = rewrite(found, plan)
    (offload,) = nodes(both(halves)[1], ops.OFFLOAD_GRAD)
    (gradient,) = offload.all_input_nodes[0].all_input_nodes
    offload.replace_input_with(offload.all_input_nodes[0], gradient)
    assert f"{offload.name}: hands over memory of {gradient.name}, to which others may write" in refused(halves, plan)


def test_a_gradient_that_goes_to_another_parameter() -> None:
    halves, plan = scheduled("two-layers")
    _, backward = both(halves)
    first, second = (n for n in nodes(backward, ops.OFFLOAD_GRAD) if "weight" in n.name)
    first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])
    message = refused(halves, plan)
    assert "hands over t_8; the gradient of second.weight is t_5" in message or "is t_8" in message


def test_a_gradient_that_is_offloaded_and_returned() -> None:
    halves, plan = scheduled("two-layers")
    _, backward = both(halves)
    gradient = next(n for n in backward.graph.nodes if n.name == "t_5")
    set_outputs(backward, [None, None, None, gradient])
    assert "output: still returns the gradient of second.weight" in refused(halves, plan)


def test_outputs_in_another_order() -> None:
    halves, plan = scheduled("branches")
    forward, _ = both(halves)
    outputs = outputs_of(forward)
    set_outputs(forward, [outputs[1], outputs[0], *outputs[2:]])
    assert "output: returns sum_1 at place 0; the captured graph returned getitem" in refused(halves, plan)


def test_gradients_in_another_order_before_they_leave() -> None:
    found = captured("two-layers")
    plan = plan_for(found, Keep())
    halves = rewrite(found, plan, upto=insert_recompute)
    _, backward = both(halves)
    outputs = outputs_of(backward)
    set_outputs(backward, [outputs[3], outputs[1], outputs[2], outputs[0]])
    assert "returns t_5 at place 0" in refused(halves, plan, after="insert_recompute")


def _replaying(found: Captured) -> tuple[Halves, Plan]:
    """Halves in which the backward draws a mask again that crosses, too."""
    plan = plan_for(found, Keep())
    halves = rewrite(found, plan, upto=insert_recompute)
    forward, backward = both(halves)
    drawn = next(n for n in forward.graph.nodes if n.target is aten.native_dropout.default)
    some = next(n for n in backward.graph.nodes if n.op == "call_function")
    with backward.graph.inserting_before(some):
        again = backward.graph.call_function(drawn.target, (some.all_input_nodes[0], *drawn.args[1:]))
    again.meta = {k: v for k, v in drawn.meta.items() if k in ("val", "partitioner_tag")}
    meta.set_cost(again, meta.cost(drawn))
    meta.set_origin(again, drawn.name)
    return halves, plan


def test_a_replayed_random_op() -> None:
    halves, plan = _replaying(captured("dropout"))
    message = refused(halves, plan, after="insert_recompute")
    assert "native_dropout" in message and "draws the random numbers of the forward again" in message


def test_a_wait_moved_before_its_start() -> None:
    halves, plan = scheduled("two-layers")
    forward, _ = both(halves)
    wait = nodes(forward, ops.WAIT)[0]
    wait.all_input_nodes[0].prepend(wait)
    assert "the forward graph is malformed" in refused(halves, plan)


def test_a_start_that_two_read() -> None:
    halves, plan = scheduled("two-layers")
    forward, _ = both(halves)
    fetch = fetches(forward)[0]
    with forward.graph.inserting_after(next(iter(fetch.users))):
        twin = forward.graph.call_function(ops.WAIT, (fetch,))
    twin.meta = dict(fetch.meta)
    assert f"{fetch.name}: must be read by one wait alone" in refused(halves, plan)


def test_a_wait_for_what_was_never_started() -> None:
    halves, plan = scheduled("two-layers")
    forward, _ = both(halves)
    relu = next(n for n in forward.graph.nodes if n.name == "relu")
    with forward.graph.inserting_after(relu):
        stray = forward.graph.call_function(ops.WAIT, (relu,))
    stray.meta = dict(relu.meta)
    meta.set_reads(stray, ("relu",))
    assert f"{stray.name}: waits for relu, which starts nothing" in refused(halves, plan)


def test_an_op_that_reads_another_value() -> None:
    halves, plan = scheduled("two-layers")
    _, backward = both(halves)
    node = next(n for n in backward.graph.nodes if n.name == "mm_3")
    other = next(n for n in backward.graph.nodes if n.name == "t_2")
    node.replace_input_with(node.all_input_nodes[0], other)
    assert "mm_3: reads ('t_2', 'primals_3'); in the captured graph it read ('t_6', 'primals_3')" in refused(
        halves, plan
    )


def test_a_shell_that_an_inserted_op_reads() -> None:
    halves, plan = scheduled("two-layers")
    forward, _ = both(halves)
    shell = fetches(forward)[0].all_input_nodes[0]
    with forward.graph.inserting_before(last(forward)):
        stray = forward.graph.call_function(aten.relu.default, (shell,))
    stray.meta = dict(shell.meta)
    assert f"{stray.name}: reads the shell {shell.name} itself" in refused(halves, plan)


def test_halves_that_do_not_fit_together() -> None:
    halves, plan = scheduled("two-layers")
    halves.set_crossing(list(reversed(halves.crossing())))
    message = refused(halves, plan)
    assert "the forward hands over" in message and "the backward takes" in message


@pytest.mark.parametrize("decision", [Recompute(), None])
def test_a_value_that_crosses_against_the_plan(decision: Decision | None) -> None:
    found = captured("two-layers")
    plan = plan_for(found, Keep())
    halves = rewrite(found, plan, upto=insert_recompute)
    changed = tuple(replace(a, decision=decision) if a.node == "mm" and decision else a for a in plan.activations)
    if decision is None:
        changed = tuple(a for a in changed if a.node != "mm")
    message = refused(halves, replace(plan, activations=changed), after="insert_recompute")
    assert f"mm: crosses to the backward, but the plan says {decision}" in message


@pytest.mark.parametrize("decision", [Keep(), Swap(Tier.HOST)])
def test_what_the_plan_saves_is_not_computed_again(decision: Decision) -> None:
    halves, plan = scheduled("two-layers")
    again = meta.origin(next(node for node in recomputed(both(halves)[1]) if plan.decision(meta.origin(node) or "")))
    message = refused(halves, plan.with_decisions({str(again): decision}), after="insert_recompute")
    assert f"recompute_{again}: computes {again} again, but the plan says {decision}" in message


def test_a_value_that_crosses_although_it_is_planned_to_be_swapped() -> None:
    found = captured("two-layers")
    kept = plan_for(found, Keep())
    halves = rewrite(found, kept)
    plan = plan_for(found, Swap(Tier.HOST))
    assert "relu: is planned to be swapped, but crosses as it is" in refused(halves, plan, after="insert_swaps")


def test_two_swaps_of_one_slot() -> None:
    halves, plan = scheduled("two-layers", "swap-host")
    forward, backward = both(halves)
    for gm, op in ((forward, ops.SWAP_OUT), (backward, ops.SWAP_IN)):
        for node in nodes(gm, op):
            node.args = (node.args[0], 1000, *node.args[2:])
    assert "slot 1000 has 2 swap_out and 2 swap_in; expected one each" in refused(halves, plan)


@pytest.mark.parametrize("home", [Tier.NVME, Tier.DEVICE])
def test_more_bytes_than_the_budget(home: Tier) -> None:
    found = captured("transformer")
    plan = plan_for(found, mixed(found), home=home)
    halves = rewrite(found, plan)
    resident = sum(p.bytes for p in plan.parameters) if home is Tier.DEVICE else 0
    needed = {name: peak.bytes + resident for name, peak in device_peaks(halves, plan).items()}
    verify(halves, replace(plan, device_memory_bytes=max(needed.values())), after="schedule")
    for name, peak in device_peaks(halves, plan).items():
        if needed[name] == max(needed.values()):
            message = refused(halves, replace(plan, device_memory_bytes=needed[name] - 1))
            assert f"the {name} graph needs {needed[name]} bytes of device memory at {peak.node}" in message
            assert f"the budget is {needed[name] - 1}" in message


def test_a_handle_that_an_op_reads() -> None:
    halves, plan = scheduled("two-layers", "swap-host")
    _, backward = both(halves)
    wait = next(n for n in nodes(backward, ops.WAIT) if meta.origin(n) == "relu")
    reader = next(iter(wait.users))
    reader.replace_input_with(wait, halves.saved_placeholders()["relu"])
    assert f"{reader.name}: reads the handle of relu; it must read wait(swap_in(..))" in refused(halves, plan)


def test_slots_of_swaps_that_are_mixed_up() -> None:
    halves, plan = scheduled("two-layers", "swap-host")
    _, backward = both(halves)
    first, second = nodes(backward, ops.SWAP_IN)
    first.args, second.args = (first.args[0], second.args[1]), (second.args[0], first.args[1])
    message = refused(halves, plan)
    assert "holds relu, not mm" in message or "holds mm, not relu" in message


def test_slots_of_fetches_that_are_mixed_up() -> None:
    halves, plan = scheduled("two-layers")
    forward, _ = both(halves)
    fetch = fetches(forward)[0]
    fetch.args = (fetch.args[0], 2)
    assert f"{fetch.name}: fetches slot 2; first.weight is slot 0" in refused(halves, plan)


def test_the_message_shows_the_neighbourhood() -> None:
    halves, plan = scheduled("two-layers")
    forward, _ = both(halves)
    wait = next(n for n in nodes(forward, ops.WAIT) if meta.origin(n) == "second.weight")
    remove(forward, wait)
    lines = refused(halves, plan).splitlines()
    assert lines[0].startswith("after schedule: t_1: reads ('fetch_second_weight before its wait',)")
    assert len(lines) == 8 and lines[4].startswith("  -> %t_1")
