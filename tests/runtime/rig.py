"""The runtime's resources without a compiled model: lanes, a small pool and a real store that can be made to fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from lohan_fx.plan import Windows
from lohan_fx.runtime.device_link import CpuLink
from lohan_fx.runtime.host_pool import PAGE_BYTES, HostPool, Reservation
from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.machine import Machine
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.slots import ParameterSlot
from lohan_fx.runtime.state_buffer import SMALL_ELEMENTS, buffer_bytes, small_buffers
from lohan_fx.runtime.timeline import Timeline
from tests.runtime.faulty_backend import FaultyBackend

IO_BYTES = 2 * PAGE_BYTES
CHUNK_ELEMENTS = 4096
ARENA_BYTES = 16 * PAGE_BYTES
LANDING_BYTES = 1 << 20


@contextlib.contextmanager
def machine(
    directory: Path,
    backend: FaultyBackend | None = None,
    *,
    buffers: int = 2,
    shares_memory: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Iterator[Machine]:
    """At the end every buffer must be back, apart from that of the activations, unless the test closed it all itself."""
    windows = Windows(
        fetch_bytes=LANDING_BYTES,
        swap_in_bytes=LANDING_BYTES,
        gradient_bytes=LANDING_BYTES,
        chunk_elements=chunk_elements,
        io_bytes=IO_BYTES,
        io_buffers=buffers,
        optimizer_buffers=buffers,
        gradient_buffers=buffers,
        swap_out_bytes=LANDING_BYTES,
    )
    pool = HostPool(
        {
            "fetch": Reservation(buffers, IO_BYTES),
            "swap_in": Reservation(buffers, IO_BYTES),
            "swap_out": Reservation(buffers, IO_BYTES),
            "gradients": Reservation(buffers, 4 * chunk_elements),
            "optimizer": Reservation(buffers, buffer_bytes(chunk_elements)),
            "small": Reservation(small_buffers(windows), buffer_bytes(SMALL_ELEMENTS)),
            "compute": Reservation(1, buffer_bytes(chunk_elements)),
            "activations": Reservation(1, ARENA_BYTES),
        }
    )
    made = Machine(
        store=NvmeStore([directory], backend=backend),
        pool=pool,
        link=CpuLink(shares_memory=shares_memory),
        timeline=Timeline(),
        ssd=Lane("ssd", threads=3),
        h2d=Lane("h2d"),
        d2h=Lane("d2h"),
        cpu=Lane("cpu"),
        moments=Lane("moments"),
        windows=windows,
        landing=Room(),
    )
    made.landing.reserve(LANDING_BYTES)
    try:
        yield made
        made.drain(60.0)
        closed = pool._region is None
        out = {purpose: pool.in_use(purpose) for purpose in pool._shelves if purpose != "activations" and not closed}
        assert not any(out.values()), f"buffers are still out: {out}"
    finally:
        made.close()
        made.store.close()


def parameter(
    name: str,
    *shape: int,
    slot: int = 0,
    compute: torch.dtype = torch.float32,
    master: torch.dtype = torch.float32,
    trainable: bool = True,
) -> ParameterSlot:
    return ParameterSlot(slot, name, torch.Size(shape), compute, master, trainable)


class FakeCudart:
    """Stands in for torch.cuda.cudart(), which cannot be had without a GPU."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.status == 0:
            self.registered[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0
