"""workspace: one stretch of host memory for what graphs make and use up themselves. What outlives them has ``room``.

Guarantees: one graph has it at a time; another one that runs meanwhile is told so, and takes its memory elsewhere. It has
the size that was asked for last, and does not move while a graph has it. All of it is resident from the first use on, so
that it does not grow within a step. Any thread.

Assumes: what lies in it is not read after the graph has ended.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator

import torch

from lohan_fx.runtime.huge_pages import map_memory


class Workspace:
    """The memory that the graphs of one compiled model share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._region: mmap.mmap | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)

    @contextlib.contextmanager
    def borrowed(self, nbytes: int) -> Iterator[torch.Tensor | None]:
        """``nbytes``, uint8, of any content; None where a graph has them that has not ended."""
        if not self._lock.acquire(blocking=False):
            yield None
            return
        try:
            if self._memory.numel() != nbytes:
                self._resize(nbytes)
            yield self._memory
        finally:
            self._lock.release()

    def give_back(self) -> None:
        """Hand the memory back to the system until somebody borrows it; nothing where a graph has it."""
        if self._lock.acquire(blocking=False):
            try:
                self._drop()
            finally:
                self._lock.release()

    def place(self) -> tuple[int, int]:
        """(address, bytes); (0, 0) for none."""
        memory = self._memory
        return (memory.data_ptr(), memory.numel()) if memory.numel() else (0, 0)

    def _drop(self) -> None:
        if self._region is not None:
            # Graphs that were bound to it still view it, but do not run there any more.
            self._region.madvise(mmap.MADV_DONTNEED)
        self._region, self._memory = None, torch.empty(0, dtype=torch.uint8)

    def _resize(self, nbytes: int) -> None:
        self._drop()
        if not nbytes:
            return
        region, begin = map_memory(nbytes)
        with torch.inference_mode(False):
            memory = torch.frombuffer(region, dtype=torch.uint8, count=nbytes, offset=begin)
            memory.zero_()
        self._region, self._memory = region, memory
