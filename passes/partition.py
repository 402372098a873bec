"""partition: cut the joint graph into a forward and a backward.

Requires: an annotated joint graph and its plan.
Ensures: the forward also returns each value that the backward reads or that the plan saves, exactly once; views
are not saved but taken again from what they view. Random ops and those with effects run in the half that they were
traced in, also where nothing there reads them. Values planned ``Recompute`` still cross: ``insert_recompute``,
next, replaces them, and after it exactly what the plan keeps or swaps crosses, beside inputs and outputs.

    joint(primals, tangents) -> (outputs, gradients)
        becomes
    forward(primals) -> (outputs, saved, symbolic sizes)
    backward(symbolic sizes, saved, tangents) -> gradients
"""

from __future__ import annotations

from typing import Any

from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from lohan_fx import meta
from lohan_fx.meta import Phase
from lohan_fx.passes.activation_graph import (
    crossing_values,
    forward_nodes,
    inputs_with_gradients,
    is_tangent,
    unread_ops,
)
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, ParameterInput, outputs_of, positions
from lohan_fx.plan import Plan, Recompute


def partition(
    joint: GraphModule,
    plan: Plan,
    *,
    num_outputs: int,
    parameters: dict[str, ParameterInput],
    activation_slots: range,
) -> Halves:
    """The two halves of ``joint``; ``parameters`` maps its placeholders to the model's parameters."""
    note_reads(joint)
    forward = forward_nodes(joint, num_outputs)
    crossing = _crossing(joint, plan, forward, num_outputs)
    sizes = [n for n in crossing if meta.tensor(n) is None]
    saved = [n for n in crossing if meta.tensor(n) is not None]
    placeholders = joint.graph.find_nodes(op="placeholder")
    primals = [n for n in placeholders if not is_tangent(n)]
    tangents = [n for n in placeholders if is_tangent(n)]
    outputs = outputs_of(joint)
    descs = list(joint.graph.output_node().meta.get("desc") or [None] * len(outputs))
    saved_descs = [SavedForBackwardsAOTOutput(i) for i in range(len(saved) + len(sizes))]
    forward_gm = _extract(
        joint, primals, [*outputs[:num_outputs], *saved, *sizes], descs[:num_outputs] + saved_descs, Phase.FORWARD
    )
    backward_gm = _extract(
        joint, [*sizes, *saved, *tangents], outputs[num_outputs:], descs[num_outputs:], Phase.BACKWARD
    )
    return Halves(
        forward=forward_gm,
        backward=backward_gm,
        num_outputs=num_outputs,
        parameters=parameters,
        gradients={
            i: parameters[n.name]
            for i, n in enumerate(inputs_with_gradients(joint, num_outputs))
            if n.name in parameters and isinstance(outputs[num_outputs + i], Node)
        },
        activation_slots=activation_slots,
    )


def note_reads(gm: GraphModule) -> None:
    """Note on each op, and on the output, which values it reads, so that ``verify`` can hold every later graph against
    the captured one."""
    for node in gm.graph.nodes:
        if node.op == "call_function":
            meta.set_reads(node, tuple(n.name for n in node.all_input_nodes))
    meta.set_reads(gm.graph.output_node(), _names(outputs_of(gm)))


def _names(outputs: list[object]) -> tuple[str, ...]:
    """The name of each output; "" for what is no value of the graph."""
    return tuple(n.name if isinstance(n, Node) else "" for n in outputs)


def _crossing(joint: GraphModule, plan: Plan, forward: dict[Node, None], num_outputs: int) -> list[Node]:
    """What crosses: all that the backward reads, views replaced by what they view and their symbolic sizes, and what the plan
    saves besides."""
    outputs = set(outputs_of(joint)[:num_outputs])
    crossing: dict[Node, None] = {}
    for node in crossing_values(joint, num_outputs):
        while node in forward and node not in outputs and meta.cost(node).is_view:
            node, *sizes = node.all_input_nodes
            crossing.update(dict.fromkeys(sizes))
        crossing[node] = None
    by_name = {n.name: n for n in joint.graph.nodes}
    for activation in plan.activations:
        if activation.node not in by_name:
            raise ValueError(
                f"the plan names activation {activation.node}, which this graph lacks: the plan is of another model or "
                "shape"
            )
        if not isinstance(activation.decision, Recompute):
            crossing[by_name[activation.node]] = None
    order = positions(joint.graph)
    return sorted(crossing, key=lambda n: order[n])


def _extract(
    joint: GraphModule, inputs: list[Node], outputs: list[object], descs: list[object], phase: Phase
) -> GraphModule:
    """The part of ``joint`` that computes ``outputs`` from ``inputs``, and what of ``phase`` runs unread, in the joint
    graph's order.

    Except that a forward view is taken right before its first use: at the top of the backward it would ask for its
    storage long before it is needed.
    """
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
        meta.clear_cost(copies[node])

    def copy(node: Node) -> Node:
        if node not in copies:
            assert node.op != "placeholder", f"{node.name} is not among the inputs of this half"
            for source in node.all_input_nodes:
                copy(source)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
            copies[node].meta = dict(node.meta)
        return copies[node]

    wanted = _ancestors_until([*outputs, *unread_ops(joint, phase)], set(inputs))
    for node in joint.graph.nodes:
        cost = meta.cost(node)
        if node in wanted and not (cost.is_view and cost.phase is Phase.FORWARD):
            copy(node)
    returned: list[Any] = [copy(n) if isinstance(n, Node) else n for n in outputs]
    output = graph.output(tuple(returned))
    output.meta["desc"] = descs
    meta.set_reads(output, _names(outputs))
    # Its code is made when it is to run: most halves are only looked at.
    with _use_lazy_graph_module(True):
        half = _make_graph_module(joint, graph)
    annotate(half)
    return half


def _ancestors_until(roots: list[object], inputs: set[Node]) -> set[Node]:
    wanted: set[Node] = set()
    stack = [n for n in roots if isinstance(n, Node)]
    while stack:
        node = stack.pop()
        if node not in wanted and node not in inputs:
            wanted.add(node)
            stack.extend(node.all_input_nodes)
    return wanted
