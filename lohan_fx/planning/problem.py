"""problem: everything a plan is made from, as numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lohan_fx.passes.activation_graph import ActivationGraph
from lohan_fx.plan import Ends, Plan, Tier, Windows

SMALL_PARAMETER_ELEMENTS = 1 << 15
"""Norm weights and biases: a few bytes that cost an I/O request each; they stay in memory where anything does."""
SMALL_ACTIVATION_BYTES = 4096
"""What is smaller is kept: moving it would cost an I/O request."""
MOST_SMALL_BYTES = 1 << 16
SMALL_SHARE = 0.001
"""So is what is smaller than this share of the largest activation, if less than ``MOST_SMALL_BYTES``: hundreds of such
(statistics of norms) save next to no memory, and each waits in line behind what is large."""


@dataclass(frozen=True)
class ParameterFacts:
    """What the planner knows of a parameter. ``bytes``: of its compute-dtype copy."""

    name: str
    numel: int
    bytes: int
    trainable: bool


@dataclass(frozen=True)
class Budgets:
    """What may be used. ``fixed_bytes``: host memory that is spent whatever the plan (staging, captured graphs).

    ``shared``: the device is the CPU, so that device memory is host memory and both count against one promise.
    """

    host_memory_bytes: int
    device_memory_bytes: int
    fixed_bytes: int
    shared: bool


@dataclass(frozen=True)
class Problem:
    """Everything the planner decides from."""

    policy: str
    compute_dtype: str
    parameters: tuple[ParameterFacts, ...]
    activations: ActivationGraph
    forward_s: float
    backward_s: float
    budgets: Budgets
    windows: Windows
    device_peak: Callable[[Plan], int]
    """Bytes of device memory that the graphs rewritten by a plan need at once, parameters at home on the device aside."""
    fetches: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """How often (forward, backward) read a parameter that is not at home on the device. Once each where nothing is said of any;
    not at all where only others are named. A tied weight is read at both ends, an embedding's not by the backward."""
    ends: Ends = field(default_factory=Ends)
    """The parameters at both ends of a step (``passes.step_ends``)."""
    holds: bool = False
    """All gradients wait for ``step()``."""
    handover_s: float = 0.0
    """What compute takes to hand a transfer over (``cost.handover_s``), which is not in ``forward_s`` and ``backward_s``."""
    launches: tuple[int, int] = (0, 0)
    """Ops that the (forward, backward) launch on a GPU."""
    coming_back_s: Mapping[tuple[str, Tier], float] = field(default_factory=dict)
    """What compute waits for an activation that is swapped to a tier and needed back sooner than it can be
    (``cost.coming_back_s``); none where it is not said."""
    in_turns: bool = False
    """False: the earliest activations are swapped, which are away longest. True: kept and swapped ones take turns over the
    model, so that the link is never idle."""
    soon_back: frozenset[str] = frozenset()
    """With ``in_turns``: activations needed back almost as soon as they have left, which are kept where there is room."""
    windows_of: Callable[[int], Windows] | None = None
    """The windows that a promise of so many bytes of host memory gets; None: these, whatever it is."""
    forwards: int = 1
    """How many wait for their backwards at once."""
    outputs_bytes: int = 0
    """What a forward returns."""
    loss_only: bool = True
    """Whether the caller holds nothing of that but the loss."""
    swaps: bool = True
    """Whether activations may be swapped."""

    def windows_for(self, promise_bytes: int) -> Windows:
        """The windows of another promise of host memory."""
        return self.windows if self.windows_of is None else self.windows_of(promise_bytes)

    @functools.cached_property
    def small_activation_bytes(self) -> int:
        """What is smaller is not worth a transfer."""
        largest = max((a.bytes for a in self.activations.activations.values()), default=0)
        if not self.swaps:
            return largest + 1
        return max(SMALL_ACTIVATION_BYTES, min(MOST_SMALL_BYTES, int(SMALL_SHARE * largest)))
