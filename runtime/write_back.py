"""write_back: states that are in memory, copied to the store for a checkpoint, by as many requests at a time as drives serve.

The calling thread copies a chunk's states into a buffer of the optimizer's, and the next one's while the ssd lane writes it.

Guarantees: memory is the pool's "optimizer" and "small" reservations. Master and moments of a chunk are written whole, so that
checkpoints have their checksums from what was in memory. No request is under way once this returns or has raised what a write
raised.
Assumes: nothing is under way before (the caller settles the engine first).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.chunk_update import Countdown
from lohan_fx.runtime.host_pool import Buffer
from lohan_fx.runtime.interrupts import interrupt_waits
from lohan_fx.runtime.lanes import Work
from lohan_fx.runtime.machine import STATE_WRITE_PRIORITY, Machine
from lohan_fx.runtime.slots import Chunk, ParameterSlot, Residency
from lohan_fx.runtime.state_buffer import Movement, StateBuffer, cut, purpose_of

_ON_NVME = Residency()


def write_back(machine: Machine, slots: Mapping[int, ParameterSlot], residency: Mapping[int, Residency]) -> None:
    """Copy the states that are in memory to the store, which then has all masters and moments. Raises what a write raised."""
    writes: deque[Work[None]] = deque()
    try:
        for slot, resident in residency.items():
            if resident.master is not None:
                for chunk in slots[slot].chunks(machine.windows.chunk_elements):
                    while writes and writes[0].done():
                        writes.popleft().wait()
                    while (begun := _begin(machine, chunk, resident)) is None:
                        writes.popleft().wait()
                    writes += begun
        while writes:
            writes.popleft().wait()
    except LaneTimeout:
        raise
    except Exception:
        machine.ssd.drain()
        raise


def _begin(machine: Machine, chunk: Chunk, resident: Residency) -> list[Work[None]] | None:
    """Copy the states of ``chunk``, and begin to write them, which gives their buffer back; None while no buffer is free."""
    with interrupt_waits():
        buffer = machine.pool.try_acquire(purpose_of(chunk.elements, machine.windows))
        return None if buffer is None else _begin_in(buffer, machine, chunk, resident)


def _begin_in(buffer: Buffer, machine: Machine, chunk: Chunk, resident: Residency) -> list[Work[None]]:
    try:
        copy = StateBuffer(buffer, chunk, _ON_NVME, None, updates=True, adds=False)
        targets = copy.master, copy.exp_avg, copy.exp_avg_sq
        for target, source in zip(targets, (resident.master, resident.exp_avg, resident.exp_avg_sq), strict=True):
            assert source is not None, f"of the states of {chunk.parameter.name} only some are in memory"
            target.copy_(cut(source, chunk.start, chunk.start + chunk.elements))
        movements, _ = copy.to_write()
    except BaseException:
        buffer.release()
        raise
    left = Countdown(len(movements), functools.partial(buffer.release))

    def write(movement: Movement) -> None:
        try:
            machine.store.write(*movement)
        finally:
            left.one_less()

    return [
        machine.ssd.submit(functools.partial(write, m), priority=STATE_WRITE_PRIORITY, label=f"write {m[0]}")
        for m in movements
    ]
