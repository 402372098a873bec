"""landing: where the drives read a tensor straight into the memory that the graph computes with.

Where host and device share memory, a fetched parameter or a returning activation is not copied: the read goes into the
value itself. Its pages should be huge ones (``huge_pages``), which the heap has not; so values lie in one stretch of
them, of fixed size, and in the heap where that is full. A place is free again when the last view of its value died.

Any thread. Assumes: what is read into a place has arrived before its value dies (``ops.expect`` holds it).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections import deque

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


class Landing:
    """``nbytes`` of huge pages for values that are read in place; 0 for none. Resident as far as touched."""

    def __init__(self, nbytes: int) -> None:
        self._region: mmap.mmap | None
        self._region, self._begin = map_memory(nbytes) if nbytes else (None, 0)
        memory = None
        if self._region is not None:
            memory = torch.frombuffer(self._region, dtype=torch.uint8, count=nbytes, offset=self._begin)
        self._arena = HostArena(memory)
        self._address = 0 if memory is None else memory.data_ptr()
        self._nbytes = nbytes
        self._left: deque[Region] = deque()

    def on_pages(
        self, shape: torch.Size, dtype: torch.dtype, stride: tuple[int, ...] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A dense CPU tensor that begins on a page, and all its pages as uint8: what O_DIRECT reads into."""
        nbytes = page_padded_bytes(shape.numel() * dtype.itemsize)
        memory = self._place(nbytes)
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

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """A CPU tensor of the shape, strides and dtype of ``value``, which is dense; its storage holds nothing else."""
        memory = self._place(value.numel() * value.element_size())
        if memory is None:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        made = torch.frombuffer(memory, dtype=value.dtype, count=value.numel())
        return made.as_strided_(value.shape, value.stride())

    def _place(self, nbytes: int) -> ctypes.Array[ctypes.c_uint8] | None:
        """Memory of ``nbytes`` that nobody else has, or None; the death of what is made of it frees the place."""
        if nbytes < LEAST_BYTES:
            return None
        self._clear()
        region = self._arena.take(nbytes)
        if region is None:
            return None
        memory = (ctypes.c_uint8 * nbytes).from_address(self._address + region.offset)
        # Storages hold ``memory``, and nobody else does. The collector may run this anywhere, also on a thread that
        # holds the arena's lock; so it only takes a note.
        weakref.finalize(memory, self._left.append, region).atexit = False
        return memory

    def _clear(self) -> None:
        while self._left:
            self._arena.give_back(self._left.popleft())

    def place(self) -> tuple[int, int]:
        """(address, bytes) of the stretch, in RAM as far as it was touched; (0, 0) for none. Any thread."""
        return (self._address, self._nbytes) if self._region is not None else (0, 0)

    def return_free_memory(self) -> None:
        """Give the huge pages that no value lies in back to the system. By the thread that asks for places."""
        self._clear()
        for offset, nbytes in self._arena.holes() if self._region is not None else ():
            begin = -(-offset // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            end = (offset + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if end > begin and self._region is not None:
                self._region.madvise(mmap.MADV_DONTNEED, self._begin + begin, end - begin)

    def close(self) -> None:
        """Give the memory back, once the last value in it has died."""
        self._region = None
        self._arena = HostArena(None)
        self._left.clear()
