"""out_of_core_optimizer: gradients in, updated parameters out, states on NVMe, chunk by chunk.

One chunk's way: gradient to host memory (d2h lane) -> states from the store (ssd) -> update (cpu) -> states and the
compute-dtype copy to the store (ssd). Reads run ahead of updates as far as there are buffers, and the read of
chunk i-1 is queued before the write of chunk i (LoHan IV-C; Fuyou 4.3), so that reading, updating and writing of
neighbouring chunks overlap each other and the backward.

Guarantees: memory is the pool's "optimizer" and "gradients" reservations, whatever the size of a parameter. A
gradient on the device lives only until its chunks are copied (where host and device share memory: updated);
``offer`` blocks while more than ``window_bytes`` of them wait. ``barrier`` returns once everything offered is in
place, or raises the first failure, after which the optimizer refuses more work. ``pending`` is settled once the update
of that parameter is in place, or has failed; what fails is raised there and at ``barrier``.

Assumes: one gradient per parameter and backward (``verify``); chunks of one parameter come in order; the update of a
parameter is not offered again before the one before it is in place.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch

from lohan_fx.errors import LaneTimeout, StepError
from lohan_fx.runtime.adam import AdamOptions
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.chunk_update import ChunkUpdate, Countdown, Purpose, wait_for_all
from lohan_fx.runtime.device_link import Moment
from lohan_fx.runtime.host_pool import Buffer
from lohan_fx.runtime.lanes import wait_hearing
from lohan_fx.runtime.machine import STATE_READ_PRIORITY, STATE_WRITE_PRIORITY, Machine
from lohan_fx.runtime.slots import ParameterSlot, Residency
from lohan_fx.runtime.state_buffer import StateBuffer

BARRIER_TIMEOUT_S = 3600.0


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
        self._changed = threading.Condition()
        self._window_used = 0
        self._unfinished = 0
        self._arrived: deque[ChunkUpdate] = deque()
        self._reading: deque[ChunkUpdate] = deque()
        self._pending: dict[int, Arrival] = {}
        self._error: BaseException | None = None
        self._error_raised = False

    # --- from the compute thread ------------------------------------------------------------------------------

    def offer(self, slot: int, gradient: torch.Tensor, purpose: Purpose, options: AdamOptions | None) -> None:
        """Hand over the gradient of ``slot``; returns once it may leave the device, not once it is applied."""
        parameter = self._slots[slot]
        flat = gradient.detach().reshape(-1)
        nbytes = flat.numel() * flat.element_size()
        here = self._in_memory(slot, purpose)
        jobs = self._jobs(parameter, purpose, options)
        if here and jobs:
            self._update_here(jobs, flat)
            return
        with self._changed:
            self._raise_error()
            if self._window_used and self._window_used + nbytes > self._window_bytes:
                with self._machine.timeline.stall(f"gradient window for {parameter.name}"):
                    self._wait(lambda: not self._window_used or self._window_used + nbytes <= self._window_bytes)
            self._window_used += nbytes
            self._unfinished += len(jobs)
        if not jobs:
            self._free_window(nbytes)
            return
        left = Countdown(len(jobs), functools.partial(self._free_window, nbytes))
        if self._machine.link.shares_memory:
            leaves = [functools.partial(self._leave_in_place, jobs, flat, left)]
        else:
            after = self._machine.link.mark()
            leaves = [functools.partial(self._leave, job, flat, after, left) for job in jobs]
        for leave in leaves:
            with self._no_job_lost():
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
        """Update on the compute thread, with all its cores: beside it, Adam would only take them away from it."""
        with self._changed:
            self._raise_error()
        for job in jobs:
            with self._machine.pool.acquire("optimizer") as buffer:
                resident = self._residency[job.chunk.parameter.slot]
                job.states = StateBuffer(buffer, job.chunk, resident, job.held, updates=job.updates, adds=job.adds)
                arrived = None if flat is None else flat[job.chunk.start : job.chunk.start + job.chunk.elements]
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

    def apply_held(self, slot: int, options: AdamOptions) -> None:
        """Update ``slot`` with what is held of its gradient; ``pending`` tells when that is done."""
        parameter = self._slots[slot]
        here = self._in_memory(slot, Purpose.APPLY)
        jobs = self._jobs(parameter, Purpose.APPLY, options)
        if here:
            self._update_here(jobs, None)
            return
        with self._changed:
            self._raise_error()
            self._unfinished += len(jobs)
        update = Arrival(f"update of {parameter.name}", len(jobs), BARRIER_TIMEOUT_S)
        self._pending[slot] = update
        update.then(functools.partial(self._settled, slot, update))
        for job in jobs:
            job.update = update
            with self._finished_if_failing(job):
                self._arrive(job)

    def pending(self, slot: int) -> Arrival | None:
        """The update of ``slot`` that ``apply_held`` began and that is not in place; one that failed stays."""
        return self._pending.get(slot)

    def update_failed(self) -> bool:
        """Whether an update that ``apply_held`` began has failed."""
        return any(update.error is not None for update in list(self._pending.values()))

    def finish_updates(self) -> None:
        """Wait for every update that ``apply_held`` began; raises the first failure."""
        for update in list(self._pending.values()):
            if not update.done():
                with self._machine.timeline.stall(update.label):
                    update.settle()
            if update.error is not None:
                raise copy.copy(update.error)

    def _settled(self, slot: int, update: Arrival) -> None:
        if update.error is None and self._pending.get(slot) is update:
            del self._pending[slot]

    def barrier(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Wait until everything offered so far is in place; raises the first failure."""
        with self._changed:
            self._wait(lambda: self._unfinished == 0, timeout_s)
            self._raise_error()

    def _wait(self, ready: object, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        assert callable(ready)
        over = functools.partial(self._changed.wait_for, lambda: ready() or self._error is not None)
        if not wait_hearing(over, timeout_s):
            raise LaneTimeout(f"waited {timeout_s:g} s for the optimizer: {self._unfinished} chunks are unfinished")
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None and not self._error_raised:
            self._error_raised = True
            # A copy: the traceback of what is raised holds the tensors of the whole backward, and we keep the original.
            raise copy.copy(self._error)
        if self._error is not None:
            raise StepError(
                f"the optimizer failed earlier ({self._error}): the parameters are partly updated; "
                "load_state_dict of model and optimizer, or compile again"
            ) from self._error

    # --- on the d2h lane --------------------------------------------------------------------------------------

    def _leave_in_place(self, jobs: Sequence[ChunkUpdate], flat: torch.Tensor, left: Countdown) -> None:
        """Nothing is copied: the window counts the gradient until all its chunks are updated."""
        for job in jobs:
            with self._finished_if_failing(job):
                job.in_place, job.left = flat[job.chunk.start : job.chunk.start + job.chunk.elements], left
                self._arrive(job)

    def _leave(self, job: ChunkUpdate, flat: torch.Tensor, after: Moment, left: Countdown) -> None:
        machine, label = self._machine, f"gradient of {job.chunk.parameter.name}"
        source = flat[job.chunk.start : job.chunk.start + job.chunk.elements]
        with self._finished_if_failing(job):
            try:
                job.gradient = machine.pool.acquire("gradients")
                nbytes = source.numel() * source.element_size()
                with machine.timeline.span("d2h", label, nbytes):
                    target = job.gradient.tensor[:nbytes].view(source.dtype)
                    machine.link.finish(machine.link.copy_out(target, source, after))
            finally:
                left.one_less()
            self._arrive(job)

    def _arrive(self, job: ChunkUpdate) -> None:
        with self._changed:
            # Reading may start here and now unless older jobs still wait for a buffer: they come first.
            queue = self._reading if not self._arrived and self._start_reading(job) else self._arrived
            queue.append(job)
            try:
                self._machine.cpu.submit(self._advance, label=f"update of {job.chunk.parameter.name}")
            except BaseException:
                queue.pop()
                raise

    # --- on the cpu lane: one call per job, in order ----------------------------------------------------------

    def _advance(self) -> None:
        with self._no_job_lost(), self._changed:
            while self._arrived and self._start_reading(self._arrived[0]):
                self._reading.append(self._arrived.popleft())
            job = self._reading.popleft() if self._reading else self._arrived[0]
        with self._finished_if_failing(job):
            if job.states is None:
                self._read_into(job, self._wait_for_buffer())
            self._process(job)

    def _wait_for_buffer(self) -> Buffer:
        """A buffer for the oldest job. It stands in the queue meanwhile, so that no younger one takes the buffer and
        then waits behind it for ever."""
        try:
            return self._machine.pool.acquire("optimizer")
        finally:
            with self._changed:
                self._arrived.popleft()

    def _start_reading(self, job: ChunkUpdate) -> bool:
        """Start the reads of ``job`` if a buffer is free. Called with the lock held, so that jobs stay in order."""
        buffer = self._machine.pool.try_acquire("optimizer")
        if buffer is None:
            return False
        self._read_into(job, buffer)
        return True

    def _read_into(self, job: ChunkUpdate, buffer: Buffer) -> None:
        machine, chunk = self._machine, job.chunk
        resident = self._residency[chunk.parameter.slot]
        job.states = StateBuffer(buffer, chunk, resident, job.held, updates=job.updates, adds=job.adds)
        try:
            for extent, offset, memory, nbytes in job.states.to_read():
                read = functools.partial(machine.read, extent, offset, memory, nbytes)
                job.reads.append(machine.ssd.submit(read, priority=STATE_READ_PRIORITY, label=f"read {extent}"))
        except BaseException as error:  # raised when it is this job's turn: another one may be at work here
            job.failure = error

    def _process(self, job: ChunkUpdate) -> None:
        machine, states = self._machine, job.states
        assert states is not None
        wait_for_all(job.reads)
        if job.failure is not None:
            raise job.failure
        job.compute(self._machine, job.arrived())
        job.let_gradient_go()
        writes = states.to_write()
        done = Countdown(len(writes), functools.partial(self._written, job))
        for extent, offset, memory, nbytes in writes:
            write = functools.partial(self._write, job, done, extent, offset, memory, nbytes)
            machine.ssd.submit(write, priority=STATE_WRITE_PRIORITY, label=f"write {extent}")
        if not writes:
            self._finished(job, None)

    def _write(
        self, job: ChunkUpdate, done: Countdown, extent: str, offset: int, memory: torch.Tensor, nbytes: int
    ) -> None:
        try:
            self._machine.write(extent, offset, memory, nbytes)
        except BaseException as error:
            job.failure = error
            raise
        finally:
            done.one_less()

    def _written(self, job: ChunkUpdate) -> None:
        self._finished(job, job.failure)

    def _finished(self, job: ChunkUpdate, error: BaseException | None) -> None:
        """The job is over, well or not: give back its buffers and count it."""
        with suppress(Exception):
            wait_for_all(job.reads)
        job.let_gradient_go()
        if job.states is not None:
            job.states.buffer.release()
        with self._changed:
            self._error = self._error or error
            self._unfinished -= 1
            self._changed.notify_all()
        if job.update is not None:
            job.update.part_done(error)

    @contextmanager
    def _finished_if_failing(self, job: ChunkUpdate) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._finished(job, error)
            raise

    @contextmanager
    def _no_job_lost(self) -> Iterator[None]:
        """What fails in here leaves a job that will never finish: those who wait for it must hear of it."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _free_window(self, nbytes: int) -> None:
        with self._changed:
            self._window_used -= nbytes
            self._changed.notify_all()

    def settle(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """After a failure: wait until the lanes have let go of everything, and forget the failure."""
        self._machine.drain(timeout_s)
        with self._changed:
            for job in (*self._arrived, *self._reading):
                job.let_gradient_go()
                if job.states is not None:
                    job.states.buffer.release()
            self._arrived.clear()
            self._reading.clear()
            self._pending.clear()
            self._error, self._error_raised = None, False
            self._unfinished = self._window_used = 0
