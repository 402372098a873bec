"""Memory in huge pages: what a forked child has of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from lohan_fx.runtime.huge_pages import HUGE_PAGE_BYTES, PAGE_BYTES, ThreadScratch, map_memory, scratch

NBYTES = 2 * HUGE_PAGE_BYTES


def test_a_forked_child_finds_zeros_and_writes_to_memory_of_its_own() -> None:
    region, begin = map_memory(NBYTES)
    region[begin] = region[begin + NBYTES - 1] = 7
    child = os.fork()
    if child == 0:
        found = region[begin], region[begin + NBYTES - 1]
        region[begin] = 8
        os._exit(0 if found == (0, 0) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (region[begin], region[begin + NBYTES - 1]) == (7, 7)


def test_what_a_forked_child_maps_stays_when_its_copy_of_the_region_goes() -> None:
    """As when the collector finds, in a data loader's worker, what the parent's model has left."""
    region, _ = map_memory(NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    system = ctypes.CDLL(None)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    child = os.fork()
    if child == 0:
        # There, if nothing else is: only a wish, without MAP_FIXED.
        mapped = system.mmap(address, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1 % 2**64, 0)
        region.close()
        ctypes.memset(mapped, 7, NBYTES)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class _Refusing(mmap.mmap):
    """As a kernel before 4.14."""

    def madvise(self, option: int, *where: int) -> None:
        if option == 18:
            raise OSError(errno.EINVAL, "Invalid argument")
        self.__dict__.setdefault("heard", []).append(option)


def test_a_kernel_that_cannot_give_children_zeros_gives_them_nothing() -> None:
    region, _ = map_memory(PAGE_BYTES, _Refusing)
    assert vars(region) == {"heard": [mmap.MADV_DONTFORK]}


def address_of(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def test_scratch_lies_on_pages() -> None:
    for nbytes in (PAGE_BYTES, 3 * PAGE_BYTES, NBYTES + PAGE_BYTES):
        memory = scratch(nbytes)
        assert len(memory) == nbytes and address_of(memory) % PAGE_BYTES == 0


def test_a_thread_has_its_scratch_for_itself_and_again() -> None:
    memory = ThreadScratch()
    mine = memory.take(2 * PAGE_BYTES)
    assert address_of(memory.take(PAGE_BYTES)) == address_of(mine) and len(memory.take(PAGE_BYTES)) == PAGE_BYTES
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: address_of(memory.take(PAGE_BYTES))).result() != address_of(mine)
    assert len(memory.take(NBYTES)) == NBYTES
