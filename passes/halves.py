"""halves: the two graphs that the rewriting passes work on, and how they are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, GraphModule, Node

from lohan_fx import meta
from lohan_fx.plan import Plan


@dataclass(frozen=True)
class ParameterInput:
    """A parameter among the inputs of a captured graph: its slot in the runtime and its name in the model."""

    slot: int
    name: str
    trainable: bool


@dataclass(frozen=True)
class Assignment:
    """Where values of a graph lie, by their nodes' names; set by ``assign_buffers``.

    ``offsets``: first byte in a stretch of ``nbytes``, of those that live no longer than the graph runs. ``outliving``: those
    that do, and get a place as they are made.
    """

    offsets: Mapping[str, int]
    nbytes: int
    outliving: frozenset[str] = frozenset()


@dataclass
class Halves:
    """The forward graph and, in training, the backward graph.

    The forward returns its ``num_outputs`` outputs and after them the values that cross to the backward; the
    backward takes them, in the same order (symbolic sizes first), under the same placeholder names, and then the
    tangents. ``parameters``: placeholder name -> parameter. ``gradients``: position among the backward's outputs
    -> parameter whose gradient that is. ``activation_slots``: slots that ``insert_swaps`` may give out. ``compiled``: per
    half, the segments that are to run compiled, by their names (``cut_segments``). ``assigned``: per half, the values that are
    to lie in the workspace. ``module``: which was called, by its name in the model, whose own is "".
    """

    forward: GraphModule
    backward: GraphModule | None
    num_outputs: int
    parameters: dict[str, ParameterInput]
    gradients: dict[int, ParameterInput]
    activation_slots: range
    compiled: dict[str, dict[str, Callable[[list[Any]], Any]]] = field(default_factory=dict)
    assigned: dict[str, Assignment] = field(default_factory=dict)
    module: str = ""

    def graphs(self) -> Iterator[tuple[str, GraphModule]]:
        """("forward", gm) and, where there is one, ("backward", gm)."""
        yield "forward", self.forward
        if self.backward is not None:
            yield "backward", self.backward

    def recompile(self) -> None:
        for _, gm in self.graphs():
            gm.graph.lint()
            gm.recompile()

    def crossing(self) -> list[Node]:
        """The forward nodes whose values go to the backward, in order."""
        return [n for n in outputs_of(self.forward)[self.num_outputs :] if isinstance(n, Node)]

    def saved_placeholders(self) -> dict[str, Node]:
        """The backward's placeholders by name, tangents left out."""
        if self.backward is None:
            return {}
        found = self.backward.graph.find_nodes(op="placeholder")
        return {n.name: n for n in found if not n.name.startswith("tangents")}

    def returned(self, half: str) -> list[Node]:
        """What ``half`` returns to whoever called the model, or its backward."""
        gm = dict(self.graphs())[half]
        outputs = outputs_of(gm)[: self.num_outputs] if half == "forward" else outputs_of(gm)
        return [n for n in outputs if isinstance(n, Node)]

    def set_crossing(self, crossing: list[Node]) -> None:
        """Make ``crossing`` what the forward hands to the backward, whose inputs the caller keeps in the same order."""
        assert self.backward is not None
        set_outputs(self.forward, outputs_of(self.forward)[: self.num_outputs] + crossing)


Pass = Callable[[Halves, Plan], None]


def outputs_of(gm: GraphModule) -> list[object]:
    """What ``gm`` returns, as a flat list."""
    (outputs,) = gm.graph.output_node().args
    assert isinstance(outputs, tuple | list), "a captured graph returns one flat sequence"
    return list(outputs)


def set_outputs(gm: GraphModule, outputs: list[object]) -> None:
    gm.graph.output_node().args = (tuple(outputs),)  # type: ignore[arg-type]


def positions(graph: Graph) -> dict[Node, int]:
    """Each node's place in the order of execution."""
    return {node: place for place, node in enumerate(graph.nodes)}


def first_user(node: Node, order: dict[Node, int]) -> Node:
    """The user of ``node`` that runs first."""
    return min(node.users, key=lambda user: order[user])


def last_user(node: Node, order: dict[Node, int]) -> Node:
    """What reads the storage of ``node`` last, through views too; ``node`` itself where nothing does."""
    last, stack = node, [node]
    while stack:
        for user in stack.pop().users:
            if order[user] > order[last]:
                last = user
            if user.op == "call_function" and meta.has_cost(user) and meta.cost(user).is_view:
                stack.append(user)
    return last
