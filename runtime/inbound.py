"""inbound: the ways by which bytes come to the device, each a part of an ``Arrival``.

From the drives straight into place, where host and device share memory; by way of a staging buffer; or from host memory. Nothing
here waits: each function starts a transfer, and the arrival hears of its end or its failure exactly once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.device_link import Moment
from lohan_fx.runtime.host_pool import Buffer
from lohan_fx.runtime.machine import Machine
from lohan_fx.runtime.moments import Passing


def read_in_place(
    machine: Machine,
    arrival: Arrival,
    extent: str,
    priority: int,
    offset: int,
    memory: torch.Tensor,
    nbytes: int,
) -> None:
    """Read one piece of ``extent`` straight into its place in ``memory``."""

    def read() -> None:
        try:
            machine.read(extent, offset, memory, nbytes, at=offset)
        except BaseException as error:
            arrival.part_done(error)
            raise
        machine.landing.arrived(memory.data_ptr(), nbytes)
        arrival.part_done()

    machine.ssd.submit(read, priority=priority, label=arrival.label)


def read_staged(
    machine: Machine,
    arrival: Arrival,
    purpose: str,
    extent: str,
    priority: int,
    offset: int,
    destination: torch.Tensor,
    passing: Passing,
) -> None:
    """Read as much of ``extent`` as ``destination`` holds into a buffer of ``purpose``, and copy it in once the device is past
    ``passing``."""
    elements, dtype = destination.numel(), destination.dtype
    nbytes = elements * dtype.itemsize

    def read(buffer: Buffer) -> None:
        try:
            machine.read(extent, offset, buffer.tensor, nbytes)
        except BaseException as error:
            buffer.release()
            arrival.part_done(error)
            raise
        copy_in(machine, arrival, destination, buffer.first(elements, dtype), passing, buffer.release)

    machine.read_staged(purpose, arrival.label, read, arrival.part_done, priority)


def copy_in(
    machine: Machine,
    arrival: Arrival,
    destination: torch.Tensor,
    source: torch.Tensor,
    passing: Passing,
    release: Callable[[], None] = lambda: None,
) -> None:
    """Copy ``source``, in host memory, to ``destination``, which is as large, once the device is past ``passing``; then, or
    where that fails, ``release()``."""

    def failed(error: BaseException) -> None:
        release()
        arrival.part_done(error)

    def copy() -> None:
        moment: Moment = None
        try:
            with machine.timeline.span("h2d", arrival.label, source.numel() * source.element_size()):
                moment = machine.link.copy_in(destination, source)
                machine.link.finish(moment)
        except BaseException as error:
            failed(error)
            raise
        release()
        arrival.part_done(moment=moment)

    machine.copy_in(passing, copy, arrival.label, failed)


def wait_for(machine: Machine, arrival: Arrival, value: torch.Tensor) -> None:
    """Block until the arrival is done, on the clock as a stall, then order streams.

    ``value`` is an argument so that it lives until it is waited for.
    """
    del value
    if arrival.done():
        arrival.wait()
    else:
        with machine.timeline.stall(arrival.label):
            arrival.wait()
    machine.link.order_after(arrival.moment)
