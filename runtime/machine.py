"""What all parts of the runtime of one model share: lanes, host memory, the store, the device and the clock."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lohan_fx.plan import Windows
from lohan_fx.runtime.checksum import Checksums, Compare
from lohan_fx.runtime.device_link import DeviceLink, link_to
from lohan_fx.runtime.host_pool import Buffer, HostPool, Reservation
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S, Lane, Work
from lohan_fx.runtime.moments import Moments, Passing
from lohan_fx.runtime.nvme_store import NvmeStore, ssd_threads
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.state_buffer import SMALL_ELEMENTS, buffer_bytes, small_buffers
from lohan_fx.runtime.timeline import Timeline
from lohan_fx.runtime.turns import Turns

# GPU-critical reads go before optimizer I/O (mechanisms c3.11); what frees device memory goes between. Beside updates that a
# forward waits for, turns go before kinds (``turns``).
FETCH_PRIORITY = 0
SWAP_OUT_PRIORITY = 1
STATE_READ_PRIORITY = 2
STATE_WRITE_PRIORITY = 3

ACTIVATIONS = "activations"
"""Purpose of the host memory that they are swapped to."""
OTHER_THREADS = 2
"""Beside a GPU the optimizer takes all cores but these: Python's own thread and the copies."""


@dataclass
class Machine:
    """The resources of one compiled model."""

    store: NvmeStore
    pool: HostPool
    link: DeviceLink
    timeline: Timeline
    ssd: Lane
    h2d: Lane
    d2h: Lane
    cpu: Lane
    moments: Lane
    windows: Windows
    landing: Room
    turns: Turns[int] = field(default_factory=Turns)
    sums_beside_updates: bool = False
    """Whether the thread that updates a chunk finds its checksums too, while the chunk is in its cache: where it is the only one.
    Beside a GPU an update has many threads, and so have checksums: those of the drives."""

    def __post_init__(self) -> None:
        self._moments = Moments(self.moments)
        self._activations: HostPool | None = None

    @property
    def device(self) -> torch.device:
        return self.link.device

    def read(self, extent: str, offset: int, buffer: torch.Tensor, nbytes: int, *, at: int = 0) -> None:
        """``store.read``, on the clock of the ssd lane."""
        with self.timeline.span("ssd", f"read {extent}", nbytes):
            self.store.read(extent, offset, buffer, nbytes, at=at)

    def read_to_update(self, extent: str, offset: int, buffer: torch.Tensor, nbytes: int) -> list[Compare]:
        """``read``; what is left to call before an update uses the bytes."""
        if not self.sums_beside_updates:
            self.read(extent, offset, buffer, nbytes)
            return []
        with self.timeline.span("ssd", f"read {extent}", nbytes):
            return self.store.read_uncompared(extent, offset, buffer, nbytes)

    def checksums(self, extent: str, offset: int, buffer: torch.Tensor, nbytes: int) -> Checksums | None:
        """For ``write``, after an update: those of the buffer, or None where the drives' threads find them."""
        return self.store.checksums(extent, offset, buffer, nbytes) if self.sums_beside_updates else None

    def write(
        self, extent: str, offset: int, buffer: torch.Tensor, nbytes: int, checksums: Checksums | None = None
    ) -> None:
        """``store.write``, on the clock of the ssd lane."""
        with self.timeline.span("ssd", f"write {extent}", nbytes):
            self.store.write(extent, offset, buffer, nbytes, checksums)

    def pieces(self, nbytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of the transfers that ``nbytes`` are cut into."""
        size = self.windows.io_bytes
        return [(start, min(size, nbytes - start)) for start in range(0, nbytes, size)]

    def read_staged(
        self,
        purpose: str,
        label: str,
        read: Callable[[Buffer], None],
        failed: Callable[[BaseException], None],
        priority: int,
    ) -> None:
        """``read(buffer)`` on the ssd lane once ``purpose`` has a buffer, or ``failed(error)``.

        No thread of the lane waits for one: beside a GPU that is ahead of its transfers they all would, and the drives
        would rest while states are to be read and written.
        """

        def submit(buffer: Buffer) -> None:
            try:
                self.ssd.submit(functools.partial(read, buffer), priority=priority, label=label)
            except BaseException as error:
                buffer.release()
                failed(error)

        self.pool.when_free(purpose, submit)

    def passing(self) -> Passing:
        """When the device will have done all that this thread has asked it for; on a CPU it has."""
        return self._moments.after(self.link)

    def copy_in(
        self, passing: Passing, copy: Callable[[], None], label: str, failed: Callable[[BaseException], None]
    ) -> None:
        """``copy()`` on the h2d lane once the device is past that moment: where it goes may be in use until then. Or
        ``failed(error)``.

        The lane does not wait for that: a copy that is early would hold up those behind it that are not, and with the
        buffers that these hold the drives.
        """

        def submit(passed: Work[None]) -> None:
            try:
                passed.wait()
                self.h2d.submit(copy, label=label)
            except BaseException as error:
                failed(error)

        try:
            self._moments.then(self.link, passing, submit)
        except BaseException as error:
            failed(error)

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until nothing is under way; in the order in which lanes hand jobs on."""
        deadline_s = time.monotonic() + timeout_s
        before = None
        # A transfer that had no buffer yet may have been handed to a lane that was looked at before: look again.
        while before != (before := self.pool.asking()):
            for lane in self._lanes():
                lane.drain(max(0.1, deadline_s - time.monotonic()))

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """End the lanes, then give back host memory, unless ``LaneTimeout`` is raised: a late job may still use it."""
        deadline_s = time.monotonic() + timeout_s
        for lane in self._lanes():
            lane.close(max(0.1, deadline_s - time.monotonic()))
        for pool in self._pools():
            pool.close(force=True)
        self.landing.close()

    def reserve_activations(self, nbytes: int) -> torch.Tensor:
        """Host memory, uint8, for what swaps out to it; at most once."""
        assert self._activations is None
        self._activations = HostPool({ACTIVATIONS: Reservation(1, nbytes)}, pin=self.device.type == "cuda")
        return self._activations.acquire(ACTIVATIONS).tensor

    def places(self) -> dict[str, tuple[int, int]]:
        """(address, bytes) of the host memory of each purpose."""
        return {purpose: place for pool in self._pools() for purpose, place in pool.places().items()}

    def _pools(self) -> tuple[HostPool, ...]:
        return (self.pool,) if self._activations is None else (self.pool, self._activations)

    def _lanes(self) -> tuple[Lane, ...]:
        """In the order in which they hand jobs on."""
        return self.d2h, self.cpu, self.ssd, self.moments, self.h2d


def start_machine(store: NvmeStore, device: torch.device, timeline: Timeline, windows: Windows) -> Machine:
    """The lanes of one model, and host memory for ``windows``."""
    pool = HostPool(
        {
            "fetch": Reservation(windows.io_buffers, windows.io_bytes),
            "swap_in": Reservation(windows.io_buffers, windows.io_bytes),
            "swap_out": Reservation(windows.io_buffers, windows.io_bytes),
            "gradients": Reservation(windows.gradient_buffers, 4 * windows.chunk_elements),
            "optimizer": Reservation(windows.optimizer_buffers, buffer_bytes(windows.chunk_elements)),
            "small": Reservation(small_buffers(windows), buffer_bytes(SMALL_ELEMENTS)),
            "compute": Reservation(1, buffer_bytes(windows.chunk_elements)),
        },
        pin=device.type == "cuda",
    )
    # A lane's copies use one thread each: the compute threads keep the cores. So does Adam, unless a GPU computes.
    one_thread = functools.partial(use_threads, 1)
    adam_threads = 1 if device.type == "cpu" else max(1, (os.cpu_count() or 1) - OTHER_THREADS)
    compute_threads = torch.get_num_threads()
    machine = Machine(
        store=store,
        pool=pool,
        link=link_to(device),
        timeline=timeline,
        ssd=Lane("ssd", threads=ssd_threads(store.drives), initializer=one_thread),
        h2d=Lane("h2d", initializer=one_thread),
        d2h=Lane("d2h", initializer=one_thread),
        cpu=Lane("cpu", initializer=functools.partial(use_threads, adam_threads)),
        moments=Lane("moments"),
        windows=windows,
        landing=Room(),
        sums_beside_updates=adam_threads == 1,
    )
    # What a thread says is partly said for the process (MKL, threads started later): the last word is ours.
    torch.set_num_threads(compute_threads)
    return machine


def use_threads(threads: int) -> None:
    """From now on torch's ops of the calling thread take so many threads."""
    # A thread's first parallel op takes over what was last said in the process, whatever it was told before: asking
    # is that first one. With a team of its own on a CPU, OpenMP counts more threads than cores, and the compute
    # threads sleep at every barrier.
    torch.get_num_threads()
    torch.set_num_threads(threads)
