"""parameter_stream: ``fetch``, and whole parameters read and written for ``state_dict`` and its kin.

Guarantees: ``fetch`` returns at once; the tensor it returns holds the parameter once its arrival is done. Host
memory used is the "fetch" reservation of the pool, whatever the size of the parameter; where host and device share
memory there is no copy, and none of it.

Assumes: nobody writes a parameter while it is being fetched (``verify`` proves it of the graphs; the optimizer's
barrier in ``step`` separates the steps).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from lohan_fx import ops
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.device_link import Moment
from lohan_fx.runtime.host_pool import PAGE_BYTES, page_padded_bytes
from lohan_fx.runtime.machine import FETCH_PRIORITY, Machine
from lohan_fx.runtime.slots import ParameterSlot, Residency


class ParameterStream:
    """Brings parameters to the device."""

    def __init__(
        self, machine: Machine, slots: Mapping[int, ParameterSlot], residency: Mapping[int, Residency]
    ) -> None:
        self._machine = machine
        self._slots = slots
        self._residency = residency

    def fetch(self, slot: int) -> torch.Tensor:
        """Start bringing ``slot`` to the device; ``ops.wait`` on the result waits for it."""
        parameter, resident = self._slots[slot], self._residency[slot]
        if resident.compute is not None and resident.on_device:
            return resident.compute.view(parameter.shape)
        machine = self._machine
        if resident.compute is None and machine.link.shares_memory:
            return self._fetch_in_place(parameter)
        value = torch.empty(parameter.shape, dtype=parameter.compute_dtype, device=machine.device)
        flat = value.view(-1).view(torch.uint8) if parameter.numel else value
        after = machine.link.mark()
        if resident.compute is not None:
            arrival = Arrival(f"fetch of {parameter.name}", 1)
            source = resident.compute.view(torch.uint8)
            machine.h2d.submit(functools.partial(self._copy, arrival, flat, source, after), label=arrival.label)
        else:
            pieces = machine.pieces(parameter.compute_bytes)
            arrival = Arrival(f"fetch of {parameter.name}", len(pieces))
            for offset, nbytes in pieces:
                read = functools.partial(self._read, arrival, parameter, flat, offset, nbytes, after)
                machine.ssd.submit(read, priority=FETCH_PRIORITY, label=arrival.label)
        ops.expect(value, functools.partial(wait_for, machine, arrival, value))
        return value

    def _fetch_in_place(self, parameter: ParameterSlot) -> torch.Tensor:
        """Read straight into the value, which lies on pages of its own."""
        machine = self._machine
        value, memory = on_pages(parameter.shape, parameter.compute_dtype)
        pieces = machine.pieces(parameter.compute_bytes)
        arrival = Arrival(f"fetch of {parameter.name}", len(pieces))
        for offset, nbytes in pieces:
            read = functools.partial(read_in_place, machine, arrival, parameter.streamed_extent, offset, memory, nbytes)
            machine.ssd.submit(read, priority=FETCH_PRIORITY, label=arrival.label)
        ops.expect(value, functools.partial(wait_for, machine, arrival, value))
        return value

    def _read(
        self, arrival: Arrival, parameter: ParameterSlot, flat: torch.Tensor, offset: int, nbytes: int, after: Moment
    ) -> None:
        machine = self._machine
        try:
            buffer = machine.pool.acquire("fetch")
        except BaseException as error:
            arrival.part_done(error)
            raise
        try:
            machine.read(parameter.streamed_extent, offset, buffer.tensor, nbytes)
            destination = flat[offset : offset + nbytes]

            def copy() -> None:
                try:
                    self._copy(arrival, destination, buffer.tensor[:nbytes], after)
                finally:
                    buffer.release()

            machine.h2d.submit(copy, label=arrival.label)
        except BaseException as error:
            buffer.release()
            arrival.part_done(error)
            raise

    def _copy(self, arrival: Arrival, destination: torch.Tensor, source: torch.Tensor, after: Moment) -> None:
        machine = self._machine
        try:
            with machine.timeline.span("h2d", arrival.label, source.numel()):
                moment = machine.link.copy_in(destination, source, after)
                machine.link.finish(moment)
        except BaseException as error:
            arrival.part_done(error)
            raise
        arrival.part_done(moment=moment)


def on_pages(
    shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A dense CPU tensor that begins on a page, and all its pages as uint8: what O_DIRECT reads into."""
    nbytes = page_padded_bytes(shape.numel() * dtype.itemsize)
    raw = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
    begin = -raw.data_ptr() % PAGE_BYTES
    value = torch.empty(0, dtype=dtype)
    # Not a view, which would keep a second tensor and its version counter beside the parameter's.
    strides = stride or torch.empty(shape, device="meta").stride()
    value.set_(raw.untyped_storage(), begin // dtype.itemsize, shape, strides)
    return value, raw[begin : begin + nbytes]


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
