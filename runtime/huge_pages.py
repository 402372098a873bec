"""huge_pages: memory that the kernel backs with pages of 2 MiB, as far as it has them.

A direct read or write pins its buffer page by page and names each stretch that is contiguous in physical memory to the
drive; requests are cut where there are too many of those. On 4 KiB pages that costs most of what a drive can do: reads
2.5 times as fast, writes twice, for a quarter of the processor time (docs/0026).
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = 4096
"""What O_DIRECT wants of addresses, offsets and sizes; also the size of a page where we run."""
_WIPE_ON_FORK = 18
"""Linux's MADV_WIPEONFORK, which ``mmap`` does not name."""


def map_memory(nbytes: int, kind: type[mmap.mmap] = mmap.mmap) -> tuple[mmap.mmap, int]:
    """Private zeroed memory, and the offset in it from which ``nbytes`` are to be used. A forked child has zeros there.

    Only what is touched becomes resident: whole huge pages inside the ``nbytes``, single pages at their end. Where the
    kernel has none left or is told ``never``, all are single pages. Raises ``OSError`` where the system refuses.
    """
    whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    spare = HUGE_PAGE_BYTES if whole else 0  # kernels before 6.7 place a mapping on any page
    region = kind(-1, max(nbytes, PAGE_BYTES) + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _keep_from_forks(region)
    begin = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES if whole else 0
    if whole:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return region, begin


def scratch(nbytes: int) -> memoryview:
    """Page-aligned memory; it goes with the last view of it."""
    pages, begin = map_memory(nbytes)
    return memoryview(pages)[begin : begin + nbytes]


class ThreadScratch:
    """Page-aligned memory for what one call at a time of each thread needs it for. Mapping it anew would cost more than what a
    drive takes to fill it."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def take(self, nbytes: int) -> memoryview:
        """Memory that this thread may use until it asks again."""
        found: memoryview | None = getattr(self._of_thread, "memory", None)
        if found is None or len(found) < nbytes:
            found = self._of_thread.memory = scratch(nbytes)
        return found[:nbytes]


def _keep_from_forks(region: mmap.mmap) -> None:
    """Let no forked child share the pages of ``region``: what a direct read brings meanwhile could be left in the child's. Its
    addresses it must have, or it maps something else there, which goes when its copy of ``region`` is collected."""
    try:
        region.madvise(_WIPE_ON_FORK)
    except OSError:
        # A kernel before 4.14, or a sandbox: data that is safe in the parent comes before addresses in the child.
        region.madvise(mmap.MADV_DONTFORK)
