"""activation_swap: ``swap_out`` and ``swap_in``.

Guarantees: ``swap_in`` returns at once, and ``swap_out`` unless more than ``leaving`` allows has not left yet: then it
waits until it has (a plan's peak counts that much). A swapped-out tensor is held only until its bytes have left;
its place in host memory or in the store is free again as soon as it is back, or when its handle dies without that
(a forward whose backward never ran). A handle is good for one ``swap_in``. A tensor that lies in another memory than the
device's (seeds of fused attention do) has nowhere to go: it is held until it is asked for.

Assumes: the handle's storage offset is left alone: it is the key by which the tensor is found again, and survives
autograd's saving and unpacking of the handle.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from lohan_fx import ops
from lohan_fx.errors import StepError, without_traceback
from lohan_fx.plan import Tier
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.byte_window import ByteWindow
from lohan_fx.runtime.chunk_update import Countdown
from lohan_fx.runtime.device_link import Moment
from lohan_fx.runtime.host_arena import HostArena, Region
from lohan_fx.runtime.host_pool import Buffer
from lohan_fx.runtime.inbound import copy_in, read_in_place, read_staged, wait_for
from lohan_fx.runtime.interrupts import interrupt_waits
from lohan_fx.runtime.machine import FETCH_PRIORITY, SWAP_OUT_PRIORITY, Machine
from lohan_fx.runtime.moments import Passing
from lohan_fx.runtime.room import LEAST_BYTES
from lohan_fx.runtime.state_buffer import cut


@dataclass
class _Swapped:
    """A tensor that is away: what it looked like and where its bytes are.

    ``shown`` is its shape; ``size`` that of what is moved, where dimensions that only repeat (stride 0) have size 1.
    ``extent_bytes`` may be more than it has: what smaller inputs make takes places that were made for larger ones.
    """

    label: str
    shown: torch.Size
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    dense: bool
    left: Arrival
    region: Region | None = None
    extent: str | None = None
    extent_bytes: int = 0
    priority: int = SWAP_OUT_PRIORITY
    lock: threading.Lock = field(default_factory=threading.Lock)


class ActivationSwap:
    """Sends activations away and brings them back. ``leaving``: how many bytes may be on their way out."""

    def __init__(self, machine: Machine, arena: HostArena) -> None:
        self.leaving = ByteWindow(machine.timeline)
        self._machine = machine
        self._arena = arena
        self._away: dict[int, _Swapped] = {}
        self._elsewhere: dict[int, torch.Tensor] = {}
        self._abandoned: deque[_Swapped] = deque()
        self._keys = itertools.count(1)
        self._extents = itertools.count()
        self._lock = threading.Lock()
        self._free_extents: list[tuple[int, str]] = []

    def prepare(self, sizes_bytes: Iterable[int]) -> None:
        """Preallocate places in the store for swaps of these sizes, so that a step finds them there."""
        self._reclaim()
        free = sorted(size for size, _ in list(self._free_extents))
        fresh: dict[str, int] = {}
        for nbytes in sorted(sizes_bytes, reverse=True):
            place = bisect.bisect_left(free, nbytes)
            if place < len(free):
                del free[place]
            else:
                fresh[f"activation:{next(self._extents)}"] = nbytes
        self._machine.store.allocate(fresh)
        for name, nbytes in fresh.items():
            self._free(nbytes, name)

    def _free(self, nbytes: int, extent: str) -> None:
        with self._lock:
            bisect.insort(self._free_extents, (nbytes, extent))

    @property
    def away(self) -> int:
        """How many tensors are away."""
        return len(self._away) + len(self._elsewhere)

    def raise_failure(self) -> None:
        """Raise what kept a tensor that is away from getting there, as far as that is known by now."""
        for away in list(self._away.values()):
            if away.left.error is not None:
                # Its traceback will hold the handles, and their death must free this one.
                raise without_traceback(away.left.error)

    def swap_out(self, x: torch.Tensor, tier: str) -> torch.Tensor:
        """Start moving ``x`` to ``tier`` ("host" or "nvme"; to NVMe where host memory is full); returns the handle."""
        machine = self._machine
        self._reclaim()
        key = next(self._keys)
        if x.device.type != machine.device.type:
            self._elsewhere[key] = x
            return self._handle(key)
        shown = x.shape
        if 0 in x.stride():
            sizes = [1 if stride == 0 else size for size, stride in zip(shown, x.stride(), strict=True)]
            x = x.as_strided(sizes, x.stride())
        dense = _is_dense(x)
        moved = x if dense else x.contiguous()
        nbytes, held_bytes = moved.numel() * moved.element_size(), moved.untyped_storage().nbytes()
        self.leaving.wait_for(held_bytes, f"swap window for {tuple(shown)}")
        with interrupt_waits():  # what is taken here is given back by jobs, which must all be there
            region = self._arena.take(nbytes) if tier == Tier.HOST else None
            size, extent = self._extent(nbytes) if region is None and nbytes else (0, None)
            pieces = [(0, nbytes)] if region is not None else machine.pieces(nbytes)
            left = Arrival(f"swap_out of {tuple(shown)}", len(pieces))
            self._away[key] = away = _Swapped(
                left.label, shown, x.shape, x.stride(), x.dtype, nbytes, dense, left, region, extent, size,
                machine.turns.here(SWAP_OUT_PRIORITY),
            )  # fmt: skip
            handle = self._handle(key)
            self.leaving.take(held_bytes)
            off_device = Countdown(len(pieces), functools.partial(self.leaving.give_back, held_bytes))
            after = machine.link.mark()
            for piece in pieces:
                leave = functools.partial(self._leave, away, moved, piece, after, off_device)
                machine.d2h.submit(leave, label=left.label)
        return handle

    def _handle(self, key: int) -> torch.Tensor:
        # Not a view: autograd would save a detached copy of one, and the original's death would abandon the tensor.
        handle = ops.empty_handle(self._machine.device)
        handle.set_(handle.untyped_storage(), key, (0,), (1,))
        weakref.finalize(handle, self._abandon, key)
        return handle

    def _leave(
        self, away: _Swapped, moved: torch.Tensor, piece: tuple[int, int], after: Moment, off_device: Countdown
    ) -> None:
        """One ``piece`` of ``moved``, on the d2h lane: into the host region, or into a staging buffer and from there to the
        store."""
        machine, (offset, nbytes) = self._machine, piece
        try:
            # Each thread has its own mind about autograd: what is copied here must not be on its record.
            buffer = self._copy_out(away, cut(_flat_bytes(moved.detach()), offset, offset + nbytes), after)
        except BaseException as error:
            away.left.part_done(error)
            raise
        finally:
            off_device.one_less()
        if buffer is None:
            away.left.part_done()
            return
        try:
            write = functools.partial(self._write, away, buffer, offset, nbytes)
            machine.ssd.submit(write, priority=away.priority, label=away.label)
        except BaseException as error:
            buffer.release()
            away.left.part_done(error)
            raise

    def _copy_out(self, away: _Swapped, source: torch.Tensor, after: Moment) -> Buffer | None:
        """Copy into the host region (None), or into the staging buffer that is returned."""
        machine = self._machine
        buffer = None
        if away.region is not None:
            target = away.region.tensor
        else:
            buffer = machine.pool.acquire("swap_out")
            target = buffer.first(source.numel(), torch.uint8)
        try:
            with machine.timeline.span("d2h", away.label, source.numel()):
                machine.link.finish(machine.link.copy_out(target, source, after))
        except BaseException:
            if buffer is not None:
                buffer.release()
            raise
        return buffer

    def _write(self, away: _Swapped, buffer: Buffer, offset: int, nbytes: int) -> None:
        assert away.extent is not None
        try:
            self._machine.write(away.extent, offset, buffer.tensor, nbytes)
        except BaseException as error:
            away.left.part_done(error)
            raise
        else:
            away.left.part_done()
        finally:
            buffer.release()

    def swap_in(self, handle: torch.Tensor) -> torch.Tensor:
        """Start bringing back what ``handle`` stands for; ``ops.wait`` on the result waits for it."""
        key = int(handle.storage_offset())
        if (elsewhere := self._elsewhere.pop(key, None)) is not None:
            return elsewhere
        away = self._away.pop(key, None)
        if away is None:
            raise StepError(
                "a swapped activation is asked for a second time: this backward ran before (retain_graph=True?); "
                "run the forward again for each backward"
            )
        machine = self._machine
        memory = None
        if away.dense and machine.link.shares_memory and (away.region is None or away.nbytes >= LEAST_BYTES):
            value, memory = machine.landing.on_pages(away.size, away.dtype, away.stride)
        else:
            value = torch.empty_strided(away.size, away.stride, dtype=away.dtype, device=machine.device)
        landing = value if away.dense else torch.empty(away.size, dtype=away.dtype, device=machine.device)
        flat = _flat_bytes(landing) if memory is None else memory
        pieces = [(0, away.nbytes)] if away.region is not None else machine.pieces(away.nbytes)
        back = Arrival(f"swap_in of {tuple(away.shown)}", len(pieces))
        back.then(functools.partial(self._give_up_place, away))
        if memory is not None:
            back.then(functools.partial(machine.landing.arrived, value.data_ptr(), away.nbytes))
        # Reads start only when the writes are done; chained, so that no ssd thread blocks on another one's job.
        start = functools.partial(self._start_read, away, back, flat, memory is not None, machine.passing())
        away.left.then(functools.partial(self._return, away, back, pieces, start))
        shown = value if away.shown == away.size else value.expand(away.shown)
        # ``shown`` is an argument so that it lives until it is waited for.
        ops.expect(shown, functools.partial(self._landed, back, value, landing, shown))
        return shown

    def _landed(self, back: Arrival, value: torch.Tensor, landing: torch.Tensor, shown: torch.Tensor) -> None:
        del shown
        wait_for(self._machine, back, value)
        if landing is not value:
            value.copy_(landing)

    def _return(
        self, away: _Swapped, back: Arrival, pieces: list[tuple[int, int]], start: Callable[[int, int], None]
    ) -> None:
        for offset, nbytes in pieces:
            if away.left.error is not None:
                back.part_done(away.left.error)
            else:
                start(offset, nbytes)

    def _start_read(
        self,
        away: _Swapped,
        back: Arrival,
        flat: torch.Tensor,
        in_place: bool,
        passing: Passing,
        offset: int,
        nbytes: int,
    ) -> None:
        """Start the way back of one piece, into its place in ``flat``."""
        machine = self._machine
        if in_place and away.region is None:
            assert away.extent is not None
            read_in_place(machine, back, away.extent, FETCH_PRIORITY, offset, flat, nbytes)
            return
        destination = cut(flat, offset, offset + nbytes)
        if away.region is not None:
            copy_in(machine, back, destination, away.region.tensor, passing)
        else:
            assert away.extent is not None
            read_staged(machine, back, "swap_in", away.extent, FETCH_PRIORITY, offset, destination, passing)

    def _abandon(self, key: int) -> None:
        """The handle died, and nobody fetched the tensor back.

        The collector may run this anywhere, also on a thread that holds one of our locks; so it only takes a note.
        """
        self._elsewhere.pop(key, None)
        away = self._away.pop(key, None)
        if away is not None:
            self._abandoned.append(away)

    def _reclaim(self) -> None:
        """Give up the places of abandoned tensors, each once its bytes have settled."""
        while self._abandoned:
            away = self._abandoned.popleft()
            away.left.then(functools.partial(self._give_up_place, away))

    def _give_up_place(self, away: _Swapped) -> None:
        with away.lock:
            region, away.region = away.region, None
            extent, away.extent = away.extent, None
        if region is not None:
            self._arena.give_back(region)
        if extent is not None:
            self._free(away.extent_bytes, extent)

    def _extent(self, nbytes: int) -> tuple[int, str]:
        """The smallest free place for ``nbytes``, and its size: it is the best of all choices, since whatever has no place then
        has none either if this one takes a larger one."""
        while True:
            with self._lock:
                place = bisect.bisect_left(self._free_extents, (nbytes, ""))
                if place < len(self._free_extents):
                    return self._free_extents.pop(place)
            self.prepare([nbytes])


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the elements of ``x`` fill one stretch of memory without holes or overlaps."""
    expected = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _flat_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as 1-D uint8."""
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=x.device)
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
