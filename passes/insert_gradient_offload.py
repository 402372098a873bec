"""insert_gradient_offload: gradients of parameters leave by node, and autograd sees None.

Requires: halves from ``insert_fetches``.
Ensures: each parameter that gets a gradient has exactly one ``offload_grad``, after the gradient is complete and
after the last use of the parameter in the backward: its arrival may start the update of that parameter.

    return (.., g_p, ..)     ->     last_use(wait_p);  offload_grad_p = offload_grad(g_p, slot);  return (.., None, ..)
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from lohan_fx import meta, ops
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, ParameterInput, last_user, outputs_of, positions, set_outputs
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
    for place, parameter in halves.gradients.items():
        gradient = outputs[place]
        if isinstance(gradient, Node) and parameter.trainable:
            after = max([gradient, *last_uses.get(parameter.name, [])], key=lambda n: order[n])
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


def _insert(gm: GraphModule, gradient: Node, parameter: ParameterInput, after: Node) -> None:
    if after.op == "placeholder":
        after = gm.graph.find_nodes(op="placeholder")[-1]
    label = parameter.name.replace(".", "_")
    with gm.graph.inserting_after(after):
        node = gm.graph.create_node(
            "call_function", ops.OFFLOAD_GRAD, (gradient, parameter.slot), name=f"offload_grad_{label}"
        )
    node.meta = meta.place_of(after)
    node.meta["val"] = None
    node.meta["partitioner_tag"] = "is_backward"
    meta.set_origin(node, parameter.name)
