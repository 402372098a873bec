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
    """Everything the planner decides from.

    ``device_peak(plan)``: bytes of device memory that the graphs rewritten by ``plan`` need at once, parameters at
    home on the device aside. ``fetches``: how often (forward, backward) read a parameter that is not at home there; once each
    where nothing is said of any, and not at all where only others are named. A tied weight is read at both ends, an
    embedding's not by the backward.
    ``ends``: the parameters at both ends of a step (``passes.step_ends``). ``holds``: all gradients wait for ``step()``.
    ``handover_s``: what compute takes to hand a transfer over (``cost.handover_s``), which is not in ``forward_s`` and
    ``backward_s``. ``launches``: how many ops the (forward, backward) launch on a GPU. ``coming_back_s``: what compute waits
    for an activation that is swapped to a tier and needed back sooner than it can be (``cost.coming_back_s``); none where it is
    not said. ``in_turns``: whether what is swapped is spread over the model, which keeps the link at work all the time, instead
    of being what is made first, which is away longest; then ``soon_back``, which are away for little longer than they take, had
    better stay. ``windows_of``: which windows a promise of so many bytes of host memory gets; None: these, whatever it is.
    ``forwards``: how many of them wait for their backwards at once. ``swaps``: whether activations may be swapped.
    """

    policy: str
    compute_dtype: str
    parameters: tuple[ParameterFacts, ...]
    activations: ActivationGraph
    forward_s: float
    backward_s: float
    budgets: Budgets
    windows: Windows
    device_peak: Callable[[Plan], int]
    fetches: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    ends: Ends = field(default_factory=Ends)
    holds: bool = False
    handover_s: float = 0.0
    launches: tuple[int, int] = (0, 0)
    coming_back_s: Mapping[tuple[str, Tier], float] = field(default_factory=dict)
    in_turns: bool = False
    soon_back: frozenset[str] = frozenset()
    windows_of: Callable[[int], Windows] | None = None
    forwards: int = 1
    swaps: bool = True

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
