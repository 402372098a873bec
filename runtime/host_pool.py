"""Host memory: one region in huge pages, cut into fixed page-aligned reservations per purpose.

Guarantees:
- The region never grows, and a purpose never takes another's buffers: what one lane holds cannot starve another
  (no deadlock across purposes), and memory cannot exceed ``nbytes``.
- Without ``pin``, resident memory grows only as buffers are written, by whole huge pages (``huge_pages``); the buffer
  released last is handed out first, so one that was never needed never becomes resident. ``pin`` makes all of it
  resident at once.
- After ``close`` the pages are back with the system even if a tensor still views them. Such a tensor reads zeros
  and does not crash: the addresses stay mapped until the last view is gone.

- Those who ask by ``when_free`` are served in the order of asking, and no thread waits meanwhile.

Assumes: no transfer is in flight on a buffer that is released, nor on any when ``close`` is called (drain the lanes
first). Waiters in ``acquire`` are not served in order, and a purpose has either those or askers by ``when_free``. A
forked child has no use for the region: it finds zeros there (``huge_pages``).
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch

from lohan_fx.errors import LaneTimeout, LohanError
from lohan_fx.runtime.huge_pages import PAGE_BYTES, map_memory
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S
from lohan_fx.runtime.pinned_memory import pin as pin_memory
from lohan_fx.runtime.pinned_memory import unpin

__all__ = ["PAGE_BYTES", "Buffer", "HostPool", "Reservation", "page_padded_bytes"]

T = TypeVar("T")
KEPT_VIEWS = 4
"""Of one buffer: most transfers are as large as windows let them be, the last ones of tensors are of a few other sizes."""


def page_padded_bytes(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class Reservation:
    """``count`` buffers of ``bytes_each`` bytes; each takes whole pages."""

    count: int
    bytes_each: int


class _Memory:
    """The bytes of one buffer, and what ``Buffer.views`` keeps of them. Made once: each tensor that is made or dies lets the
    interpreter go, which to get back beside other threads may take longer than all else that a transfer does (docs/0043)."""

    __slots__ = ("tensor", "views")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.views: dict[Hashable, Any] = {}


@dataclass
class _Shelf:
    """The buffers of one purpose: ``free`` holds the indices of those not handed out, the next one last; ``memory`` the
    bytes of those that ever were, by index; ``asking`` those who get the next ones, which a thread is handing out while
    ``serving``."""

    offset_bytes: int
    bytes_each: int
    count: int
    free: list[int]
    peak: int = 0
    memory: dict[int, _Memory] = field(default_factory=dict)
    asking: deque[Callable[[Buffer], None]] = field(default_factory=deque)
    serving: bool = False

    @property
    def in_use(self) -> int:
        return self.count - len(self.free)


class Buffer:
    """A buffer of the pool, the holder's alone until ``release``; leaving a ``with`` block releases it."""

    __slots__ = ("_index", "_memory", "_pool", "purpose")

    def __init__(self, pool: HostPool, purpose: str, index: int, memory: _Memory) -> None:
        self.purpose = purpose
        self._pool = pool
        self._index = index
        self._memory: _Memory | None = memory

    @property
    def tensor(self) -> torch.Tensor:
        """1-D uint8 view of the buffer's whole pages. Raises ``LohanError`` after ``release``."""
        return self._there().tensor

    def views(self, key: Hashable, make: Callable[[torch.Tensor], T]) -> T:
        """``make(tensor)``, views of the buffer that are made once for all who have it and ask by the same ``key``."""
        memory = self._there()
        found = memory.views.get(key)
        if found is None:
            if len(memory.views) >= KEPT_VIEWS:
                memory.views.clear()
            found = memory.views[key] = make(memory.tensor)
        return cast(T, found)

    def first(self, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """The first ``elements`` of the buffer as ``dtype``, 1-D."""
        return self.views((elements, dtype), lambda tensor: tensor[: elements * dtype.itemsize].view(dtype))

    def _there(self) -> _Memory:
        if self._memory is None:
            raise LohanError(f"this {self.purpose!r} buffer was released and may be another's now; acquire one anew")
        return self._memory

    def release(self) -> None:
        """Hand the buffer back; views taken of it must not be used any more. Raises ``LohanError`` if done twice."""
        self._pool._take_back(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


class HostPool:
    """The host memory of a run. ``reservations`` maps each purpose to the buffers it may ever hold at once."""

    def __init__(self, reservations: Mapping[str, Reservation], *, pin: bool = False) -> None:
        if pin and not torch.cuda.is_available():
            raise ValueError("HostPool: asked to pin memory, found no CUDA device; pass pin=False")
        self._shelves, self._nbytes = _lay_out(reservations)
        self._changed = threading.Condition()
        self._served = 0
        self._pinned = pin
        self._region: mmap.mmap | None
        self._region, self._begin = _map_region(self._nbytes)
        self._address = torch.frombuffer(self._region, dtype=torch.uint8).data_ptr() + self._begin
        if pin:
            pin_memory(self._address, self._nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the region: the most this pool will ever keep resident."""
        return self._nbytes

    def acquire(self, purpose: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Buffer:
        """A buffer, waiting for a release if all are out.

        Raises ``LaneTimeout`` if none is released in time, ``LohanError`` if the pool is closed, and ``ValueError``
        for a purpose that has no reservation or one of 0 buffers.
        """
        shelf = self._shelf(purpose)
        if shelf.count == 0:
            raise ValueError(f"acquire({purpose!r}): its reservation holds 0 buffers; reserve at least 1")
        with self._changed:
            if not self._changed.wait_for(lambda: bool(shelf.free) or self._region is None, timeout_s):
                raise LaneTimeout(
                    f"waited {timeout_s:g} s for a {purpose!r} host buffer: all {shelf.count} of {shelf.bytes_each} "
                    "bytes are in use; release them, reserve more, or allow a longer timeout"
                )
            return self._hand_out(purpose, shelf)

    def try_acquire(self, purpose: str) -> Buffer | None:
        """A buffer if one is free now, else None. Raises as ``acquire`` does, except for waiting."""
        shelf = self._shelf(purpose)
        with self._changed:
            return self._hand_out(purpose, shelf) if shelf.free or self._region is None else None

    def when_free(self, purpose: str, call: Callable[[Buffer], None]) -> None:
        """``call(buffer)`` with the next buffer of ``purpose``: here and now if one is free, else on the thread that
        releases one. ``call`` neither blocks nor raises. Nobody is called any more once the pool is closed.

        Raises as ``acquire`` does, except for waiting.
        """
        shelf = self._shelf(purpose)
        with self._changed:
            if self._region is None:
                raise LohanError(f"cannot ask for a {purpose!r} buffer: the host pool is closed")
            shelf.asking.append(call)
        self._serve(purpose, shelf)

    def asking(self) -> tuple[int, int]:
        """How many wait in ``when_free``, and how many have been served: both as before where nothing has moved."""
        with self._changed:
            return sum(len(shelf.asking) for shelf in self._shelves.values()), self._served

    def in_use(self, purpose: str) -> int:
        """Buffers of ``purpose`` that are out now."""
        with self._changed:
            return self._shelf(purpose).in_use

    def peak_in_use(self, purpose: str) -> int:
        """The most buffers of ``purpose`` that were ever out at once."""
        with self._changed:
            return self._shelf(purpose).peak

    def unused_bytes(self) -> int:
        """Of the buffers that were never out, which are not in RAM yet; 0 where all are pinned."""
        if self._pinned:
            return 0
        with self._changed:
            return sum((shelf.count - shelf.peak) * shelf.bytes_each for shelf in self._shelves.values())

    def places(self) -> dict[str, tuple[int, int]]:
        """(address, bytes) of the buffers of each purpose; nothing once closed. They are in RAM as far as they were touched."""
        with self._changed:
            if self._region is None:
                return {}
            return {
                p: (self._address + s.offset_bytes, s.count * s.bytes_each) for p, s in self._shelves.items() if s.count
            }

    def close(self, *, force: bool = False) -> None:
        """Give the memory back; waiters in ``acquire`` get ``LohanError``. Idempotent.

        Raises ``LohanError`` and changes nothing if buffers are out, unless ``force``: then their tensors read zeros
        from here on.
        """
        with self._changed:
            if self._region is None:
                return
            out = {purpose: shelf.in_use for purpose, shelf in self._shelves.items() if shelf.in_use}
            if out and not force:
                raise LohanError(f"HostPool.close: buffers are still out: {out}; release them or pass force=True")
            region, self._region = self._region, None
            for shelf in self._shelves.values():
                shelf.memory.clear()
            self._changed.notify_all()
        if self._pinned:
            unpin(self._address)
        # Never region.close(): torch.frombuffer keeps the mmap object but no buffer export, so that would unmap
        # under live tensors. The pages go now, the addresses when the last reference (often ours) does.
        region.madvise(mmap.MADV_DONTNEED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # After an error buffers are likely out; refusing would hide what went wrong.
        self.close(force=error is not None)

    def _shelf(self, purpose: str) -> _Shelf:
        if purpose not in self._shelves:
            raise ValueError(f"no host memory is reserved for {purpose!r}; the purposes are {sorted(self._shelves)}")
        return self._shelves[purpose]

    def _hand_out(self, purpose: str, shelf: _Shelf) -> Buffer:
        if self._region is None:
            raise LohanError(f"cannot acquire a {purpose!r} buffer: the host pool is closed")
        index = shelf.free.pop()
        shelf.peak = max(shelf.peak, shelf.in_use)
        memory = shelf.memory.get(index)
        if memory is None:
            offset = self._begin + shelf.offset_bytes + index * shelf.bytes_each
            memory = shelf.memory[index] = _Memory(
                torch.frombuffer(self._region, dtype=torch.uint8, count=shelf.bytes_each, offset=offset)
            )
        return Buffer(self, purpose, index, memory)

    def _take_back(self, buffer: Buffer) -> None:
        with self._changed:
            if buffer._memory is None:
                raise LohanError(f"this {buffer.purpose!r} buffer was released before; release each buffer once")
            buffer._memory = None
            shelf = self._shelves[buffer.purpose]
            shelf.free.append(buffer._index)
            self._changed.notify_all()
        self._serve(buffer.purpose, shelf)

    def _serve(self, purpose: str, shelf: _Shelf) -> None:
        """Hand free buffers to those who ask. One thread at a time does, in a loop: whoever is called may release its
        buffer at once, and a chain of those would be a recursion."""
        with self._changed:
            if shelf.serving:
                return
            shelf.serving = True
        while True:
            with self._changed:
                if not shelf.asking or not shelf.free or self._region is None:
                    # Under the lock: who releases or asks after this finds nobody serving, and serves itself.
                    shelf.serving = False
                    return
                call, buffer = shelf.asking.popleft(), self._hand_out(purpose, shelf)
                self._served += 1
            call(buffer)


def _lay_out(reservations: Mapping[str, Reservation]) -> tuple[dict[str, _Shelf], int]:
    """The shelves, one after the other, and the bytes of all."""
    shelves: dict[str, _Shelf] = {}
    end_bytes = 0
    for purpose, reservation in reservations.items():
        count, bytes_each = reservation.count, page_padded_bytes(reservation.bytes_each)
        if count < 0 or reservation.bytes_each < 0 or (count > 0 and bytes_each == 0):
            raise ValueError(
                f"reservation for {purpose!r}: {count} buffers of {reservation.bytes_each} bytes; "
                "use a count of at least 0 and at least 1 byte each"
            )
        # Highest index first: pop() hands out index 0 first.
        shelves[purpose] = _Shelf(end_bytes, bytes_each, count, free=list(range(count))[::-1])
        end_bytes += count * bytes_each
    return shelves, end_bytes


def _map_region(nbytes: int) -> tuple[mmap.mmap, int]:
    """Private memory (DONTNEED does not free shared memory), and where in it the buffers begin."""
    try:
        return map_memory(nbytes)
    except OSError as error:
        raise LohanError(
            f"HostPool: the system refused to map {nbytes} bytes: {error.strerror}; "
            "lower the host memory budget or raise the process's limit (ulimit -v, vm.overcommit_memory)"
        ) from error
