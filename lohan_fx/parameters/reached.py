"""reached: which parameters a backward gives a gradient, as autograd would say.

A compiled backward is one node of autograd's graph, and computes all gradients there are. Autograd gives none to a parameter
that nobody asked about (``torch.autograd.grad(loss, x)``, ``loss.backward(inputs=...)``), nor to one that leads only to outputs
which the loss does not use: their gradients are undefined, and AOTAutograd hands in zeros for them. An optimizer leaves such a
parameter alone, while a gradient of zeros decays it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import ForwardTokenAOTOutput, TangentAOTInput
from torch.autograd.graph import Node as AutogradNode

from lohan_fx import ops
from lohan_fx.parameters.shell import Shell
from lohan_fx.passes.activation_graph import is_tangent
from lohan_fx.passes.halves import Halves

Sources = Mapping[int, Collection[int]]
"""slot -> which outputs of the forward its gradient comes from, by their places."""

_DEFINED = "_lohan_defined"
_MOST_VIEWS = 8
"""So many views AOTAutograd may have taken of an output."""


def sources_of(halves: Halves) -> Sources:
    """Of each parameter that the backward of ``halves`` makes a gradient for."""
    assert halves.backward is not None
    descs = halves.forward.graph.output_node().meta["desc"][: halves.num_outputs]
    places = {desc: place for place, desc in enumerate(d for d in descs if not isinstance(d, ForwardTokenAOTOutput))}
    found: dict[int, frozenset[int]] = {}
    leads: dict[torch.fx.Node, frozenset[int]] = {}
    for node in halves.backward.graph.nodes:
        if is_tangent(node):
            desc = node.meta["desc"]
            assert isinstance(desc, TangentAOTInput), f"{node.name} is the gradient of {desc}"
            leads[node] = frozenset([places[desc.output]])
        else:
            leads[node] = frozenset().union(*(leads[source] for source in node.all_input_nodes))
        if node.target is ops.OFFLOAD_GRAD:
            # A custom backward may read no gradient at all, and nothing tells then of which output it is.
            found[int(node.args[1])] = leads[node] or frozenset(places.values())
    return found


def noting_undefined(run: Callable[..., Any], sources: Sources) -> Callable[..., Any]:
    """``run``, a compiled graph as Dynamo calls it; its backward notes which of its outputs had no gradient.

    ``sources`` may be filled by the time of the first call. Where all parameters have the same, there is nothing to note.
    """

    @functools.wraps(run)
    def noting(*args: Any) -> Any:
        outputs = run(*args)
        if len(set(sources.values())) > 1:
            _note(outputs, sources)
        return outputs

    return noting


def _note(outputs: Iterable[object], sources: Sources) -> None:
    found = (_compiled_node(each.grad_fn, sources) for each in outputs if isinstance(each, torch.Tensor))
    node = next((each for each in found if each is not None), None)
    if node is None:
        return
    defined: list[bool] = []

    def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
        defined[:] = [gradient is not None for gradient in gradients]

    node.register_prehook(note)
    setattr(node, _DEFINED, defined)


def _compiled_node(node: AutogradNode | None, sources: Sources) -> AutogradNode | None:
    """The node of the graph of ``sources`` that ``node``, of one of its outputs, is or views."""
    for _ in range(_MOST_VIEWS):
        if node is None or any(_slot_of(source) in sources for source, _ in node.next_functions):
            return node
        node = node.next_functions[0][0] if node.next_functions else None
    return None


def _slot_of(source: AutogradNode | None) -> int | None:
    """The slot for whose parameter ``source`` accumulates gradients."""
    shell = getattr(source, "variable", None)
    return shell.slot if isinstance(shell, Shell) else None


def _is_trained(source: AutogradNode) -> bool:
    """Not if it was frozen since the forward."""
    return bool(source.variable.requires_grad)  # type: ignore[attr-defined]


def reached(sources: Sources) -> Collection[int]:
    """The slots that the backward which runs now gives a gradient. Called by the graph of that backward."""
    node = torch._C._current_autograd_node()
    if node is None:
        return frozenset(sources)
    defined = getattr(node, _DEFINED, None)
    found = set()
    for source, _ in node.next_functions:
        slot = _slot_of(source)
        if source is None or slot is None or slot not in sources:
            continue
        leads_here = defined is None or any(defined[place] for place in sources[slot])
        if leads_here and _is_trained(source) and torch._C._will_engine_execute_node(source):
            found.add(slot)
    return found
