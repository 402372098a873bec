"""insert_gradient_offload: gradients of parameters leave by node, and autograd sees None.

Requires: halves from ``insert_fetches``.
Ensures: each parameter that gets a gradient has exactly one ``offload_grad``, after the gradient is complete and
after the last use of the parameter in the backward: its arrival may start the update of that parameter.

    return (.., g_p, ..)     ->     last_use(wait_p);  offload_grad_p = offload_grad(g_p, slot);  return (.., None, ..)

The runtime reads a gradient when the backward has returned, where it lies or on its way to the host. So what somebody else may
write to by then, because it is also the gradient of an input, or came in, is copied first:

    return (t, t)            ->     own_p = clone(t);  offload_grad_p = offload_grad(own_p, slot);  return (t, None)
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, ParameterInput, last_user, outputs_of, positions, set_outputs
from lohan_fx.passes.liveness import storage_of
from lohan_fx.plan import Plan


def insert_gradient_offload(halves: Halves, plan: Plan) -> None:
    """Insert ``offload_grad`` for each gradient of a trainable parameter among the backward's outputs."""
    del plan
    if halves.backward is None:
        return
    gm = halves.backward
    outputs = outputs_of(gm)
    set_outputs(gm, [None] * len(outputs))
    order = positions(gm.graph)
    last_uses = _last_uses(gm, order)
    leaving = [place for place, parameter in halves.gradients.items() if parameter.trainable]
    staying = {storage_of(n) for place, n in enumerate(outputs) if isinstance(n, Node) and place not in leaving}
    for place in leaving:
        gradient, parameter = outputs[place], halves.gradients[place]
        if isinstance(gradient, Node):
            after = max([gradient, *last_uses.get(parameter.name, [])], key=lambda n: order[n])
            if after.op == "placeholder":
                after = gm.graph.find_nodes(op="placeholder")[-1]
            storage = storage_of(gradient)
            if storage.op == "placeholder" or storage in staying:
                gradient = after = _insert_copy(gm, gradient, parameter, after)
            _insert(gm, gradient, parameter, after)
            outputs[place] = None
    set_outputs(gm, outputs)
    annotate(gm)


def _last_uses(gm: GraphModule, order: dict[Node, int]) -> dict[str, list[Node]]:
    """Parameter name -> the last use of each of its fetches."""
    uses: dict[str, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=ops.FETCH):
        uses.setdefault(meta.origin(node) or "", []).append(last_user(node, order))
    return uses


def _insert_copy(gm: GraphModule, gradient: Node, parameter: ParameterInput, after: Node) -> Node:
    value = meta.tensor(gradient)
    assert value is not None, f"the gradient of {parameter.name} is not a tensor"
    # Contiguous, as the runtime would make it otherwise.
    layout = {"memory_format": torch.contiguous_format}
    node = _after(gm, after, torch.ops.aten.clone.default, (gradient,), layout, f"own_{_label(parameter)}")
    node.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
    meta.set_origin(node, gradient.name)
    return node


def _insert(gm: GraphModule, gradient: Node, parameter: ParameterInput, after: Node) -> None:
    args = (gradient, parameter.slot)
    node = _after(gm, after, ops.OFFLOAD_GRAD, args, {}, f"offload_grad_{_label(parameter)}")
    node.meta["val"] = None
    meta.set_origin(node, parameter.name)


def _label(parameter: ParameterInput) -> str:
    return parameter.name.replace(".", "_")


def _after(gm: GraphModule, after: Node, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Node:
    with gm.graph.inserting_after(after):
        node = gm.graph.create_node("call_function", op, args, kwargs, name=name)
    node.meta = {**meta.place_of(after), "partitioner_tag": "is_backward"}
    return node
