"""insert_recompute: what the plan does not save is computed again in the backward, as late as possible.

Requires: halves from ``partition``.
Ensures: exactly what the plan keeps or swaps crosses (values that nothing reads any more are dropped), beside
inputs and outputs; each recomputed op stands once in the backward, named ``recompute_*``, right before the first
node that needs it or one of its results. Random ops are never replayed. Constants are in both halves.

    backward(a, ...):  use(a)     ->     backward(x, ...):  recompute_a = op(x);  use(recompute_a)
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable

from torch.fx import GraphModule, Node
from torch.fx.graph_module import _copy_attr

from lohan_fx import meta
from lohan_fx.meta import Phase
from lohan_fx.passes.activation_graph import is_tangent
from lohan_fx.passes.annotate import annotate
from lohan_fx.passes.halves import Halves, outputs_of
from lohan_fx.plan import Plan, Recompute


def insert_recompute(halves: Halves, plan: Plan) -> None:
    """Replace each crossing value that is planned ``Recompute`` by clones of the ops that make it."""
    if halves.backward is None:
        return
    outputs = _output_names(halves)
    dropped = {
        n.name for n in halves.crossing() if n.name not in outputs and isinstance(plan.decision(n.name), Recompute)
    }
    placeholders = halves.saved_placeholders()
    cloner = _Cloner(halves, {name: node for name, node in placeholders.items() if name not in dropped})
    for node in list(halves.backward.graph.nodes):
        for source in node.all_input_nodes:
            if source.op == "placeholder" and source.name in dropped:
                node.replace_input_with(source, cloner.clone(cloner.forward[source.name], before=node))
    cloner.finish()
    for name in dropped:
        halves.backward.graph.erase_node(placeholders[name])
    _drop_unread(halves)
    annotate(halves.backward)


def _output_names(halves: Halves) -> set[str]:
    return {n.name for n in outputs_of(halves.forward)[: halves.num_outputs] if isinstance(n, Node)}


class _Cloner:
    """Clones forward ops into the backward, each once, with what they need."""

    def __init__(self, halves: Halves, available: dict[str, Node]) -> None:
        assert halves.backward is not None
        self.forward = {n.name: n for n in halves.forward.graph.nodes}
        self._backward: GraphModule = halves.backward
        self._halves = halves
        self._available = available
        self._outputs = _output_names(halves)
        crossing = halves.crossing()
        self._tensors = [n for n in crossing if meta.tensor(n) is not None]
        self._sizes = [n for n in crossing if meta.tensor(n) is None]
        inputs: Iterable[Node] = self._backward.graph.find_nodes(op="placeholder")
        self._tangent = next((n for n in inputs if is_tangent(n)), None)

    def clone(self, node: Node, *, before: Node) -> Node:
        """The value of the forward's ``node`` in the backward."""
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [s for s in top.all_input_nodes if s.name not in self._available]
            if top.name in self._available:
                stack.pop()
            elif top.op == "placeholder" or top.name in self._outputs:
                self._available[top.name] = self._new_input(top)
            elif missing:
                stack.extend(reversed(missing))
            else:
                self._available[top.name] = self._copy(top, before)
        return self._available[node.name]

    def _copy(self, node: Node, before: Node) -> Node:
        cost = meta.cost(node)
        if cost.is_random:
            raise ValueError(
                f"the plan recomputes {node.name} ({node.target}), which would draw other random numbers: "
                "its outputs must be kept or swapped"
            )
        graph = self._backward.graph
        if node.op == "get_attr":  # a constant of the model's code, which belongs to the half that reads it
            _copy_attr(self._halves.forward, self._backward, str(node.target))
        # A part is taken out at once: until the last one is, the tuple holds them all.
        part_of = self._available[node.all_input_nodes[0].name] if node.target is operator.getitem else None
        with graph.inserting_after(part_of) if part_of else graph.inserting_before(before):
            copy = graph.node_copy(node, lambda n: self._available[n.name])
        copy.name = f"{meta.RECOMPUTED}{node.name}"
        copy.meta = dict(node.meta)
        meta.set_cost(copy, dataclasses.replace(cost, phase=Phase.BACKWARD))
        meta.set_origin(copy, node.name)
        return copy

    def _new_input(self, node: Node) -> Node:
        """Let an input or output of the forward, which is there anyway, cross too: behind the other saved tensors,
        before sizes and tangents."""
        is_tensor = meta.tensor(node) is not None
        with self._backward.graph.inserting_before(self._anchor(is_tensor)):
            placeholder = self._backward.graph.placeholder(node.name)
        placeholder.name = node.name  # which a clone may have had before it got a name of its own
        placeholder.meta = dict(node.meta)
        meta.clear_cost(placeholder)
        if is_tensor:
            self._tensors.append(node)
        else:
            self._sizes.insert(0, node)
        return placeholder

    def _anchor(self, is_tensor: bool) -> Node:
        """The node before which a new input goes."""
        if is_tensor and self._tangent is not None:
            return self._tangent
        nodes: Iterable[Node] = self._backward.graph.nodes
        return next(n for n in nodes if not is_tensor or n.op != "placeholder")

    def finish(self) -> None:
        """Let the forward hand over what became an input of the backward."""
        self._halves.set_crossing([*self._tensors, *self._sizes])


def _drop_unread(halves: Halves) -> None:
    """Let nothing cross that the backward does not read."""
    assert halves.backward is not None
    for node in halves.saved_placeholders().values():
        if not node.users:
            halves.backward.graph.erase_node(node)
    present = set(halves.saved_placeholders())
    halves.set_crossing([n for n in halves.crossing() if n.name in present])
    halves.forward.graph.eliminate_dead_code()
