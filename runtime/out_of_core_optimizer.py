"""out_of_core_optimizer: gradients in, updated parameters out, states on NVMe, chunk by chunk.

A gradient's way: off the device (d2h lane), in chunks, and then as ``chunk_pipeline`` says. What has nothing to move, because
parameter, states and gradient are in the device's memory, is updated at once, on the compute thread.

Guarantees: memory is the pool's "optimizer", "compute" and "gradients" reservations, whatever the size of a parameter. A
gradient on the device lives only until its chunks are copied (where host and device share memory: updated);
``offer`` blocks while more than ``window_bytes`` of them wait. ``barrier`` returns once everything offered is in
place, or raises the first failure, after which the optimizer refuses more work. ``pending`` is settled once the update
of that parameter is in place, or has failed; what fails is raised there and at ``barrier``. Ctrl-C is heard between two
parameters, or two chunks of one that is updated at once: what lanes do is handed to them as a whole.

Assumes: one gradient per parameter and backward (``verify``); chunks of one parameter come in order; the update of a
parameter is not offered again before the one before it is in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence

import torch

from lohan_fx.errors import without_traceback
from lohan_fx.runtime.adam import AdamOptions
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.chunk_pipeline import BARRIER_TIMEOUT_S, ChunkPipeline
from lohan_fx.runtime.chunk_update import ChunkUpdate, Countdown, Kept, Purpose
from lohan_fx.runtime.device_link import Moment
from lohan_fx.runtime.interrupts import interrupt_waits
from lohan_fx.runtime.machine import Machine
from lohan_fx.runtime.slots import ParameterSlot, Residency
from lohan_fx.runtime.state_buffer import StateBuffer, cut


class OutOfCoreOptimizer:
    """Applies gradients to the states of all parameters of one model."""

    def __init__(
        self,
        machine: Machine,
        slots: Mapping[int, ParameterSlot],
        residency: Mapping[int, Residency],
        *,
        chunk_elements: int,
        window_bytes: int,
    ) -> None:
        self._machine = machine
        self._slots = slots
        self._residency = residency
        self._chunk_elements = chunk_elements
        self._window_bytes = window_bytes
        self._chunks = ChunkPipeline(machine, residency)
        self._window_used = 0
        self._pending: dict[int, Arrival] = {}
        self._again: dict[int, list[ChunkUpdate]] = {}
        self._repeating: dict[int, Arrival] = {}

    # --- from the compute thread ------------------------------------------------------------------------------

    def narrow(self, window_bytes: int) -> None:
        """From now on gradients of no more than ``window_bytes`` wait."""
        self._window_bytes = min(self._window_bytes, window_bytes)

    def offer(self, slot: int, gradient: torch.Tensor, purpose: Purpose, options: AdamOptions | None) -> None:
        """Hand over the gradient of ``slot``; returns once it may leave the device, not once it is applied."""
        parameter = self._slots[slot]
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        nbytes = gradient.numel() * gradient.element_size()
        if self._in_memory(slot, purpose):
            self._update_here(self._jobs(parameter, purpose, options), _flat(gradient))
            return
        with self._chunks.changed:
            self._chunks.refuse_if_failed()
            if self._window_used and self._window_used + nbytes > self._window_bytes:
                with self._machine.timeline.stall(f"gradient window for {parameter.name}"):
                    self._chunks.wait(lambda: not self._window_used or self._window_used + nbytes <= self._window_bytes)
        with interrupt_waits():  # what is expected here must be on its way
            jobs = self._jobs(parameter, purpose, options)
            with self._chunks.changed:
                self._chunks.expect(len(jobs))
                self._window_used += nbytes
            if jobs:
                self._hand_over(parameter, jobs, gradient, nbytes)
            else:
                self._free_window(nbytes)

    def _hand_over(
        self, parameter: ParameterSlot, jobs: Sequence[ChunkUpdate], gradient: torch.Tensor, nbytes: int
    ) -> None:
        left = Countdown(len(jobs), functools.partial(self._free_window, nbytes))
        if self._machine.link.shares_memory:
            leaves = [functools.partial(self._leave_in_place, jobs, gradient, left)]
        else:
            flat, after = _flat(gradient), self._machine.link.mark()
            leaves = [functools.partial(self._leave, job, flat, after, left) for job in jobs]
        for leave in leaves:
            with self._chunks.no_job_lost(updates=jobs[0].updates):
                self._machine.d2h.submit(leave, label=f"gradient of {parameter.name}")

    def updated_here(self, slot: int) -> bool:
        """Whether ``apply_held`` would be done when it returns."""
        return self._in_memory(slot, Purpose.APPLY)

    def _in_memory(self, slot: int, purpose: Purpose) -> bool:
        """Whether nothing has to move: the parameter, its states and its sum are in the device's memory."""
        resident, device = self._residency[slot], self._machine.device
        memory = None if resident.held is None else resident.held.memory
        held = memory is not None and memory.device.type == device.type
        if purpose is Purpose.HOLD:
            return held
        at_home = all(t is not None and t.device.type == device.type for t in (resident.compute, resident.master))
        return at_home and (held or not resident.contributions)

    def _update_here(self, jobs: list[ChunkUpdate], flat: torch.Tensor | None) -> None:
        """Update on the compute thread, with all its cores: beside it, Adam would only take them away from it. In a buffer
        of its own: those of the lanes are busy as long as the drives are."""
        with self._chunks.changed:
            self._chunks.refuse_if_failed()
        for job in jobs:
            with interrupt_waits(), self._machine.pool.acquire("compute") as buffer:
                resident = self._residency[job.chunk.parameter.slot]
                job.states = StateBuffer(buffer, job.chunk, resident, job.held, updates=job.updates, adds=job.adds)
                end = job.chunk.start + job.chunk.elements
                arrived = None if flat is None else cut(flat, job.chunk.start, end)
                job.compute(self._machine, arrived)

    def _jobs(self, parameter: ParameterSlot, purpose: Purpose, options: AdamOptions | None) -> list[ChunkUpdate]:
        resident = self._residency[parameter.slot]
        held, adds, steps_done = resident.held, resident.contributions > 0, resident.updates
        factors: tuple[float, ...] = ()
        if purpose is Purpose.APPLY:
            # From here on only the jobs know what is held: the next backward may hold anew before they are done.
            resident.held, resident.contributions, resident.updates = None, 0, resident.updates + 1
            factors = tuple(float(factor) for factor in held.factors) if held is not None else ()
        else:
            resident.contributions += 1
        return [
            ChunkUpdate(c, purpose, options, held, adds, steps_done, tuple(f for f in factors if f != 1.0))
            for c in parameter.chunks(self._chunk_elements)
        ]

    def let_compute_end(self) -> None:
        """Wait for what a device was asked for that runs behind this thread: an evaluation since the backward may still read
        what updates write."""
        self._machine.link.finish(self._machine.link.mark())

    def apply_held(self, slot: int, options: AdamOptions, *, twice: bool = False) -> None:
        """Update ``slot`` with what is held of its gradient; ``pending`` tells when that is done.

        ``twice``: what the forward waits for is made first, and nothing else is written; ``repeat`` has the states updated,
        where they are on NVMe.
        """
        parameter = self._slots[slot]
        if self._in_memory(slot, Purpose.APPLY):
            self._update_here(self._jobs(parameter, Purpose.APPLY, options), None)
            return
        with interrupt_waits():
            twice = twice and self._can_repeat(slot)
            jobs = self._jobs(parameter, Purpose.APPLY, options)
            if twice:
                self._again[slot] = [dataclasses.replace(job, kept=Kept.STATES, reads=[]) for job in jobs]
                for job in jobs:
                    job.kept = Kept.COPY
            turn = self._machine.turns.of(slot, None)
            for job in jobs:
                job.turn = turn
            self._begin(slot, jobs, self._pending, f"update of {parameter.name}")

    def _can_repeat(self, slot: int) -> bool:
        """Whether an update gives the same when it is made a second time: from what it leaves as it was."""
        return self._residency[slot].master is None and not self._slots[slot].is_master

    def repeat(self, order: Iterable[int]) -> None:
        """Begin the second time of what ``apply_held`` began, behind all first ones; those in ``order`` first."""
        for slot in [*order, *self._again]:
            with interrupt_waits():
                if (jobs := self._again.pop(slot, None)) is not None:
                    self._begin(slot, jobs, self._repeating, f"states of {self._slots[slot].name}")

    def _begin(self, slot: int, jobs: Sequence[ChunkUpdate], under_way: dict[int, Arrival], label: str) -> None:
        """Send ``jobs`` on their way; ``under_way`` has ``slot`` until they are at its end, or for good if they fail. Interrupts
        wait meanwhile: the lanes give back what is taken for a job, which they must have."""
        self._chunks.expect(len(jobs))
        update = Arrival(label, len(jobs), BARRIER_TIMEOUT_S)
        under_way[slot] = update
        update.then(functools.partial(_settled, slot, update, under_way))
        for job in jobs:
            job.update = update
            with self._chunks.finished_if_failing(job):
                self._chunks.arrive(job)

    def pending(self, slot: int) -> Arrival | None:
        """The update of ``slot`` that ``apply_held`` began and that is not in place, as far as a fetch is concerned; one that
        failed stays."""
        return self._pending.get(slot)

    def is_pending(self, slot: int) -> bool:
        """Whether any of an update of ``slot`` that ``apply_held`` began is not in place."""
        return slot in self._pending or slot in self._again or slot in self._repeating

    def finish_repeating(self, slot: int) -> None:
        """Wait until the states of ``slot`` are as its last update leaves them; raises what failed."""
        update = self._repeating.get(slot)
        if update is not None:
            self._finish(update)

    def update_failed(self) -> bool:
        """Whether an update that ``apply_held`` began has failed."""
        return any(update.error is not None for update in self._under_way())

    def finish_updates(self) -> None:
        """Wait for every update that ``apply_held`` began; raises the first failure."""
        self.repeat(())  # nothing is left to, unless an interrupt came between the two
        for update in self._under_way():
            self._finish(update)

    def _under_way(self) -> list[Arrival]:
        return [*self._pending.values(), *self._repeating.values()]

    def _finish(self, update: Arrival) -> None:
        if not update.done():
            with self._machine.timeline.stall(update.label):
                update.settle()
        if update.error is not None:
            raise without_traceback(update.error)

    def barrier(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Wait until everything offered so far is in place; raises the first failure."""
        self._chunks.barrier(timeout_s)

    def settle(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """After a failure: wait until the lanes have let go of everything, and forget the failure."""
        self._chunks.settle(timeout_s)
        with self._chunks.changed:
            for under_way in (self._pending, self._again, self._repeating):
                under_way.clear()
            self._window_used = 0

    def let_leave(self, most_bytes: int) -> None:
        """Wait until no more than ``most_bytes`` of gradients that were offered are still on the device."""
        with self._chunks.changed:
            if self._window_used > most_bytes:
                with self._machine.timeline.stall("gradients of the backward before"):
                    self._chunks.wait(lambda: self._window_used <= most_bytes)

    @property
    def window_used(self) -> int:
        """Bytes of the gradients on the device that were offered and have not left it."""
        return self._window_used

    def leaving(self) -> list[torch.Tensor | None]:
        """Where the gradients lie that were held and whose updates wait."""
        return [job.held.memory for job in self._chunks.waiting() if job.held is not None]

    # --- on the d2h lane --------------------------------------------------------------------------------------

    def _leave_in_place(self, jobs: Sequence[ChunkUpdate], gradient: torch.Tensor, left: Countdown) -> None:
        """Nothing is copied: the window counts the gradient until all its chunks are updated."""
        flat = _flat(gradient)
        for job in jobs:
            with self._chunks.finished_if_failing(job):
                job.in_place, job.left = cut(flat, job.chunk.start, job.chunk.start + job.chunk.elements), left
                self._chunks.arrive(job)

    def _leave(self, job: ChunkUpdate, flat: torch.Tensor, after: Moment, left: Countdown) -> None:
        machine, label = self._machine, f"gradient of {job.chunk.parameter.name}"
        source = cut(flat, job.chunk.start, job.chunk.start + job.chunk.elements)
        with self._chunks.finished_if_failing(job):
            try:
                job.gradient = machine.pool.acquire("gradients")
                nbytes = source.numel() * source.element_size()
                with machine.timeline.span("d2h", label, nbytes):
                    target = job.gradient.first(source.numel(), source.dtype)
                    machine.link.finish(machine.link.copy_out(target, source, after))
            finally:
                left.one_less()
            self._chunks.arrive(job)

    def _free_window(self, nbytes: int) -> None:
        with self._chunks.changed:
            self._window_used -= nbytes
            self._chunks.changed.notify_all()


def _settled(slot: int, update: Arrival, under_way: dict[int, Arrival]) -> None:
    if update.error is None and under_way.get(slot) is update:
        del under_way[slot]


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    """1-D; ``gradient`` is contiguous."""
    return gradient.detach().view(-1)
