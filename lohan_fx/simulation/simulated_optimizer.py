"""simulated_optimizer: the way of a gradient in the simulated runtime; mirrors ``runtime/out_of_core_optimizer.py``
and ``runtime/chunk_pipeline.py``.

The order of acquiring, reading, updating and writing is theirs, method for method, because what overlaps what is
decided there. Gradients that the plan gives a home are held there until ``step``, which applies them at once or begins
to, in the order in which the forward waited for their parameters.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lohan_fx.plan import SUM_BYTES, OptimizerTiming, ParameterPlan, Tier
from lohan_fx.runtime.chunk_pipeline import place_of
from lohan_fx.runtime.chunk_update import Kept
from lohan_fx.runtime.machine import STATE_READ_PRIORITY, STATE_WRITE_PRIORITY
from lohan_fx.runtime.state_buffer import purpose_of
from lohan_fx.simulation.event_clock import Countdown, Job, Signal, Thread
from lohan_fx.simulation.simulated_machine import SimulatedMachine


@dataclass(eq=False)
class _Chunk:
    """One chunk's way. ``updates``: it ends in an update, and not in a gradient that is held. ``in_place``: counts the
    chunks of a gradient that stays where it is until all are updated. ``update``: counts those of an update that runs
    beside the next forward."""

    parameter: ParameterPlan
    elements: int
    updates: bool
    has_gradient: bool = True
    in_place: Countdown | None = None
    update: Countdown | None = None
    kept: Kept = Kept.ALL
    turn: int | None = None
    has_buffer: bool = False
    reads: list[Signal] = field(default_factory=list)


def waits_for_step(parameter: ParameterPlan) -> bool:
    """Whether the gradient is held until the backward is over: the update runs in ``step()`` or beside the next forward."""
    return parameter.gradient_home is not None


class SimulatedOptimizer:
    """Applies, or holds and then applies, the gradients of one step."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._window_used = self._unfinished = 0
        self._changed = machine.clock.signal()
        self._arrived: deque[_Chunk] = deque()
        self._reading: deque[_Chunk] = deque()
        self._held: list[ParameterPlan] = []
        self._pending: dict[str, Signal] = {}
        self._again: dict[str, list[_Chunk]] = {}
        self._repeating: dict[str, Signal] = {}
        self._taken: dict[str, None] = {}
        self.leaving: dict[str, None] = {}
        """The parameters whose gradients were handed over, and are still there."""

    # --- from the compute thread ------------------------------------------------------------------------------

    def offer(self, parameter: ParameterPlan, held_bytes: int) -> Thread:
        """The gradient is handed over; ``held_bytes`` of device memory go once it has left."""
        machine, nbytes = self._machine, parameter.bytes
        if (states := self._repeating.pop(parameter.name, None)) is not None:
            machine.compute.waiting_for = f"states of {parameter.name}"
            yield states
        self._taken.setdefault(parameter.name)
        late = waits_for_step(parameter)
        if late and self._stays(parameter):
            machine.memory.change(graph=-held_bytes)
            self._held.append(parameter)
            return
        chunks = [_Chunk(parameter, elements, updates=not late) for elements in machine.chunks(parameter)]
        if self._in_memory(parameter, holds=late) and chunks:
            yield from self._compute_here(chunks)
            machine.memory.change(graph=-held_bytes)
            if late:
                self._held.append(parameter)
            return
        if late:
            self._held.append(parameter)
        while self._window_used and self._window_used + nbytes > machine.plan.windows.gradient_bytes:
            machine.compute.waiting_for = f"gradient window for {parameter.name}"
            yield self._changed
        self._window_used += nbytes
        self._unfinished += len(chunks)
        machine.memory.hand_over(held_bytes)
        self.leaving[parameter.name] = None
        after = machine.compute.mark()

        def gone() -> None:
            self.leaving.pop(parameter.name)
            self._window_used -= nbytes
            machine.memory.has_left(held_bytes)
            self._notify()

        left = Countdown(len(chunks), gone)
        if machine.on_cpu and chunks:
            machine.d2h.submit(self._leave_in_place(chunks, left))
            return
        for chunk in chunks:
            machine.d2h.submit(self._leave(chunk, after, left))

    def _stays(self, parameter: ParameterPlan) -> bool:
        """Whether the only gradient of a step is itself what is held (``held_gradients.take_in``)."""
        next_forward = parameter.optimizer_runs is OptimizerTiming.NEXT_FORWARD
        return self._machine.on_cpu and next_forward and parameter.gradient_home is not Tier.NVME

    def _in_memory(self, parameter: ParameterPlan, *, holds: bool) -> bool:
        """Whether nothing has to move: all that the arithmetic touches is in the device's memory."""
        near = (Tier.DEVICE, Tier.HOST) if self._machine.on_cpu else (Tier.DEVICE,)
        if holds:
            return parameter.gradient_home in near
        at_home = parameter.home in near and parameter.states_home in near
        return at_home and (parameter.gradient_home is None or parameter.gradient_home in near)

    def _compute_here(self, chunks: list[_Chunk]) -> Thread:
        """On the compute thread, in a buffer of its own."""
        machine = self._machine
        for chunk in chunks:
            yield from machine.pool["compute"].acquire()
            machine.memory.touch("compute", SUM_BYTES * chunk.elements)
            yield from machine.compute.run(self._arithmetic(chunk, here=True))
            machine.pool["compute"].release()

    def _arithmetic(self, chunk: _Chunk, *, here: bool = False) -> Job:
        return self._machine.updating(
            chunk.parameter, chunk.elements, sums=chunk.has_gradient, applies=chunk.updates, here=here
        )

    def step(self) -> Thread:
        """``engine.step``: the barrier, what is held, the barrier again, and the beginning of what the forward will wait
        for."""
        yield from self._barrier()
        wanted = self._machine.turns.places()
        held = sorted(self._held, key=lambda p: (self._in_memory(p, holds=False), wanted.get(p.name, len(wanted))))
        self._held = []
        now = [p for p in held if p.optimizer_runs is not OptimizerTiming.NEXT_FORWARD]
        later = [p for p in held if p.optimizer_runs is OptimizerTiming.NEXT_FORWARD]
        for parameter in now:
            yield from self._apply(parameter)
        yield from self._barrier()
        if later:
            self._machine.turns.begin()
        for parameter in later:
            yield from self._apply(parameter)
        self._repeat()

    def _apply(self, parameter: ParameterPlan) -> Thread:
        """Begin the update with what is held; in memory, all of it."""
        chunks = [_Chunk(parameter, n, True, has_gradient=False) for n in self._machine.chunks(parameter)]
        if self._in_memory(parameter, holds=False):
            yield from self._compute_here(chunks)
            return
        if parameter.updated_twice:
            self._again[parameter.name] = [dataclasses.replace(chunk, kept=Kept.STATES, reads=[]) for chunk in chunks]
            for chunk in chunks:
                chunk.kept = Kept.COPY
        turn = self._machine.turns.of(parameter.name, None)
        for chunk in chunks:
            chunk.turn = turn
        if parameter.optimizer_runs is OptimizerTiming.NEXT_FORWARD:
            self._pending[parameter.name] = self._counted(chunks)
        self._begin(chunks)

    def _repeat(self) -> None:
        """The second time of what is updated twice, in the order in which the next gradients will come."""
        for name in [*(name for name in self._taken if name in self._again), *self._again]:
            if (chunks := self._again.pop(name, None)) is not None:
                self._repeating[name] = self._counted(chunks)
                self._begin(chunks)
        self._taken.clear()

    def _counted(self, chunks: list[_Chunk]) -> Signal:
        """Set once all of ``chunks`` are finished."""
        done = self._machine.clock.signal()
        update = Countdown(len(chunks), done.set)
        for chunk in chunks:
            chunk.update = update
        return done

    def _begin(self, chunks: list[_Chunk]) -> None:
        self._unfinished += len(chunks)
        for chunk in chunks:
            self._arrive(chunk)

    def pending(self, parameter: str) -> Signal | None:
        """Set once the update of ``parameter`` that the last step began is in place; None where there is none."""
        return self._pending.get(parameter)

    def _barrier(self) -> Thread:
        while self._unfinished:
            yield self._changed
        self._machine.compute.barrier_ends()

    def _notify(self) -> None:
        changed, self._changed = self._changed, self._machine.clock.signal()
        changed.set()

    # --- on the d2h lane --------------------------------------------------------------------------------------

    def _leave_in_place(self, chunks: list[_Chunk], left: Countdown) -> Thread:
        """Host and device share memory: nothing is copied."""
        for chunk in chunks:
            chunk.in_place = left
            self._arrive(chunk)
        yield from ()

    def _leave(self, chunk: _Chunk, after: Signal | None, left: Countdown) -> Thread:
        machine, parameter = self._machine, chunk.parameter
        yield from machine.pool["gradients"].acquire(self._buffers("gradients", chunk))
        if after is not None:
            yield after
        nbytes = parameter.bytes // parameter.numel * chunk.elements
        yield from machine.in_python(machine.of_chunk(chunk.elements))
        yield machine.copying("d2h", f"gradient of {parameter.name}", nbytes)
        left.one_less()
        self._arrive(chunk)

    def _arrive(self, chunk: _Chunk) -> None:
        queue = self._reading if not self._arrived and self._start_reading(chunk) else self._arrived
        queue.insert(len(queue) if queue is self._reading else place_of(chunk, queue), chunk)
        self._machine.cpu.submit(self._advance())

    # --- on the cpu lane --------------------------------------------------------------------------------------

    def _advance(self) -> Thread:
        machine = self._machine
        while self._arrived and self._start_reading(self._arrived[0]):
            self._reading.append(self._arrived.popleft())
        chunk = self._reading.popleft() if self._reading else self._arrived[0]
        if not chunk.has_buffer:
            purpose = self._purpose(chunk)
            yield from machine.pool[purpose].acquire(self._buffers(purpose, chunk))
            self._arrived.popleft()
            self._read(chunk)
        yield from chunk.reads
        yield from machine.in_python(machine.of_chunk(chunk.elements))
        yield self._arithmetic(chunk)
        if chunk.in_place is not None:
            chunk.in_place.one_less()
        elif chunk.has_gradient:
            machine.pool["gradients"].release(self._buffers("gradients", chunk))
        writes = self._writes(chunk)
        done = Countdown(len(writes), functools.partial(self._finished, chunk))
        requests = machine.of_chunk(chunk.elements)
        for extent, nbytes in writes:
            written = self._move(machine.writing(extent, nbytes, requests), requests, done.one_less)
            machine.ssd.submit(written, priority=STATE_WRITE_PRIORITY if chunk.turn is None else chunk.turn)

    def _start_reading(self, chunk: _Chunk) -> bool:
        purpose = self._purpose(chunk)
        if not self._machine.pool[purpose].try_acquire(self._buffers(purpose, chunk)):
            return False
        self._read(chunk)
        return True

    def _purpose(self, chunk: _Chunk) -> str:
        return purpose_of(chunk.elements, self._machine.plan.windows)

    def _buffers(self, purpose: str, chunk: _Chunk) -> int:
        return self._machine.buffers(purpose, self._machine.of_chunk(chunk.elements))

    def _read(self, chunk: _Chunk) -> None:
        machine = self._machine
        chunk.has_buffer = True
        purpose = self._purpose(chunk)
        machine.memory.touch(purpose, self._touched_bytes(chunk), self._buffers(purpose, chunk))
        requests = machine.of_chunk(chunk.elements)
        for extent, nbytes in self._reads(chunk):
            done = machine.clock.signal()
            chunk.reads.append(done)
            read = self._move(machine.reading(extent, nbytes, requests), requests, done.set)
            machine.ssd.submit(read, priority=STATE_READ_PRIORITY if chunk.turn is None else chunk.turn)

    def _move(self, job: Job, requests: int, done: Callable[[], None]) -> Thread:
        yield from self._machine.in_python(requests)
        yield job
        done()

    def _finished(self, chunk: _Chunk) -> None:
        purpose = self._purpose(chunk)
        self._machine.pool[purpose].release(self._buffers(purpose, chunk))
        self._unfinished -= 1
        self._notify()
        if chunk.update is not None:
            chunk.update.one_less()

    def _touched_bytes(self, chunk: _Chunk) -> int:
        """Of its buffer: what is read or written there, and the fp32 gradient."""
        moved = dict([*self._reads(chunk), *self._writes(chunk)])
        moved.pop(f"{chunk.parameter.name}:gradient", None)
        return sum(moved.values()) + SUM_BYTES * chunk.elements

    # --- what is read and written: ``state_buffer`` -----------------------------------------------------------

    def _reads(self, chunk: _Chunk) -> list[tuple[str, int]]:
        name, elements = chunk.parameter.name, chunk.elements
        found: list[tuple[str, int]] = []
        if chunk.updates and chunk.parameter.states_home is Tier.NVME:
            found += [(f"{name}:master", 4 * elements), (f"{name}:moments", 8 * elements)]
        if not chunk.has_gradient and chunk.parameter.gradient_home is Tier.NVME:
            found.append((f"{name}:gradient", _held_bytes(chunk)))
        return found

    def _writes(self, chunk: _Chunk) -> list[tuple[str, int]]:
        parameter, elements = chunk.parameter, chunk.elements
        name = parameter.name
        if not chunk.updates:
            return [(f"{name}:gradient", _held_bytes(chunk))] if parameter.gradient_home is Tier.NVME else []
        away = parameter.states_home is Tier.NVME
        found: list[tuple[str, int]] = []
        if away and chunk.kept is not Kept.COPY:
            found += [(f"{name}:master", 4 * elements), (f"{name}:moments", 8 * elements)]
        each = parameter.bytes // parameter.numel
        if chunk.kept is not Kept.STATES and parameter.home is Tier.NVME and not (each == 4 and away):
            found.append((f"{name}:compute", each * elements))
        return found


def _held_bytes(chunk: _Chunk) -> int:
    return chunk.parameter.held_bytes // chunk.parameter.numel * chunk.elements
