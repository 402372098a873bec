"""What our passes note on FX nodes: the one module that touches our ``node.meta`` keys.

Every accessor names, where the note is missing, the pass that sets it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import sympy
import torch
from torch.fx import Node

_COST = "lohan_cost"
_ORIGIN = "lohan_origin"
_READS = "lohan_reads"
RECOMPUTED = "recompute_"
"""What the names of recomputed nodes begin with."""


class Phase(enum.StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"


class Lane(enum.StrEnum):
    """The five queues of the machine: what runs in one of them runs one after the other."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    SSD = "ssd"
    CPU = "cpu"


@dataclass(frozen=True)
class Cost:
    """What a node costs; set by ``annotate``.

    ``flops``, ``bytes`` (storage it allocates: 0 for a view) and ``touched_bytes`` (read and written) are numbers
    at the traced sizes; the ``*_expr`` are the same as sympy expressions where a size is symbolic. ``measured_s``:
    seconds on this machine, where ``op_times`` has measured them, without those for ``cleared_bytes``: memory that is fresh from
    the kernel each time the op runs (``assign_buffers``). ``scratch_bytes``: what it takes beside what it makes, only while it
    runs, where that was measured too. ``runs_unread``: whether it must run, once, also if nothing reads what it makes.
    """

    flops: int
    bytes: int
    touched_bytes: int
    flops_expr: sympy.Expr
    bytes_expr: sympy.Expr
    layer: str
    layer_kind: str
    phase: Phase
    lane: Lane
    is_view: bool
    is_random: bool
    runs_unread: bool = False
    measured_s: float | None = None
    cleared_bytes: int = 0
    scratch_bytes: int = 0


def cost(node: Node) -> Cost:
    """The cost noted on ``node``. Set by ``annotate``."""
    found = node.meta.get(_COST)
    if not isinstance(found, Cost):
        raise AssertionError(f"node {node.name} has no cost: run lohan_fx.passes.annotate first")
    return found


def has_cost(node: Node) -> bool:
    return isinstance(node.meta.get(_COST), Cost)


def set_cost(node: Node, value: Cost) -> None:
    node.meta[_COST] = value


def clear_cost(node: Node) -> None:
    """Forget the cost of ``node``, whose value has changed; ``annotate`` will set it again."""
    node.meta.pop(_COST, None)


def place_of(node: Node) -> dict[str, object]:
    """The meta that says where ``node`` belongs (layer and phase), for a node inserted beside it."""
    keys = ("nn_module_stack", "fwd_nn_module_stack", "partitioner_tag")
    return {key: node.meta[key] for key in keys if key in node.meta}


def origin(node: Node) -> str | None:
    """What an inserted node stands for: a parameter's name, or the forward value's node name. Set by ``insert_*``."""
    found = node.meta.get(_ORIGIN)
    return found if isinstance(found, str) else None


def set_origin(node: Node, name: str) -> None:
    node.meta[_ORIGIN] = name


def is_recomputed(node: Node) -> bool:
    """Whether ``insert_recompute`` made ``node``: an op of the forward that runs again in the backward."""
    return origin(node) is not None and node.name.startswith(RECOMPUTED)


def reads(node: Node) -> tuple[str, ...] | None:
    """The values that ``node`` read in the captured graph, by name (the output: one per place, "" where there is none),
    or None for an inserted node. Set by ``partition``."""
    found = node.meta.get(_READS)
    return found if isinstance(found, tuple) else None


def set_reads(node: Node, names: tuple[str, ...]) -> None:
    node.meta[_READS] = names


def value(node: Node) -> torch.Tensor | torch.SymInt | int | tuple[object, ...] | list[object] | None:
    """The fake value that tracing left on ``node``, or None."""
    found: torch.Tensor | torch.SymInt | int | tuple[object, ...] | list[object] | None = node.meta.get("val")
    return found


def tensor(node: Node) -> torch.Tensor | None:
    """The fake tensor of ``node``, or None where it does not produce a single tensor."""
    found = node.meta.get("val")
    return found if isinstance(found, torch.Tensor) else None
