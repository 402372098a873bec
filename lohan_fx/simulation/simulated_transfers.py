"""simulated_transfers: fetches and swaps in the simulated runtime.

Mirrors ``runtime/parameter_stream.py`` and ``runtime/activation_swap.py``: what each lane does first, which buffer it
holds meanwhile, and what it hands to which lane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from lohan_fx.plan import Tier
from lohan_fx.runtime.machine import FETCH_PRIORITY, SWAP_OUT_PRIORITY
from lohan_fx.simulation.event_clock import Countdown, Signal, Thread
from lohan_fx.simulation.simulated_machine import SimulatedMachine
from lohan_fx.simulation.step_program import Fetch, SwapIn, SwapOut, Wait


@dataclass
class _Away:
    """A swapped activation: ``left`` is set once all of it is where it goes."""

    bytes: int
    tier: Tier
    extent: str
    left: Signal
    priority: int


class SimulatedTransfers:
    """Brings parameters in, sends activations out and brings them back."""

    def __init__(self, machine: SimulatedMachine, pending: Callable[[str], Signal | None]) -> None:
        """``pending``: the update of a parameter that its fetch must wait for, or None."""
        self._machine = machine
        self._leaving_bytes = 0
        self.coming_bytes = 0
        """Of what was started, what the drives have yet to bring."""
        self._room = machine.clock.signal()
        self._pending = pending
        self._arrivals: dict[str, tuple[str, Signal]] = {}
        self._away: dict[int, _Away] = {}

    def fetch(self, found: Fetch) -> None:
        machine, label = self._machine, f"fetch of {found.parameter}"
        machine.memory.change(graph=found.change_bytes)
        home, update = machine.parameters[found.parameter].home, self._pending(found.parameter)
        if home is Tier.DEVICE:
            if update is not None:
                self._arrivals[found.node] = (label, update)
            return
        arrived, after = machine.clock.signal(), machine.compute.mark()
        self._arrivals[found.node] = (label, arrived)
        self.coming_bytes += found.bytes if home is Tier.NVME else 0
        if home is Tier.HOST:
            start = functools.partial(self._copy_in, label, found.bytes, after, arrived.set)
        else:
            extent, priority = f"{found.parameter}:compute", machine.turns.of(found.parameter, FETCH_PRIORITY)
            start = functools.partial(self._bring, "fetch", extent, label, found.bytes, after, arrived.set, priority)
        if update is None or update.done:
            start()
        else:
            machine.clock.start(self._start_after(update, start))

    def _start_after(self, update: Signal, start: Callable[[], None]) -> Thread:
        """No thread of a lane waits for the update."""
        yield update
        start()

    def wait(self, found: Wait) -> Thread:
        """Blocks until what it waits for has arrived."""
        label, arrived = self._arrivals.pop(found.started, ("", None))
        if arrived is not None and not arrived.done:
            self._machine.compute.waiting_for = label
            yield arrived

    def swap_out(self, found: SwapOut) -> Thread:
        """Blocks while more is leaving than the window allows (``byte_window``)."""
        machine = self._machine
        while self._leaving_bytes and self._leaving_bytes + found.bytes > machine.plan.windows.swap_out_bytes:
            machine.compute.waiting_for = f"swap window for {found.activation}"
            yield self._room
        self._leaving_bytes += found.bytes
        to_host = found.tier is Tier.HOST
        machine.memory.hand_over(found.held_bytes)
        if to_host:
            machine.memory.change(swapped=found.bytes)
        extent, priority = f"activation:{found.activation}", machine.turns.here(SWAP_OUT_PRIORITY)
        away = _Away(found.bytes, found.tier, extent, machine.clock.signal(), priority)
        self._away[found.slot] = away
        pieces = [found.bytes] if to_host else machine.pieces(found.bytes)
        after = machine.compute.mark()

        def gone() -> None:
            machine.memory.has_left(found.held_bytes)
            self._leaving_bytes -= found.bytes
            room, self._room = self._room, machine.clock.signal()
            room.set()

        off_device = Countdown(len(pieces), gone)
        left = Countdown(len(pieces), away.left.set)
        for nbytes in pieces:
            machine.d2h.submit(self._leave(f"swap_out of {found.activation}", away, nbytes, after, off_device, left))

    def _leave(
        self, label: str, away: _Away, nbytes: int, after: Signal | None, off_device: Countdown, left: Countdown
    ) -> Thread:
        machine = self._machine
        if away.tier is Tier.NVME:
            buffers = machine.buffers("swap_out", machine.of_io(nbytes))
            yield from machine.pool["swap_out"].acquire(buffers)
            machine.memory.touch("swap_out", nbytes, buffers)
        if after is not None:
            yield after
        requests = machine.of_io(nbytes) if away.tier is Tier.NVME else 1
        yield from machine.in_python(requests)
        yield machine.copying("d2h", label, nbytes)
        off_device.one_less()
        if away.tier is Tier.NVME:
            machine.ssd.submit(self._write(away, nbytes, left), priority=away.priority)
        else:
            left.one_less()

    def _write(self, away: _Away, nbytes: int, left: Countdown) -> Thread:
        machine, requests = self._machine, self._machine.of_io(nbytes)
        yield from machine.in_python(requests)
        yield machine.writing(away.extent, nbytes, requests)
        machine.pool["swap_out"].release(machine.buffers("swap_out", requests))
        left.one_less()

    def swap_in(self, found: SwapIn) -> None:
        machine, label = self._machine, f"swap_in of {found.activation}"
        machine.memory.change(graph=found.change_bytes)
        arrived = machine.clock.signal()
        self._arrivals[found.node] = (label, arrived)
        away = self._away.pop(found.slot)
        self.coming_bytes += away.bytes if away.tier is Tier.NVME else 0
        machine.clock.start(self._return(away, label, machine.compute.mark(), arrived))

    def _return(self, away: _Away, label: str, after: Signal | None, arrived: Signal) -> Thread:
        """Not before all of it has left."""
        machine = self._machine
        yield away.left

        def landed() -> None:
            if away.tier is Tier.HOST:
                machine.memory.change(swapped=-away.bytes)
            arrived.set()

        if away.tier is Tier.HOST:
            self._copy_in(label, away.bytes, after, landed)
        else:
            self._bring("swap_in", away.extent, label, away.bytes, after, landed)

    # --- from the store to the device -------------------------------------------------------------------------

    def _bring(
        self,
        purpose: str,
        extent: str,
        label: str,
        nbytes: int,
        after: Signal | None,
        arrived: Callable[[], None],
        priority: int = FETCH_PRIORITY,
    ) -> None:
        """Read in pieces, each through a buffer of ``purpose``, and copy each to the device. Where host and device share
        memory, read each to where it belongs."""
        machine = self._machine
        pieces = machine.pieces(nbytes)
        landed = Countdown(len(pieces), arrived)
        for piece in pieces:
            if machine.on_cpu:
                machine.ssd.submit(self._read_in_place(extent, piece, landed), priority=priority)
                continue
            buffers = machine.buffers(purpose, machine.of_io(piece))
            read = self._read(purpose, extent, label, piece, after, landed)
            machine.clock.start(self._staged(purpose, buffers, read, priority))

    def _staged(self, purpose: str, buffers: int, read: Thread, priority: int) -> Thread:
        """No thread of the ssd lane waits for a buffer (``machine.read_staged``)."""
        yield from self._machine.pool[purpose].acquire(buffers)
        self._machine.ssd.submit(read, priority=priority)

    def _read_in_place(self, extent: str, nbytes: int, landed: Countdown) -> Thread:
        yield self._machine.reading(extent, nbytes, self._machine.of_io(nbytes))
        self.coming_bytes -= nbytes
        landed.one_less()

    def _read(
        self, purpose: str, extent: str, label: str, nbytes: int, after: Signal | None, landed: Countdown
    ) -> Thread:
        machine, requests = self._machine, self._machine.of_io(nbytes)
        yield from machine.in_python(requests)
        yield machine.reading(extent, nbytes, requests)

        def copied() -> None:
            self.coming_bytes -= nbytes
            machine.pool[purpose].release(machine.buffers(purpose, requests))
            landed.one_less()

        self._copy_in(label, nbytes, after, copied, requests)

    def _copy_in(
        self, label: str, nbytes: int, after: Signal | None, done: Callable[[], None], copies: int = 1
    ) -> None:
        """On the h2d lane, once compute is where it was started: the lane does not wait for that. It stands for so many
        ``copies``."""
        copy = self._copied_in(label, nbytes, done, copies)
        if after is None or after.done:
            self._machine.h2d.submit(copy)
        else:
            self._machine.clock.start(self._submitted_after(after, copy))

    def _submitted_after(self, after: Signal, copy: Thread) -> Thread:
        yield after
        self._machine.h2d.submit(copy)

    def _copied_in(self, label: str, nbytes: int, done: Callable[[], None], copies: int) -> Thread:
        yield from self._machine.in_python(copies)
        yield self._machine.copying("h2d", label, nbytes)
        done()
