"""huge_pages: memory that the kernel backs with pages of 2 MiB, as far as it has them.

A direct read or write pins its buffer page by page and names each stretch that is contiguous in physical memory to the
drive; requests are cut where there are too many of those. On 4 KiB pages that costs most of what a drive can do: reads
2.5 times as fast, writes twice, for a quarter of the processor time (docs/0026).
"""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = 4096
"""What O_DIRECT wants of addresses, offsets and sizes; also the size of a page where we run."""


def map_memory(nbytes: int, kind: type[mmap.mmap] = mmap.mmap) -> tuple[mmap.mmap, int]:
    """Private zeroed memory that no fork inherits, and the offset in it from which ``nbytes`` are to be used.

    Only what is touched becomes resident: whole huge pages inside the ``nbytes``, single pages at their end. Where the
    kernel has none left or is told ``never``, all are single pages. Raises ``OSError`` where the system refuses.
    """
    whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    spare = HUGE_PAGE_BYTES if whole else 0  # kernels before 6.7 place a mapping on any page
    region = kind(-1, max(nbytes, PAGE_BYTES) + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_DONTFORK)
    begin = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES if whole else 0
    if whole:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return region, begin
