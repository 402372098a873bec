"""own_gradients: no gradient is an input itself.

Requires: an annotated joint graph.
Ensures: what the backward returns, it has made. A custom backward may return a parameter, or what the model was called with, as
it is or as a view; a parameter's memory is another's when the backward has returned, and autograd may add to what it gets.

    joint(primals, tangents) -> (outputs, p)     ->     own_p = clone(p);  (outputs, own_p)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from lohan_fx import meta
from lohan_fx.passes.activation_graph import is_tangent
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import outputs_of, set_outputs
from lohan_fx.passes.liveness import storage_of


def own_gradients(joint: GraphModule, num_outputs: int) -> None:
    """Copy each gradient, of those behind the first ``num_outputs`` outputs of ``joint``, that lies in an input's memory."""
    outputs = outputs_of(joint)
    owned = [_owned(joint, gradient) for gradient in outputs[num_outputs:]]
    if owned != outputs[num_outputs:]:
        set_outputs(joint, [*outputs[:num_outputs], *owned])
        annotate(joint)


def _owned(joint: GraphModule, gradient: object) -> object:
    if not isinstance(gradient, Node):
        return gradient
    storage, value = storage_of(gradient), meta.tensor(gradient)
    if storage.op != "placeholder" or is_tangent(storage):
        return gradient
    assert value is not None, f"{gradient.name}, a gradient, is not a tensor"
    clone = torch.ops.aten.clone.default
    with joint.graph.inserting_before(joint.graph.output_node()):
        node = joint.graph.create_node("call_function", clone, (gradient,), name=f"own_{gradient.name}")
    node.meta = {"val": torch.empty_like(value), "partitioner_tag": "is_backward"}
    return node
