"""traits: what the systems judge an activation by: how long it lies idle, what moving or making it again takes."""

from __future__ import annotations

from dataclasses import dataclass

from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.activation_graph import ActivationGraph
from lohan_fx.passes.search import useful
from lohan_fx.plan import Keep, Tier
from lohan_fx.planning.plan_builder import saving
from lohan_fx.planning.problem import Problem


@dataclass(frozen=True)
class Trait:
    """Of one activation that the backward reads if everything is saved.

    ``idle_s``: from its last use in the forward to its first in the backward, which is taken to be the forward in
    reverse; ``recompute_s``: its producer's seconds (what that reads is taken to be there); ``heavy``: its producer is a
    matmul, a convolution or an attention, as these alone count FLOPs.
    """

    name: str
    bytes: int
    idle_s: float
    recompute_s: float
    mandatory: bool
    heavy: bool


def traits(problem: Problem) -> list[Trait]:
    """Those of all activations worth a transfer, in the order in which the forward makes them."""
    found = problem.activations
    idle_s = _idle_seconds(problem)
    saved = [name for name, d in saving(problem, useful(found), Keep()).items() if isinstance(d, Keep)]
    return [
        Trait(
            name=name,
            bytes=found.activations[name].bytes,
            idle_s=idle_s[name],
            recompute_s=found.seconds[found.activations[name].producer],
            mandatory=name in found.mandatory,
            heavy=found.flops[found.activations[name].producer] > 0,
        )
        for name in saved
        if found.activations[name].bytes >= problem.small_activation_bytes
    ]


def round_trip_s(nbytes: int, tier: Tier, hw: HardwareProfile) -> float:
    """Seconds of the slowest link on the way of ``nbytes`` to ``tier``, and back."""
    out, back = nbytes / hw.d2h_bytes_per_s, nbytes / hw.h2d_bytes_per_s
    if tier is Tier.NVME:
        if not hw.nvme:
            return float("inf")
        out, back = max(out, nbytes / hw.ssd_write_bytes_per_s), max(back, nbytes / hw.ssd_read_bytes_per_s)
    return out + back


def heavy_inputs(problem: Problem) -> set[str]:
    """Activations that a matmul, a convolution or an attention reads, through views."""
    found = problem.activations
    heavy = {name for name in found.graph if found.flops[name] > 0}
    return {source for name in heavy for source in _sources(found, name)}


def _idle_seconds(problem: Problem) -> dict[str, float]:
    found = problem.activations
    total_s = sum(found.seconds[name] for name in found.graph) or 1.0
    scale = problem.forward_s / total_s
    away = scale * (1 + problem.backward_s / problem.forward_s) if problem.forward_s else 0.0
    passed_s, last_use_s = 0.0, {}
    for name in found.graph:
        passed_s += found.seconds[name]
        last_use_s[name] = passed_s
        for source in _sources(found, name):
            last_use_s[source] = passed_s
    return {name: (total_s - used_s) * away for name, used_s in last_use_s.items()}


def _sources(found: ActivationGraph, name: str) -> set[str]:
    """The activations that ``name`` reads, itself or through views and tuples."""
    sources: set[str] = set()
    stack = list(found.graph.predecessors(name))
    while stack:
        source = stack.pop()
        if source in found.activations:
            sources.add(source)
        else:
            stack.extend(found.graph.predecessors(source))
    return sources
