"""unroll_blocks: from the joint graph of a few equal blocks to that of many.

Requires: an annotated joint graph of ``LEAST_BLOCKS`` blocks ``prefix.0``, ``prefix.1``, ...
Ensures: a new annotated joint graph of ``count`` blocks, node for node what tracing that many would give (names of
nodes aside): the first two and the last two are copies of the traced ones, all between them of the middle one, which
was found equal to its neighbours, op by op and argument by argument. The graph given is unchanged.

    a0 a1 a2 a3 a4 | b4 b3 b2 b1 b0     ->     a0 a1 a2 a2' a2'' a3 a4 | b4 b3 b2'' b2' b2 b1 b0
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.node import map_arg

from lohan_fx import meta
from lohan_fx.passes.activation_graph import inputs_with_gradients, is_tangent
from lohan_fx.passes.halves import ParameterInput, outputs_of

LEAST_BLOCKS = 5
"""Two at each end, and a middle one whose neighbours are no ends."""
_MIDDLE = LEAST_BLOCKS // 2

_STACKS = ("nn_module_stack", "fwd_nn_module_stack")


class BlocksDiffer(Exception):
    """The traced blocks are not equal, or not laid out one after the other: all have to be traced."""


def unroll_blocks(
    joint: GraphModule,
    *,
    prefix: str,
    count: int,
    num_outputs: int,
    parameters: Mapping[str, ParameterInput],
) -> tuple[GraphModule, dict[str, str]]:
    """The joint graph with ``count`` blocks, and the name of the parameter that each of its placeholders is.

    Raises ``BlocksDiffer`` where the blocks of ``joint`` are not equal, and ``ValueError`` for too few.
    """
    if count < LEAST_BLOCKS:
        raise ValueError(f"count is {count}: expected at least {LEAST_BLOCKS} blocks")
    blocks = _Blocks(joint, prefix, num_outputs)
    blocks.check()
    blocks.check_parameters({placeholder: parameter.name for placeholder, parameter in parameters.items()})
    unrolled = _Unrolled(blocks, count)
    names = {
        node.name: _renumbered(parameters[old.name].name, prefix, block)
        for (old, block), node in unrolled.copies.items()
        if old.name in parameters
    }
    with _use_lazy_graph_module(True):
        return _make_graph_module(joint, unrolled.graph), names


class _Blocks:
    """Which block each node belongs to (None: to none), and its place in it."""

    def __init__(self, joint: GraphModule, prefix: str, num_outputs: int) -> None:
        self.joint, self.prefix, self.num_outputs = joint, prefix, num_outputs
        self.block: dict[Node, int | None] = {}
        self.members: dict[int, list[Node]] = {number: [] for number in range(LEAST_BLOCKS)}
        self.place: dict[Node, int] = {}
        self.primals = inputs_with_gradients(joint, num_outputs)
        outputs = outputs_of(joint)[num_outputs : num_outputs + len(self.primals)]
        self.gradient = dict(zip(self.primals, outputs, strict=True))
        # Parameters first are named by who reads them, so the readers come first.
        for node in joint.graph.nodes:
            if node.op == "call_function":
                self.block[node] = self._of(meta.cost(node).layer)
        for node in joint.graph.nodes:
            if node.op != "call_function":
                readers = {self.block[user] for user in node.users if user.op != "output"}
                is_input = node.op in ("placeholder", "get_attr") and not is_tangent(node)
                self.block[node] = readers.pop() if is_input and len(readers) == 1 else None
        in_blocks = ((n, self.block[n]) for n in joint.graph.nodes)
        for node, block in in_blocks:
            if block is None:
                continue
            self.place[node] = len(self.members[block])
            self.members[block].append(node)

    def _of(self, layer: str) -> int | None:
        found = re.fullmatch(re.escape(self.prefix) + r"\.(\d+)", layer)
        number = int(found.group(1)) if found else None
        if number is not None and number >= LEAST_BLOCKS:
            raise ValueError(f"the graph has a block {layer}: expected {LEAST_BLOCKS} blocks")
        return number

    def check(self) -> None:
        """Raise ``BlocksDiffer`` unless the inner blocks are equal and follow one another."""
        inner = range(1, LEAST_BLOCKS - 1)
        if not self.members[_MIDDLE]:
            raise BlocksDiffer(f"{self.prefix}.{_MIDDLE} computes nothing by itself")
        for number in inner:
            if len(self.members[number]) != len(self.members[_MIDDLE]):
                raise BlocksDiffer(
                    f"{self.prefix}.{number} takes {len(self.members[number])} operations, {self.prefix}.{_MIDDLE} takes "
                    f"{len(self.members[_MIDDLE])}"
                )
            for node, like in zip(self.members[number], self.members[_MIDDLE], strict=True):
                if not self._equal(node, like):
                    raise BlocksDiffer(
                        f"{self.prefix}.{number} does not compute what {self.prefix}.{_MIDDLE} does: {_differ(node, like)}"
                    )
        self._check_order()
        for node, block in self.block.items():
            if block is None and node.op != "output" and any(self.block[n] in inner for n in node.all_input_nodes):
                raise BlocksDiffer(f"{_called(node)}, which is outside of the blocks, reads from inside of one")

    def check_parameters(self, names: Mapping[str, str]) -> None:
        """Raise ``BlocksDiffer`` where one of a block is read elsewhere; ``names``: placeholder -> parameter."""
        for node, block in self.block.items():
            found = re.match(re.escape(self.prefix) + r"\.(\d+)\.", names.get(node.name, ""))
            if found is not None and int(found.group(1)) != block:
                raise BlocksDiffer(f"{names[node.name]} is read outside of its block")

    def _equal(self, node: Node, like: Node) -> bool:
        kind = node.op, None if node.op == "placeholder" else node.target, _facts(node)
        if kind != (like.op, None if like.op == "placeholder" else like.target, _facts(like)):
            return False
        read = [(n.args, n.kwargs, self.gradient.get(n)) for n in (node, like)]
        return bool(self._seen_from(node, like, read[0]) == self._seen_from(like, node, read[1]))

    def _seen_from(self, reader: Node, other: Node, arguments: Any) -> Any:
        """``arguments`` of ``reader``, nodes replaced by where they are as seen from its block.

        An end block may be built otherwise inside, so of its nodes only the distance counts; and where the block of
        ``other`` has an end there, too.
        """
        own, others = self.block[reader], self.block[other]
        assert own is not None and others is not None

        def where(node: Node) -> Any:
            number = self.block[node]
            if number is None:
                return _Where(("outside", node.name))
            distance = number - own
            ends = {0, LEAST_BLOCKS - 1}
            at_end = number in ends or others + distance in ends
            return _Where((distance, None if at_end and distance else self.place[node]))

        return _plain(map_arg(arguments, where))

    def _check_order(self) -> None:
        """Raise ``BlocksDiffer`` unless the middle block's nodes stand together wherever they stand, each time between
        its neighbours'."""
        nodes = list(self.joint.graph.nodes)
        numbers = [self.block[n] for n in nodes]
        runs = [n for place, n in enumerate(numbers) if place == 0 or numbers[place - 1] != n]
        for place, number in enumerate(runs):
            if number == _MIDDLE and sorted(map(str, (runs[place - 1], runs[place + 1]))) != [
                str(_MIDDLE - 1),
                str(_MIDDLE + 1),
            ]:
                raise BlocksDiffer(f"the operations of {self.prefix}.{_MIDDLE} are mixed with others")


def _called(node: Node) -> str:
    """What a user knows ``node`` by, who never sees the graph."""
    return "an input" if node.op == "placeholder" else str(node.target)


def _differ(node: Node, like: Node) -> str:
    names = _called(node), _called(like)
    return f"{names[0]} where that has {names[1]}" if names[0] != names[1] else f"{names[0]} of other values"


class _Unrolled:
    """The graph that is made. ``copies``: (traced node, block that its copy is in) -> copy."""

    def __init__(self, blocks: _Blocks, count: int) -> None:
        self.graph = Graph()
        self.copies: dict[tuple[Node, int], Node] = {}
        self._blocks, self._count = blocks, count
        self._primals = 0
        for run in self._runs():
            if blocks.block[run[0]] == _MIDDLE:
                for number in self._order(run):
                    for node in run:
                        self._copy(node, number)
            else:
                for node in run:
                    if node.op != "output":
                        self._copy(node, self._number(blocks.block[node]))
        self._return()

    def _number(self, traced: int | None) -> int:
        """The new number of a traced block outside of the middle; -1 for what is in none."""
        if traced is None:
            return -1
        return traced if traced < _MIDDLE else traced + self._count - LEAST_BLOCKS

    def _runs(self) -> list[list[Node]]:
        runs: list[list[Node]] = []
        for node in self._blocks.joint.graph.nodes:
            if runs and self._blocks.block[runs[-1][0]] == self._blocks.block[node]:
                runs[-1].append(node)
            else:
                runs.append([node])
        return runs

    def _order(self, run: list[Node]) -> range:
        """The numbers of the copies of ``run`` of the middle block: up where the blocks go up, down in the backward."""
        numbers = range(_MIDDLE, self._count - _MIDDLE)
        before = self._blocks.block[run[0].prev]
        return numbers if before == _MIDDLE - 1 else range(numbers[-1], _MIDDLE - 1, -1)

    def _resolve(self, source: Node, reader: Node, number: int) -> Node:
        """The copy of ``source`` for the copy of ``reader`` in the new block ``number``."""
        there, here = self._blocks.block[source], self._blocks.block[reader]
        if there is None:
            return self.copies[source, -1]
        if here is None:
            return self.copies[source, self._number(there)]
        target = number + there - here
        # A neighbour that has copies of the middle block on its other side is one of them itself.
        if not _MIDDLE <= target < self._count - _MIDDLE:
            return self.copies[self._same_place(source, self._traced(target)), target]
        return self.copies[self._same_place(source, _MIDDLE), target]

    def _traced(self, number: int) -> int:
        return number if number < _MIDDLE else number - self._count + LEAST_BLOCKS

    def _same_place(self, node: Node, traced: int) -> Node:
        if self._blocks.block[node] == traced:
            return node
        return self._blocks.members[traced][self._blocks.place[node]]

    def _copy(self, node: Node, number: int) -> None:
        if node.op == "placeholder":
            self._primals += not is_tangent(node)
            copy = self.graph.placeholder(node.name if is_tangent(node) else f"primals_{self._primals}")
        else:
            args = map_arg(node.args, lambda n: self._resolve(n, node, number))
            kwargs = map_arg(node.kwargs, lambda n: self._resolve(n, node, number))
            copy = self.graph.create_node(node.op, node.target, args, kwargs)
        copy.meta = dict(node.meta)
        self.copies[node, number] = copy
        traced = self._blocks.block[node]
        if traced is not None and traced != number:
            self._move(copy, traced, number)

    def _move(self, node: Node, traced: int, number: int) -> None:
        """Let the notes on ``node`` say that it is in block ``number``."""
        block = f"{self._blocks.prefix}.{traced}"
        if node.op == "call_function":
            meta.set_cost(node, dataclasses.replace(meta.cost(node), layer=f"{self._blocks.prefix}.{number}"))
        for key in _STACKS:
            if key in node.meta:
                node.meta[key] = {
                    module: (_in_stack(path, block, number), kind) for module, (path, kind) in node.meta[key].items()
                }

    def _return(self) -> None:
        blocks = self._blocks
        outputs = outputs_of(blocks.joint)
        descs = list(blocks.joint.graph.output_node().meta.get("desc") or [None] * len(outputs))
        places = {node: blocks.num_outputs + place for place, node in enumerate(blocks.primals)}
        returned: list[Any] = [
            self.copies[n, self._number(blocks.block[n])] if isinstance(n, Node) else n
            for n in outputs[: blocks.num_outputs]
        ]
        new_descs = descs[: blocks.num_outputs]
        primals = [(key, copy) for key, copy in self.copies.items() if copy.op == "placeholder" and key[0] in places]
        for place, ((old, number), copy) in enumerate(primals):
            gradient = outputs[places[old]]
            returned.append(self._resolve(gradient, old, number) if isinstance(gradient, Node) else gradient)
            if "desc" in copy.meta:
                copy.meta["desc"] = _numbered(copy.meta["desc"], place)
            desc = descs[places[old]]
            if hasattr(desc, "grad_of"):
                desc = dataclasses.replace(desc, grad_of=_numbered(desc.grad_of, place))
            new_descs.append(desc)
        output = self.graph.output(returned)
        output.meta = {**blocks.joint.graph.output_node().meta, "desc": new_descs}


def _facts(node: Node) -> object:
    """What the notes on ``node`` say, its layer aside."""
    if node.op != "call_function":
        value = meta.tensor(node)
        return None if value is None else (value.shape, value.dtype, value.stride())
    return dataclasses.replace(meta.cost(node), layer="")


@dataclasses.dataclass(frozen=True)
class _Where:
    """Stands for a node among arguments."""

    place: tuple[object, ...]


def _plain(arguments: Any) -> Any:
    """Arguments as tuples, so that they compare by value."""
    if isinstance(arguments, Mapping):
        return tuple((key, _plain(value)) for key, value in arguments.items())
    if isinstance(arguments, list | tuple):
        return tuple(_plain(value) for value in arguments)
    return arguments


def _renumbered(name: str, prefix: str, number: int) -> str:
    """``prefix.7.weight`` of ``prefix.2.weight``; other names as they are."""
    return re.sub(rf"^{re.escape(prefix)}\.\d+\.", f"{prefix}.{number}.", name)


def _in_stack(path: str, block: str, number: int) -> str:
    """The path of a module within ``block`` as it would be in block ``number``; versions of torch write it
    ``h.2.mlp`` or ``h._modules['2'].mlp``."""
    *_, container, old = block.split(".")
    pattern = rf"(\b{re.escape(container)}\W*(?:_modules\W*)?){old}(?!\d)"
    return re.sub(pattern, lambda found: f"{found.group(1)}{number}", path, count=1)


def _numbered(desc: Any, place: int) -> Any:
    return dataclasses.replace(desc, idx=place) if hasattr(desc, "idx") else desc
