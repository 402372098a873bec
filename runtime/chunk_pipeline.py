"""chunk_pipeline: chunks whose gradient is there, on their way through the lanes: states read, updated, written.

One chunk's way: states from the store (ssd lane) -> update (cpu) -> states and the compute-dtype copy to the store (ssd).
Reads run ahead of updates as far as there are buffers, and the read of chunk i-1 is queued before the write of chunk i
(LoHan IV-C; Fuyou 4.3), so that reading, updating and writing of neighbouring chunks overlap each other and the backward.

Guarantees: memory is the pool's "optimizer" and "small" reservations (``state_buffer.purpose_of``). Chunks are updated in the
order in which they arrived, those for which nobody waits (``Kept.STATES``) after others. Every chunk that was expected is
finished once, well or not. ``barrier`` returns once all are, or raises the first failure, after which nothing more is taken
(``refuse_if_failed``) until ``settle``.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from lohan_fx.errors import LaneTimeout, StepError, without_traceback
from lohan_fx.runtime.checksum import Checksums, Compare
from lohan_fx.runtime.chunk_update import ChunkUpdate, Countdown, Kept, wait_for_all
from lohan_fx.runtime.host_pool import Buffer
from lohan_fx.runtime.lanes import Work, wait_hearing
from lohan_fx.runtime.machine import Machine
from lohan_fx.runtime.slots import Residency
from lohan_fx.runtime.state_buffer import Movement, StateBuffer, purpose_of

BARRIER_TIMEOUT_S = 3600.0
NAMED = 3
"""Parameters, in the message of a timeout."""


class ChunkPipeline:
    """Updates the chunks that ``arrive``. ``changed`` is notified whenever one is finished, and when one has failed."""

    def __init__(self, machine: Machine, residency: Mapping[int, Residency]) -> None:
        self._machine = machine
        self._residency = residency
        self.changed = threading.Condition()
        self._unfinished = 0
        self._in_hand: dict[int, ChunkUpdate] = {}  # those that have arrived and are not over, by their id
        self._arrived: deque[ChunkUpdate] = deque()
        self._reading: deque[ChunkUpdate] = deque()
        self._error: BaseException | None = None
        self._error_raised = False
        self._update_failed = False

    # --- for those who hand over chunks -----------------------------------------------------------------------

    def expect(self, chunks: int) -> None:
        """``barrier`` waits for so many more. Raises where an earlier one has failed."""
        with self.changed:
            self.refuse_if_failed()
            self._unfinished += chunks

    def arrive(self, job: ChunkUpdate) -> None:
        """The gradient of an expected chunk is there, on the host."""
        with self.changed:
            self._in_hand[id(job)] = job
            # Reading may start here and now unless older jobs still wait for a buffer: they come first.
            queue = self._reading if not self._arrived and self._start_reading(job) else self._arrived
            place = len(queue) if queue is self._reading else place_of(job, queue)
            queue.insert(place, job)
            try:
                self._machine.cpu.submit(self._advance, label=f"update of {job.chunk.parameter.name}")
            except BaseException:
                del queue[place]
                del self._in_hand[id(job)]
                raise

    @contextmanager
    def finished_if_failing(self, job: ChunkUpdate) -> Iterator[None]:
        """What fails within is the end of ``job``."""
        try:
            yield
        except BaseException as error:
            self._finished(job, error)
            raise

    @contextmanager
    def no_job_lost(self, *, updates: bool = True) -> Iterator[None]:
        """What fails in here leaves a job that will never finish: those who wait for it must hear of it. ``updates``: whether it
        may be more than a gradient to hold."""
        try:
            yield
        except BaseException as error:
            with self.changed:
                self._note(error, updates=updates)
                self.changed.notify_all()
            raise

    def _note(self, error: BaseException, *, updates: bool) -> None:
        """Called with the lock held."""
        self._error = self._error or error
        self._update_failed = self._update_failed or updates

    # --- for those who wait -----------------------------------------------------------------------------------

    def barrier(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Wait until every expected chunk is finished; raises the first failure."""
        with self.changed:
            self.wait(lambda: self._unfinished == 0, timeout_s)
            self.refuse_if_failed()

    def wait(self, ready: Callable[[], bool], timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """Wait until ``ready``, which only what notifies ``changed`` can make it; raises where a chunk fails before."""
        over = functools.partial(self.changed.wait_for, lambda: ready() or self._error is not None)
        if not wait_hearing(over, timeout_s):
            raise LaneTimeout(
                f"waited {timeout_s:g} s for the optimizer: {self._unfinished} chunks are unfinished{self._which()}"
            )
        self.refuse_if_failed()

    def _which(self) -> str:
        """Of which parameters the unfinished chunks are, as far as they have come here."""
        names = sorted({job.chunk.parameter.name for job in self._in_hand.values()})
        on_their_way = self._unfinished - len(self._in_hand)
        parts = [f"of {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"] if names else []
        parts += [f"{on_their_way} wait for their gradients"] if on_their_way else []
        return f" ({'; '.join(parts)})"

    def refuse_if_failed(self) -> None:
        """Raises the first failure once, and from then on ``StepError``."""
        if self._error is not None and not self._error_raised:
            self._error_raised = True
            # Its traceback will hold the tensors of the whole backward, and we keep the original.
            raise without_traceback(self._error)
        if self._error is not None and self._update_failed:
            raise StepError(
                f"the optimizer failed earlier ({self._error}): the parameters are partly updated; "
                "load_state_dict of model and optimizer, or compile again"
            ) from self._error
        if self._error is not None:
            raise StepError(
                f"a gradient of this step could not be held ({self._error}), which has changed no parameter: call "
                "optimizer.zero_grad() to drop the gradients of this step, and go on with the next one"
            ) from self._error

    def waiting(self) -> list[ChunkUpdate]:
        """Those that have arrived and are not being updated yet. Any thread."""
        with self.changed:
            return [*self._arrived, *self._reading]

    def settle(self, timeout_s: float = BARRIER_TIMEOUT_S) -> None:
        """After a failure: wait until the lanes have let go of everything, and forget the failure."""
        self._machine.drain(timeout_s)
        with self.changed:
            for job in (*self._arrived, *self._reading):
                job.let_gradient_go()
                if job.states is not None:
                    job.states.buffer.release()
            self._arrived.clear()
            self._reading.clear()
            self._in_hand.clear()
            self._error, self._error_raised, self._update_failed = None, False, False
            self._unfinished = 0

    # --- on the cpu lane: one call per job, in order ----------------------------------------------------------

    def _advance(self) -> None:
        with self.no_job_lost(), self.changed:
            while self._arrived and self._start_reading(self._arrived[0]):
                self._reading.append(self._arrived.popleft())
            job = self._reading.popleft() if self._reading else self._arrived[0]
        with self.finished_if_failing(job):
            if job.states is None:
                self._read_into(job, self._wait_for_buffer(job))
            self._process(job)

    def _wait_for_buffer(self, job: ChunkUpdate) -> Buffer:
        """A buffer for the oldest ``job``. It stands in the queue meanwhile, so that no younger one takes the buffer and
        then waits behind it for ever."""
        try:
            return self._machine.pool.acquire(self._purpose(job))
        finally:
            with self.changed:
                self._arrived.popleft()

    def _start_reading(self, job: ChunkUpdate) -> bool:
        """Start the reads of ``job`` if a buffer is free. Called with the lock held, so that jobs stay in order."""
        buffer = self._machine.pool.try_acquire(self._purpose(job))
        if buffer is None:
            return False
        self._read_into(job, buffer)
        return True

    def _purpose(self, job: ChunkUpdate) -> str:
        return purpose_of(job.chunk.elements, self._machine.windows)

    def _read_into(self, job: ChunkUpdate, buffer: Buffer) -> None:
        machine, chunk = self._machine, job.chunk
        resident = self._residency[chunk.parameter.slot]
        job.states = StateBuffer(buffer, chunk, resident, job.held, updates=job.updates, adds=job.adds)
        try:
            for extent, offset, memory, nbytes in job.states.to_read():
                read = functools.partial(machine.read_to_update, extent, offset, memory, nbytes)
                job.reads.append(machine.ssd.submit(read, priority=job.read_priority, label=f"read {extent}"))
        except BaseException as error:  # raised when it is this job's turn: another one may be at work here
            job.failure = error

    def _process(self, job: ChunkUpdate) -> None:
        machine = self._machine
        comparisons = wait_for_all(job.reads)
        if job.failure is not None:
            raise job.failure
        writes = job.compute(self._machine, job.arrived(), comparisons)
        job.let_gradient_go()
        done = Countdown(len(writes), functools.partial(self._written, job))
        for movement, checksums in writes:
            write = functools.partial(self._write, job, done, movement, checksums)
            machine.ssd.submit(write, priority=job.write_priority, label=f"write {movement[0]}")
        if not writes:
            self._finished(job, None)

    def _write(self, job: ChunkUpdate, done: Countdown, movement: Movement, checksums: Checksums | None) -> None:
        try:
            self._machine.write(*movement, checksums)
        except BaseException as error:
            job.failure = error
            raise
        finally:
            done.one_less()

    def _written(self, job: ChunkUpdate) -> None:
        self._finished(job, job.failure)

    def _finished(self, job: ChunkUpdate, error: BaseException | None) -> None:
        """The job is over, well or not: give back its buffers and count it."""
        job.let_gradient_go()
        if job.states is not None:
            _release_after(job.reads, job.states.buffer)
        with self.changed:
            if error is not None:
                self._note(error, updates=job.updates)
            self._unfinished -= 1
            self._in_hand.pop(id(job), None)
            self.changed.notify_all()
        if job.update is not None:
            job.update.part_done(error)


def _release_after(reads: Sequence[Work[list[Compare]]], buffer: Buffer) -> None:
    """Once none of ``reads`` writes into it any more: one that was waited for in vain may come yet."""
    if all(read.done() for read in reads):
        buffer.release()
        return
    left = Countdown(len(reads), functools.partial(buffer.release))
    for read in reads:
        read.add_done_callback(lambda _: left.one_less())


class _Waits(Protocol):
    kept: Kept


def place_of(job: _Waits, waiting: Sequence[_Waits]) -> int:
    """Where ``job`` stands among those that wait for a buffer: before those that nobody waits for. The first one stays, because
    the lane may be waiting for its buffer."""
    if job.kept is Kept.STATES or not waiting or waiting[-1].kept is not Kept.STATES:
        return len(waiting)
    return next((place for place, other in enumerate(waiting) if place and other.kept is Kept.STATES), len(waiting))
