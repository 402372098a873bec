"""insert_swaps: activations planned ``Swap`` leave the device and come back by nodes.

Requires: halves from ``insert_recompute``.
Ensures: a swapped activation crosses as a handle of no bytes; ``swap_out`` stands after its last use in the
forward, ``swap_in`` and ``wait`` before its first use in the backward.

    forward:  a = op(..);  last_use(a);  swap_out_a = swap_out(a, slot, tier);  return ..., swap_out_a
    backward(a, ..):  swap_in_a = swap_in(a, slot);  wait_a = wait(swap_in_a);  first_use(wait_a)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, first_user, last_user, outputs_of, positions, set_outputs
from lohan_fx.plan import Plan, Swap


def insert_swaps(halves: Halves, plan: Plan) -> None:
    """Insert ``swap_out``, ``swap_in`` and ``wait`` for each crossing activation that the plan swaps."""
    if halves.backward is None:
        return
    outputs = outputs_of(halves.forward)
    forward_outputs = outputs[: halves.num_outputs]
    slots = iter(halves.activation_slots)
    placeholders = halves.saved_placeholders()
    uses, backward_order = _uses(halves.forward), positions(halves.backward.graph)
    for place, node in enumerate(outputs):
        if place < halves.num_outputs or not isinstance(node, Node) or node in forward_outputs:
            continue
        decision = plan.decision(node.name)
        if isinstance(decision, Swap):
            slot, placeholder = next(slots), placeholders[node.name]
            _swap_in(halves.backward, placeholder, slot, first_user(placeholder, backward_order))
            outputs[place] = _swap_out(halves.forward, node, slot, decision, last_user(node, uses))
    set_outputs(halves.forward, outputs)
    annotate(halves.forward)
    annotate(halves.backward)


def _uses(gm: GraphModule) -> dict[Node, int]:
    """The order of execution without the output node: being returned is not a use before which the value must stay."""
    return {**positions(gm.graph), gm.graph.output_node(): -1}


def _swap_out(gm: GraphModule, x: Node, slot: int, decision: Swap, after: Node) -> Node:
    with gm.graph.inserting_after(after):
        handle = gm.graph.create_node(
            "call_function", ops.SWAP_OUT, (x, slot, decision.tier.value), name=f"swap_out_{x.name}"
        )
    handle.meta = meta.place_of(after)
    handle.meta["val"] = _handle_value(x)
    meta.set_origin(handle, x.name)
    return handle


def _swap_in(gm: GraphModule, placeholder: Node, slot: int, before: Node) -> None:
    users = list(placeholder.users)
    name = placeholder.name
    with gm.graph.inserting_before(before):
        start = gm.graph.create_node("call_function", ops.SWAP_IN, (placeholder, slot), name=f"swap_in_{name}")
        wait = gm.graph.create_node("call_function", ops.WAIT, (start,), name=f"wait_{name}")
    for node in (start, wait):
        node.meta = meta.place_of(before)
        node.meta["val"] = placeholder.meta["val"]
        meta.set_origin(node, name)
    for user in users:
        user.replace_input_with(placeholder, wait)
    placeholder.meta = {**placeholder.meta, "val": _handle_value(placeholder)}
    meta.clear_cost(placeholder)


def _handle_value(x: Node) -> torch.Tensor:
    value = meta.tensor(x)
    assert value is not None, f"{x.name} is not a tensor"
    return value.new_empty(0, dtype=torch.uint8)
