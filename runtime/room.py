"""room: host memory for values that live until nobody views them any more, in one stretch of huge pages.

Where host and device share memory, a fetched parameter or a returning activation is not copied: the read goes into the
value itself. And what a graph makes and leaves behind is written where it stays. The heap would hand the same pages out and
take them back, a fault each time; its pages are small ones, and its holes cannot be foreseen.

Guarantees: a place is free again when the last view of its value died; where nothing is free, the heap takes the value.
Resident as far as touched, and where most was touched is taken first. Any thread. Assumes: what is read into a place has arrived
before its value dies (``ops.expect`` holds it).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lohan_fx.runtime.host_arena import HostArena, Region
from lohan_fx.runtime.host_pool import page_padded_bytes
from lohan_fx.runtime.huge_pages import HUGE_PAGE_BYTES, PAGE_BYTES, map_memory

LEAST_BYTES = 64 << 10
"""Values of fewer bytes are a page or a few: what huge pages save there is less than finding a place costs."""


@functools.lru_cache(maxsize=4096)
def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor, which it takes a call of torch to tell."""
    return torch.empty(shape, device="meta").stride()


@dataclass
class _Coming:
    """Of a value that is being read: ``nbytes`` are not there yet, for which the system will have to make so many new pages."""

    nbytes: int
    untouched_bytes: int

    def arrived(self, nbytes: int) -> bool:
        """Whether with ``nbytes`` more all is there."""
        nbytes = min(nbytes, self.nbytes)
        self.untouched_bytes -= self.untouched_bytes * nbytes // self.nbytes
        self.nbytes -= nbytes
        return not self.nbytes


class Room:
    """Places for values; for none until some are foreseen (``reserve``)."""

    SPARE = 1 / 8
    """More than lives in it at once: places are whole pages, and what is free lies between what is not."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._foreseen_bytes = self._nbytes = 0
        self._region: mmap.mmap | None = None
        self._begin = self._address = self._values = 0
        self._arena = HostArena(None)
        self._touched = bytearray()  # by huge page, 1 where a value has lain since the system had it last
        self._left: deque[Region] = deque()
        self._coming: dict[int, _Coming] = {}  # by the address of what is read into

    def reserve(self, nbytes: int) -> None:
        """``nbytes`` of values will live in it at once, or what was said before if that is more. Counts from the next value
        on that is made while none lives: the stretch does not move under them."""
        self._foreseen_bytes = max(self._foreseen_bytes, nbytes + int(self.SPARE * nbytes))

    def on_pages(
        self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A dense CPU tensor that begins on a page, and all its pages as uint8: what O_DIRECT reads into."""
        nbytes = page_padded_bytes(shape.numel() * dtype.itemsize)
        memory = self._place(nbytes, comes=True)
        if memory is not None:
            # Each call of torch lets other threads have the interpreter, and waits to get it back; ``frombuffer`` does not.
            value = torch.frombuffer(memory, dtype=dtype, count=shape.numel())
            return value.as_strided_(shape, stride or _contiguous(shape)), torch.frombuffer(memory, dtype=torch.uint8)
        raw = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8)
        begin = -raw.data_ptr() % PAGE_BYTES
        value = torch.empty(0, dtype=dtype)
        # Not a view, which would keep a second tensor and its version counter beside the parameter's.
        value.set_(raw.untyped_storage(), begin // dtype.itemsize, shape, stride or _contiguous(shape))
        return value, raw[begin : begin + nbytes]

    def dense(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor that fills a stretch of memory; its storage holds nothing else."""
        elements = shape.numel()
        memory = self._place(elements * dtype.itemsize)
        if memory is None:
            return torch.empty_strided(shape, stride, dtype=dtype)
        return torch.frombuffer(memory, dtype=dtype, count=elements).as_strided_(shape, stride)

    def _place(self, nbytes: int, *, comes: bool = False) -> ctypes.Array[ctypes.c_uint8] | None:
        """Memory of ``nbytes`` that nobody else has, or None; the death of what is made of it frees the place. ``comes``: it is
        read from somewhere, which ``arrived`` is told."""
        if nbytes < LEAST_BYTES:
            return None
        with self._lock:
            self._clear()
            if self._foreseen_bytes > self._nbytes and not self._values:
                self._map()
            region = self._arena.take(nbytes, self._touched_bytes)
            if region is None:
                return None
            self._values += 1
            begin, end = region.offset // HUGE_PAGE_BYTES, -(-(region.offset + nbytes) // HUGE_PAGE_BYTES)
            if comes:
                untouched_bytes = self._touched[begin:end].count(0) * HUGE_PAGE_BYTES
                self._coming[self._address + region.offset] = _Coming(nbytes, untouched_bytes)
            self._mark(begin, end, touched=True)
            memory = (ctypes.c_uint8 * nbytes).from_address(self._address + region.offset)
            # Storages hold ``memory``, and nobody else does. The collector may run this anywhere, also on a thread that
            # holds a lock; so it only takes a note.
            weakref.finalize(memory, self._left.append, region).atexit = False
            return memory

    def _map(self) -> None:
        self._nbytes = self._foreseen_bytes
        self._region, self._begin = map_memory(self._nbytes)
        memory = torch.frombuffer(self._region, dtype=torch.uint8, count=self._nbytes, offset=self._begin)
        self._arena, self._address = HostArena(memory), memory.data_ptr()
        self._touched = bytearray(-(-self._nbytes // HUGE_PAGE_BYTES))

    def _mark(self, begin: int, end: int, *, touched: bool) -> None:
        """From page to page."""
        self._touched[begin:end] = bytes([touched]) * (end - begin)

    def _clear(self) -> None:
        while self._left:
            region = self._left.popleft()
            self._coming.pop(self._address + region.offset, None)  # it has failed
            self._arena.give_back(region)
            self._values -= 1

    def arrived(self, address: int, nbytes: int) -> None:
        """``nbytes`` more have come, or never will, of the value at ``address``, which ``on_pages`` has made."""
        with self._lock:
            coming = self._coming.get(address)
            if coming is not None and coming.arrived(nbytes):
                del self._coming[address]

    def coming_bytes(self) -> int:
        """By how much the process will grow as what is being read arrives: pages that the system has to make for it."""
        with self._lock:
            return sum(coming.untouched_bytes for coming in self._coming.values())

    def place(self) -> tuple[int, int]:
        """(address, bytes) of the stretch, in RAM as far as it was touched; (0, 0) for none."""
        with self._lock:
            return (self._address, self._nbytes) if self._region is not None else (0, 0)

    def growth_bytes(self, nbytes: int) -> int:
        """By how much the process grows as ``nbytes`` of values come to lie in it, if they lie together: by what the longest
        stretch in RAM lacks of those with room for them; where none has, by what the longest one lacks, which the room has
        elsewhere, or the heap."""
        with self._lock:
            self._clear()
            holes = self._arena.holes()
            roomy = [hole for hole in holes if hole[1] >= nbytes] or holes
            return max(0, nbytes - max((self._touched_bytes(*hole) for hole in roomy), default=0))

    def _touched_bytes(self, offset: int, nbytes: int) -> int:
        """Of a hole, in one stretch from its beginning."""
        begin, end = offset // HUGE_PAGE_BYTES, -(-(offset + nbytes) // HUGE_PAGE_BYTES)
        first = self._touched.find(0, begin, end)
        return nbytes if first < 0 else max(0, first * HUGE_PAGE_BYTES - offset)

    def free_bytes(self) -> int:
        """How much ``return_free_memory`` gives back."""
        with self._lock:
            self._clear()
            return sum(self._touched[begin:end].count(1) for begin, end in self._free_pages()) * HUGE_PAGE_BYTES

    def return_free_memory(self) -> None:
        """Give the huge pages that no value lies in back to the system."""
        with self._lock:
            self._clear()
            if self._region is None:
                return
            for begin, end in self._free_pages():
                first, nbytes = self._begin + begin * HUGE_PAGE_BYTES, (end - begin) * HUGE_PAGE_BYTES
                self._region.madvise(mmap.MADV_DONTNEED, first, nbytes)
                self._mark(begin, end, touched=False)

    def _free_pages(self) -> Iterator[tuple[int, int]]:
        """(first, end) of the huge pages that lie in holes as a whole."""
        for offset, nbytes in self._arena.holes():
            begin, end = -(-offset // HUGE_PAGE_BYTES), (offset + nbytes) // HUGE_PAGE_BYTES
            if end > begin:
                yield begin, end

    def close(self) -> None:
        """Give the memory back, once the last value in it has died. What is made from now on is the heap's."""
        with self._lock:
            self._foreseen_bytes = self._nbytes = self._values = 0
            self._region, self._touched = None, bytearray()
            self._arena = HostArena(None)
            self._coming = {}
            self._left = deque()  # what still lives takes its note elsewhere
