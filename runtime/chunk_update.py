"""chunk_update: one chunk of a gradient on its way to the optimizer, and the arithmetic at the end of that way.

Guarantees: ``compute`` touches the chunk's arrays and nothing else. ``wait_for_all`` returns or raises only once every
read is over, or late by a lane's timeout.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from lohan_fx.runtime import adam
from lohan_fx.runtime.adam import AdamOptions
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.checksum import Checksums, Compare
from lohan_fx.runtime.gradient_norm import norm_of
from lohan_fx.runtime.host_pool import Buffer
from lohan_fx.runtime.lanes import Work
from lohan_fx.runtime.machine import STATE_READ_PRIORITY, STATE_WRITE_PRIORITY, Machine
from lohan_fx.runtime.slots import Chunk, Held
from lohan_fx.runtime.state_buffer import Movement, StateBuffer


class Purpose(enum.Enum):
    """What an offered gradient is for."""

    HOLD = "hold"
    """More gradients of this step will come, or might, or updates run after the backward: add it to what is held."""
    APPLY = "apply"
    """It is the step's last: update with the sum of it and what is held."""


class Kept(enum.Enum):
    """What of an update goes where it came from."""

    ALL = "all"
    COPY = "copy"
    """The compute-dtype copy, which the forward waits for: the first time of two."""
    STATES = "states"
    """Master and moments, which nobody waits for before the next update: the second time."""


@dataclass
class ChunkUpdate:
    """One chunk's way. ``held``, ``adds`` and ``steps_done`` are of the moment the gradient was offered.

    ``factors``: what the gradient is multiplied by before the update. ``update``: the update of the whole parameter, for
    those who wait for it. ``kept``: what of it is written. ``turn``: of the drives, where the next forward waits for it.
    ``gradient``: where the gradient was copied to; ``in_place``: the gradient itself, where host and device share memory.
    """

    chunk: Chunk
    purpose: Purpose
    options: AdamOptions | None
    held: Held | None
    adds: bool
    steps_done: int
    factors: tuple[float, ...] = ()
    update: Arrival | None = None
    kept: Kept = Kept.ALL
    turn: int | None = None
    gradient: Buffer | None = None
    in_place: torch.Tensor | None = None
    left: Countdown | None = None
    states: StateBuffer | None = None
    reads: list[Work[list[Compare]]] = field(default_factory=list)
    failure: BaseException | None = None

    @property
    def updates(self) -> bool:
        return self.purpose is Purpose.APPLY

    @property
    def read_priority(self) -> int:
        return STATE_READ_PRIORITY if self.turn is None else self.turn

    @property
    def write_priority(self) -> int:
        return STATE_WRITE_PRIORITY if self.turn is None else self.turn

    @property
    def measures(self) -> bool:
        """Whether this is the time to take the norm of what is held: it is a sum, and will not be in memory."""
        return not self.updates and self.adds and self.held is not None and self.held.memory is None

    def writes(self) -> list[Movement]:
        """What goes to the store afterwards."""
        assert self.states is not None
        states, copy = self.states.to_write()
        return [*(states if self.kept is not Kept.COPY else ()), *(copy if self.kept is not Kept.STATES else ())]

    def arrived(self) -> torch.Tensor | None:
        """The gradient, or None where only what is held is applied."""
        if self.gradient is None:
            return self.in_place
        return self.gradient.first(self.chunk.elements, self.chunk.parameter.compute_dtype)

    def let_gradient_go(self) -> None:
        """Give up the gradient's memory. Idempotent."""
        if self.gradient is not None:
            self.gradient.release()
        left, self.gradient, self.in_place, self.left = self.left, None, None, None
        if left is not None:
            left.one_less()

    def compute(
        self, machine: Machine, arrived: torch.Tensor | None, comparisons: Sequence[Compare] = ()
    ) -> list[tuple[Movement, Checksums | None]]:
        """``comparisons`` of what was read, then the arithmetic; what to write, with the checksums found here if any are."""
        with machine.timeline.span("cpu", f"update of {self.chunk.parameter.name}", self.chunk.elements * 4):
            for compare in comparisons:
                compare()
            self._compute(machine, arrived)
            return [(movement, machine.checksums(*movement)) for movement in self.writes()]

    def _compute(self, machine: Machine, arrived: torch.Tensor | None) -> None:
        """The arithmetic: sum, update, cast."""
        states = self.states
        assert states is not None
        if not self.updates:
            gradient = states.sum_gradient(arrived)
            if self.held is not None and self.measures:
                self.held.norms[self.chunk.start] = norm_of(gradient)
            return
        assert self.options is not None
        for part in states.parts(adam.part_elements()):
            gradient = states.gradient(arrived, part, self.factors)
            master, *moments = states.updated(part)
            adam.update(self.options, self.steps_done, master, gradient, *moments)
            if self.kept is not Kept.STATES:
                states.make_compute_copy(part)
        if self.kept is not Kept.STATES:
            states.return_compute_copy(machine.link)


class Countdown:
    """Calls ``at_zero`` once, when ``one_less`` has been called ``count`` times."""

    def __init__(self, count: int, at_zero: functools.partial[None]) -> None:
        self._count = count
        self._at_zero = at_zero
        self._lock = threading.Lock()

    def one_less(self) -> None:
        with self._lock:
            self._count -= 1
            reached = self._count == 0
        if reached:
            self._at_zero()


def wait_for_all(reads: Iterable[Work[list[Compare]]]) -> list[Compare]:
    """Wait for each, and only then raise the first failure. What is left to compare of all."""
    comparisons: list[Compare] = []
    errors: list[BaseException] = []
    for read in reads:
        try:
            comparisons += read.wait()
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return comparisons
