"""parameter_stream: ``fetch``: parameters on their way to the device.

Guarantees: ``fetch`` returns at once; the tensor it returns holds the parameter once its arrival is done. Host
memory used is the "fetch" reservation of the pool, whatever the size of the parameter; where host and device share
memory there is no copy, and none of it. Where an update of the parameter is under way, its transfers start when the
update has ended, and no thread of a lane waits for that; if the update fails, so does the arrival.

Assumes: apart from that nobody writes a parameter while it is being fetched (``verify`` proves it of the graphs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from lohan_fx import ops
from lohan_fx.errors import without_traceback
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.inbound import copy_in, read_in_place, read_staged, wait_for
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S
from lohan_fx.runtime.machine import FETCH_PRIORITY, Machine
from lohan_fx.runtime.slots import ParameterSlot, Residency
from lohan_fx.runtime.state_buffer import cut

PATIENCE_S = 3600.0
"""How long to wait for a parameter whose update stands at the end of a whole step's queue."""

Pieces = Sequence[tuple[int, int]]
"""(offset, bytes) of the transfers of one parameter."""
Parts = Sequence[Callable[[], object]]
"""What starts them."""


class ParameterStream:
    """Brings parameters to the device, and tells ``machine.turns`` what compute goes on with. ``pending``: the update of a slot
    that is under way, or None."""

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
            machine.turns.wanted(slot)  # what needs no transfer is fetched where it is used (``schedule``)
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
        ops.expect(value, functools.partial(self._wait_for, slot, arrival, value))
        return value

    def _wait_for(self, slot: int, arrival: Arrival, value: torch.Tensor) -> None:
        self._machine.turns.wanted(slot)
        wait_for(self._machine, arrival, value)

    def _in_place(self, parameter: ParameterSlot, arrival: Arrival, pieces: Pieces) -> tuple[torch.Tensor, Parts]:
        """The value, which lies on pages of its own, and what starts the reads straight into it."""
        machine = self._machine
        value, memory = machine.landing.on_pages(parameter.shape, parameter.compute_dtype)
        read = functools.partial(read_in_place, machine, arrival, parameter.streamed_extent, self._priority(parameter))
        return value, [functools.partial(read, offset, memory, nbytes) for offset, nbytes in pieces]

    def _by_way_of_host(
        self, parameter: ParameterSlot, resident: Residency, arrival: Arrival, pieces: Pieces
    ) -> tuple[torch.Tensor, Parts]:
        """The value on the device, and what starts the copies to it, from host memory or by way of it."""
        machine = self._machine
        with torch.inference_mode(False):  # a lane, which is in no such mode, writes it
            flat = torch.empty(parameter.numel, dtype=parameter.compute_dtype, device=machine.device)
            value = flat.view(parameter.shape)
        passing = machine.passing()
        if resident.compute is not None:
            return value, [functools.partial(copy_in, machine, arrival, flat, resident.compute, passing)]
        extent, priority = parameter.streamed_extent, self._priority(parameter)
        read = functools.partial(read_staged, machine, arrival, "fetch", extent, priority)
        each = parameter.compute_dtype.itemsize
        return value, [
            functools.partial(read, offset, cut(flat, offset // each, (offset + nbytes) // each), passing)
            for offset, nbytes in pieces
        ]

    def _priority(self, parameter: ParameterSlot) -> int:
        return self._machine.turns.of(parameter.slot, FETCH_PRIORITY)


def _start_after(update: Arrival, arrival: Arrival, parts: Parts) -> None:
    """Called when ``update`` has ended, on the thread that ended it."""
    for part in parts:
        try:
            if update.error is not None:
                # The optimizer keeps the original, and a traceback would keep the tensors of the whole forward.
                raise without_traceback(update.error)
            part()
        except BaseException as error:
            arrival.part_done(error)
