"""Small activation graphs that hypothesis invents."""

from __future__ import annotations

import networkx as nx
from hypothesis import strategies as st

from lohan_fx.passes.activation_graph import Activation, ActivationGraph


@st.composite
def activation_graphs(draw: st.DrawFn, ops: int = 6) -> ActivationGraph:
    """Up to eight savable values: results of ops, parts of ops that return two, views between them."""
    graph: nx.DiGraph = nx.DiGraph()
    seconds: dict[str, float] = {}
    activations: dict[str, Activation] = {}
    readable: list[str] = []

    def add(name: str, sources: list[str], time: float) -> None:
        graph.add_node(name)
        graph.add_edges_from((source, name) for source in sources)
        seconds[name] = time

    def savable(name: str, producer: str) -> None:
        activations[name] = Activation(name, "op", producer, "", "", draw(st.integers(1, 50)))
        readable.append(name)

    for number in range(draw(st.integers(1, ops))):
        sources = draw(st.lists(st.sampled_from(readable), max_size=3, unique=True)) if readable else []
        kind = draw(st.sampled_from(["op", "op", "op", "view", "pair"])) if number else "op"
        name = f"{kind}{number}"
        if kind == "view" or (kind == "pair" and len(activations) > 6):
            add(f"view{number}", sources, 0.0)
            readable.append(f"view{number}")
        elif kind == "op":
            add(name, sources, float(draw(st.integers(0, 20))))
            savable(name, name)
        else:
            add(name, sources, float(draw(st.integers(0, 20))))
            for part in (f"{name}.0", f"{name}.1"):
                add(part, [name], 0.0)
                savable(part, name)
    needed = draw(st.sets(st.sampled_from(readable)))
    mandatory = draw(st.sets(st.sampled_from(sorted(activations))))
    flops = {name: int(time) for name, time in seconds.items()}
    return ActivationGraph(graph, flops, seconds, activations, frozenset(needed), frozenset(mandatory))


def repeated(found: ActivationGraph, times: int) -> ActivationGraph:
    """Copies of ``found`` side by side; names end in the copy's number."""
    graph: nx.DiGraph = nx.DiGraph()

    def names(name: str) -> list[str]:
        return [f"{name}@{copy}" for copy in range(times)]

    for copy in range(times):
        graph.add_nodes_from(f"{name}@{copy}" for name in found.graph.nodes)
        graph.add_edges_from((f"{source}@{copy}", f"{reader}@{copy}") for source, reader in found.graph.edges)
    activations = {
        at: Activation(at, a.op, producer, a.layer, a.layer_kind, a.bytes)
        for name, a in found.activations.items()
        for at, producer in zip(names(name), names(a.producer), strict=True)
    }
    return ActivationGraph(
        graph,
        {at: flops for name, flops in found.flops.items() for at in names(name)},
        {at: time for name, time in found.seconds.items() for at in names(name)},
        activations,
        frozenset(at for name in found.needed for at in names(name)),
        frozenset(at for name in found.mandatory for at in names(name)),
    )
