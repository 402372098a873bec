"""parameter_stream: ``fetch``: parameters on their way to the device.

Guarantees: ``fetch`` returns at once; the tensor it returns holds the parameter once its arrival is done. Host
memory used is the "fetch" reservation of the pool, whatever the size of the parameter; where host and device share
memory there is no copy, and none of it. Where an update of the parameter is under way, its transfers start when the
update has ended, and no thread of a lane waits for that; if the update fails, so does the arrival.

Assumes: apart from that nobody writes a parameter while it is being fetched (``verify`` proves it of the graphs).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from lohan_fx import ops
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.host_pool import Buffer
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S, Work
from lohan_fx.runtime.machine import FETCH_PRIORITY, Machine
from lohan_fx.runtime.slots import ParameterSlot, Residency

PATIENCE_S = 3600.0
"""How long to wait for a parameter whose update stands at the end of a whole step's queue."""

Pieces = Sequence[tuple[int, int]]
"""(offset, bytes) of the transfers of one parameter."""
Parts = Sequence[Callable[[], object]]
"""What starts them."""


class ParameterStream:
    """Brings parameters to the device. ``pending``: the update of a slot that is under way, or None."""

    def __init__(
        self,
        machine: Machine,
        slots: Mapping[int, ParameterSlot],
        residency: Mapping[int, Residency],
        pending: Callable[[int], Arrival | None],
    ) -> None:
        self._machine = machine
        self._slots = slots
        self._residency = residency
        self._pending = pending

    def fetch(self, slot: int) -> torch.Tensor:
        """Start bringing ``slot`` to the device; ``ops.wait`` on the result waits for it."""
        parameter, resident = self._slots[slot], self._residency[slot]
        machine, update = self._machine, self._pending(slot)
        if resident.compute is not None and resident.on_device:
            value = resident.compute.view(parameter.shape)
            if update is not None:
                arrival = Arrival(f"fetch of {parameter.name}", 1, PATIENCE_S)
                update.then(functools.partial(_start_after, update, arrival, [arrival.part_done]))
                ops.expect(value, functools.partial(wait_for, machine, arrival, value))
            return value
        pieces = machine.pieces(parameter.compute_bytes) if resident.compute is None else [(0, parameter.compute_bytes)]
        arrival = Arrival(f"fetch of {parameter.name}", len(pieces), PATIENCE_S if update else DEFAULT_TIMEOUT_S)
        if resident.compute is None and machine.link.shares_memory:
            value, parts = self._in_place(parameter, arrival, pieces)
        else:
            value, parts = self._by_way_of_host(parameter, resident, arrival, pieces)
        if update is None:
            for part in parts:
                part()
        else:
            update.then(functools.partial(_start_after, update, arrival, parts))
        ops.expect(value, functools.partial(wait_for, machine, arrival, value))
        return value

    def _in_place(self, parameter: ParameterSlot, arrival: Arrival, pieces: Pieces) -> tuple[torch.Tensor, Parts]:
        """The value, which lies on pages of its own, and what starts the reads straight into it."""
        machine = self._machine
        value, memory = machine.landing.on_pages(parameter.shape, parameter.compute_dtype)
        extent = parameter.streamed_extent
        reads = [
            functools.partial(read_in_place, machine, arrival, extent, offset, memory, nbytes)
            for offset, nbytes in pieces
        ]
        return value, [self._on_ssd(arrival, read) for read in reads]

    def _by_way_of_host(
        self, parameter: ParameterSlot, resident: Residency, arrival: Arrival, pieces: Pieces
    ) -> tuple[torch.Tensor, Parts]:
        """The value on the device, and what starts the copies to it, from host memory or by way of it."""
        machine = self._machine
        with torch.inference_mode(False):  # a lane, which is in no such mode, writes it
            value = torch.empty(parameter.shape, dtype=parameter.compute_dtype, device=machine.device)
        flat = value.view(-1).view(torch.uint8) if parameter.numel else value
        passed = machine.passing()
        if resident.compute is not None:
            copy = functools.partial(self._copy, arrival, flat, resident.compute.view(torch.uint8))
            return value, [functools.partial(machine.copy_in, passed, copy, arrival.label, arrival.part_done)]
        reads = [
            functools.partial(self._read, arrival, parameter, flat, offset, nbytes, passed) for offset, nbytes in pieces
        ]
        staged = functools.partial(machine.read_staged, "fetch", arrival.label, failed=arrival.part_done)
        return value, [functools.partial(staged, read) for read in reads]

    def _on_ssd(self, arrival: Arrival, read: Callable[[], None]) -> Callable[[], object]:
        return functools.partial(self._machine.ssd.submit, read, priority=FETCH_PRIORITY, label=arrival.label)

    def _read(
        self,
        arrival: Arrival,
        parameter: ParameterSlot,
        flat: torch.Tensor,
        offset: int,
        nbytes: int,
        passed: Work[None],
        buffer: Buffer,
    ) -> None:
        machine = self._machine

        def failed(error: BaseException) -> None:
            buffer.release()
            arrival.part_done(error)

        def copy() -> None:
            try:
                self._copy(arrival, flat[offset : offset + nbytes], buffer.tensor[:nbytes])
            finally:
                buffer.release()

        try:
            machine.read(parameter.streamed_extent, offset, buffer.tensor, nbytes)
        except BaseException as error:
            failed(error)
            raise
        machine.copy_in(passed, copy, arrival.label, failed)

    def _copy(self, arrival: Arrival, destination: torch.Tensor, source: torch.Tensor) -> None:
        machine = self._machine
        try:
            with machine.timeline.span("h2d", arrival.label, source.numel()):
                moment = machine.link.copy_in(destination, source)
                machine.link.finish(moment)
        except BaseException as error:
            arrival.part_done(error)
            raise
        arrival.part_done(moment=moment)


def _start_after(update: Arrival, arrival: Arrival, parts: Parts) -> None:
    """Called when ``update`` has ended, on the thread that ended it."""
    for part in parts:
        try:
            if update.error is not None:
                # A copy: the optimizer keeps the original, and a traceback would keep the tensors of the whole forward.
                raise copy.copy(update.error)
            part()
        except BaseException as error:
            arrival.part_done(error)


def read_in_place(
    machine: Machine, arrival: Arrival, extent: str, offset: int, memory: torch.Tensor, nbytes: int
) -> None:
    """One piece of ``extent``, straight into its place in ``memory``."""
    try:
        machine.read(extent, offset, memory[offset:], nbytes)
    except BaseException as error:
        arrival.part_done(error)
        raise
    arrival.part_done()


def wait_for(machine: Machine, arrival: Arrival, value: torch.Tensor) -> None:
    """What ``ops.wait(value)`` does: block until the arrival is done, on the clock as a stall, then order streams.

    ``value`` is an argument so that it lives until it is waited for.
    """
    del value
    if arrival.done():
        arrival.wait()
    else:
        with machine.timeline.stall(arrival.label):
            arrival.wait()
    machine.link.order_after(arrival.moment)
