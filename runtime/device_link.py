"""The link between host memory and the compute device: ordinary memory copies on a CPU, streams and events on CUDA.

Guarantees: ``copy_in`` and ``copy_out`` may run on any lane thread. What they return tells when the copied bytes are
there; the source may be reused and the destination read only after ``finish`` (by the host) or ``order_after`` (by
the compute stream). ``copy_out`` waits on the device for ``after``; for ``copy_in`` the host does (``machine.passing``).

Assumes: the compute stream is the current stream of the thread that calls ``mark`` and ``order_after``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

Moment = Any
"""A point on a CUDA stream (``torch.cuda.Event``); None on a CPU, where a copy has happened when it returns."""


class DeviceLink(Protocol):
    """How bytes move between the host and the device."""

    device: torch.device
    shares_memory: bool
    """Whether the host's threads read and write the device's memory as it is, so that nothing need be copied."""

    def mark(self) -> Moment: ...
    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Moment: ...
    def copy_out(self, destination: torch.Tensor, source: torch.Tensor, after: Moment) -> Moment: ...
    def has_come(self, moment: Moment) -> bool: ...
    def finish(self, moment: Moment) -> None: ...
    def order_after(self, moment: Moment) -> None: ...


class CpuLink:
    """The compute device is the CPU: a copy is a memory copy on the lane's thread.

    ``shares_memory`` False makes the runtime copy all the same, as beside a GPU.
    """

    def __init__(self, *, shares_memory: bool = True) -> None:
        self.device = torch.device("cpu")
        self.shares_memory = shares_memory

    def mark(self) -> Moment:
        return None

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Moment:
        destination.copy_(source)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor, after: Moment) -> Moment:
        destination.copy_(source)

    def has_come(self, moment: Moment) -> bool:
        return moment is None

    def finish(self, moment: Moment) -> None:
        return None

    def order_after(self, moment: Moment) -> None:
        return None


class CudaLink:
    """One stream per direction beside the compute stream; host memory is pinned, so copies are asynchronous."""

    shares_memory = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._in = torch.cuda.Stream(device)
        self._out = torch.cuda.Stream(device)

    def mark(self) -> Moment:
        """Now, on the compute stream: a copy that starts after it sees what compute has done so far."""
        moment = torch.cuda.Event(blocking=True)  # who waits for it sleeps: it may be far ahead
        moment.record(torch.cuda.current_stream(self.device))
        return moment

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> Moment:
        return self._copy(self._in, destination, source, None)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor, after: Moment) -> Moment:
        # The allocator must not give the source's memory away while this stream still reads it.
        source.record_stream(self._out)
        return self._copy(self._out, destination, source, after)

    def _copy(
        self, stream: torch.cuda.Stream, destination: torch.Tensor, source: torch.Tensor, after: Moment
    ) -> Moment:
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            destination.copy_(source, non_blocking=True)
            return stream.record_event()

    def has_come(self, moment: Moment) -> bool:
        return moment is None or bool(moment.query())

    def finish(self, moment: Moment) -> None:
        if moment is not None:
            moment.synchronize()

    def order_after(self, moment: Moment) -> None:
        if moment is not None:
            torch.cuda.current_stream(self.device).wait_event(moment)


def link_to(device: torch.device) -> DeviceLink:
    """The link to ``device``."""
    return CudaLink(device) if device.type == "cuda" else CpuLink()
