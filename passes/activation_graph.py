"""activation_graph: the forward half of a joint graph as numbers, for the search.

Requires: ``annotate`` has run on the joint graph.
Ensures: a value; the graph is unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import networkx as nx
import torch
from torch._functorch._aot_autograd.descriptors import BackwardTokenAOTInput, ForwardTokenAOTInput, GradAOTOutput
from torch.fx import GraphModule, Node

from lohan_fx import meta
from lohan_fx.meta import Cost, Phase

SEEDS_ON_HOST = {"aten._scaled_dot_product_efficient_attention": (2, 3)}
"""Of which op which results lie in host memory, also where a GPU runs it and its fake kernel says otherwise."""


@dataclass(frozen=True)
class Activation:
    """One forward value that could be saved: its storage is its own (not a view) and it is a tensor. ``on_host``: it never is
    on the device, and has nowhere to go."""

    name: str
    op: str
    producer: str
    layer: str
    layer_kind: str
    bytes: int
    on_host: bool = False


@dataclass(frozen=True)
class ActivationGraph:
    """What the search has to know of a model.

    ``graph``: edges producer -> consumer between forward values, by node name; inputs are left out, because they
    are there anyway, and so are the forward's outputs. ``flops``, ``seconds``: what computing a value once costs; views cost
    nothing here, also where they are timed: by one of an input that all blocks read, they would hang together.
    ``needed``: values that the backward reads. ``mandatory``: values that must be saved, because recomputation starts
    from them (the tensors between blocks) or would give other numbers (outputs of random ops, and of those that read
    what the forward changes).
    """

    graph: nx.DiGraph
    flops: dict[str, int]
    seconds: dict[str, float]
    activations: dict[str, Activation]
    needed: frozenset[str]
    mandatory: frozenset[str]


def activation_graph(joint: GraphModule, *, num_outputs: int, node_seconds: Callable[[Cost], float]) -> ActivationGraph:
    """The ``ActivationGraph`` of ``joint``, whose first ``num_outputs`` outputs are the forward's."""
    outputs = set(_flat_outputs(joint)[:num_outputs])
    forward = {n: None for n in forward_nodes(joint, num_outputs) if n not in outputs}
    graph = nx.DiGraph()
    activations: dict[str, Activation] = {}
    for node in forward:
        graph.add_node(node.name)
        graph.add_edges_from((source.name, node.name) for source in node.all_input_nodes if source in forward)
        if is_savable(node):
            activations[node.name] = _activation(node)
    needed = frozenset(n.name for n in crossing_values(joint, num_outputs) if n in forward)
    costs = {node.name: meta.cost(node) for node in forward}
    found = ActivationGraph(
        graph=graph,
        flops={name: cost.flops for name, cost in costs.items()},
        seconds={name: 0.0 if cost.is_view else node_seconds(cost) for name, cost in costs.items()},
        activations=activations,
        needed=needed,
        mandatory=frozenset(),
    )
    between_blocks = {n.name for n in forward if n.name in activations and _leaves_its_block(n, forward)}
    once = {name for name, cost in costs.items() if cost.is_random} | _reads_what_changes(joint)
    return _with_mandatory(found, between_blocks, once)


def closure(found: ActivationGraph, saved: Collection[str], *, reached: set[str] | None = None) -> set[str]:
    """What must really be recomputed in the backward, given what is ``saved``: names of forward values.

    Walks up from every value that the backward needs and stops at saved ones (added to ``reached`` where given)
    and at the inputs. Views count too; they cost nothing.
    """
    recomputed: set[str] = set()
    stack = list(found.needed)
    while stack:
        name = stack.pop()
        if name in saved:
            if reached is not None:
                reached.add(name)
        elif name not in recomputed:
            recomputed.add(name)
            stack.extend(found.graph.predecessors(name))
    return recomputed


def forward_nodes(joint: GraphModule, num_outputs: int) -> dict[Node, None]:
    """The ops that the forward outputs need, those of the forward that run unread, and all parts of what these return, in
    graph order.

    What else there is belongs to the backward.
    """
    outputs = [n for n in _flat_outputs(joint)[:num_outputs] if isinstance(n, Node)]
    wanted = _ancestors([*outputs, *unread_ops(joint, Phase.FORWARD)])
    for node in joint.graph.nodes:
        if node.op == "call_function" and node.target is operator.getitem and node.args[0] in wanted:
            wanted.add(node)
    return {n: None for n in joint.graph.nodes if n in wanted and n.op != "placeholder"}


def crossing_values(joint: GraphModule, num_outputs: int) -> list[Node]:
    """Forward values and inputs that the backward reads, in graph order."""
    forward = forward_nodes(joint, num_outputs)
    gradients = [n for n in _flat_outputs(joint)[num_outputs:] if isinstance(n, Node)]
    backward = _ancestors([*gradients, *unread_ops(joint, Phase.BACKWARD)])
    inside = {n for n in backward if n not in forward and n.op != "placeholder"}
    read = {source for node in inside for source in node.all_input_nodes}
    read |= {n for n in _flat_outputs(joint)[num_outputs:] if isinstance(n, Node) and n in forward}
    return [n for n in joint.graph.nodes if n in read and n not in inside and not is_tangent(n)]


def unread_ops(joint: GraphModule, phase: Phase) -> list[Node]:
    """The ops of ``phase`` that run whether or not anything reads them."""
    return [n for n in joint.graph.nodes if meta.cost(n).runs_unread and meta.cost(n).phase is phase]


def is_tangent(node: Node) -> bool:
    """Whether ``node`` is the gradient of an output, which autograd hands to the backward."""
    return node.op == "placeholder" and node.name.startswith("tangents")


def inputs_with_gradients(joint: GraphModule, num_outputs: int) -> list[Node]:
    """The inputs of ``joint`` in the order of what its backward returns for each: all but effect tokens, which AOTAutograd
    puts first where an op has to keep its order (``torch.linalg.inv`` checks for errors), and which have no gradient."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    tokens = (ForwardTokenAOTInput, BackwardTokenAOTInput)
    primals = [n for n in placeholders if not is_tangent(n) and not isinstance(n.meta.get("desc"), tokens)]
    descs = joint.graph.output_node().meta.get("desc") or ()
    for node, desc in zip(primals, descs[num_outputs:], strict=False):
        if isinstance(desc, GradAOTOutput) and desc.grad_of != node.meta.get("desc"):
            raise AssertionError(f"AOTAutograd returns {desc} where the gradient of {node.name} was expected")
    return primals


def is_savable(node: Node) -> bool:
    """Whether ``node`` is a forward tensor with a storage of its own."""
    return node.op == "call_function" and meta.tensor(node) is not None and not meta.cost(node).is_view


def _flat_outputs(gm: GraphModule) -> list[object]:
    (outputs,) = gm.graph.output_node().args
    assert isinstance(outputs, tuple | list), "a joint graph returns one flat sequence"
    return list(outputs)


def _ancestors(roots: Iterable[Node]) -> set[Node]:
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return seen


def _activation(node: Node) -> Activation:
    cost = meta.cost(node)
    producer = node.all_input_nodes[0] if node.target is operator.getitem else node
    op = producer.target
    name = f"{op.namespace}.{op._opname}" if isinstance(op, torch._ops.OpOverload) else str(op)
    on_host = node is not producer and node.args[1] in SEEDS_ON_HOST.get(name, ())
    return Activation(node.name, name, producer.name, cost.layer, cost.layer_kind, cost.bytes, on_host)


def _leaves_its_block(node: Node, forward: Collection[Node]) -> bool:
    """Whether ``node`` (or a view of it) is read by the forward across the boundary of a numbered block."""
    layer = meta.cost(node).layer
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user not in forward:
            continue
        if meta.cost(user).layer != layer and (_is_block(layer) or _is_block(meta.cost(user).layer)):
            return True
        if meta.cost(user).is_view:
            stack.extend(user.users)
    return False


def _is_block(layer: str) -> bool:
    return layer.rpartition(".")[2].isdigit()


def _reads_what_changes(joint: GraphModule) -> set[str]:
    """Ops that read an input which the forward changes in place (running statistics): run again, they would read what
    the forward left there."""
    descs = joint.graph.output_node().meta.get("desc") or []
    changed = [desc.mutated_input for desc in descs if hasattr(desc, "mutated_input")]
    stack = [n for n in joint.graph.find_nodes(op="placeholder") if n.meta.get("desc") in changed]
    found: set[str] = set()
    while stack:
        for user in stack.pop().users:
            found.add(user.name)
            if user.op == "call_function" and meta.cost(user).is_view:
                stack.append(user)
    return found


def _with_mandatory(found: ActivationGraph, between_blocks: set[str], once: set[str]) -> ActivationGraph:
    """Add what must be saved: block boundaries that anything starts from, and outputs of ops that run only ``once``."""
    stop = set(between_blocks)
    for name in found.activations:
        if found.activations[name].producer in once:
            stop.add(name)
    used: set[str] = set()
    closure(found, stop, reached=used)
    mandatory = frozenset(used & stop)
    return ActivationGraph(found.graph, found.flops, found.seconds, found.activations, found.needed, mandatory)
