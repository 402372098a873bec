"""process_memory: how much RAM this process has in use, as the kernel and the C library count it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/maps")
_SMAPS = Path("/proc/self/smaps")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
USUALLY_MAPPED_BYTES = 32 << 20
"""From so many bytes on a value has a mapping of its own whatever was freed before (glibc's ``DEFAULT_MMAP_THRESHOLD_MAX``)."""
_M_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of malloc.h."""
_LIBRARY_BYTES = 1 << 20
"""Of libraries with less code in RAM there is little to give back."""
_ARENA_BYTES = 64 << 20
"""glibc places the heap of every thread but the first at a multiple of this, and reserves so much for it."""


@dataclass(frozen=True)
class ProcessMemory:
    """``rss_bytes``: what is resident. ``used_bytes``: what the C library has handed out and not got back, touched or
    not; ``free_bytes``: what is resident in its heaps and handed out to nobody. Both 0 where it is not glibc."""

    rss_bytes: int
    used_bytes: int
    free_bytes: int


def rss_bytes() -> int:
    """Resident memory now."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """The most resident memory since the process began, or since ``forget_peak_rss``."""
    return _status_bytes("VmHWM")


def forget_peak_rss() -> bool:
    """Let the peak begin anew from here; False where the kernel cannot.

    This is of the whole process: what it had in use earlier is lost for ``getrusage`` and ``/usr/bin/time`` too.
    """
    try:
        _CLEAR_REFS.write_text(_FORGET_PEAK)
    except OSError:
        return False
    return True


def return_free_memory() -> None:
    """Give what the C library has free inside its heap back to the system, where that library is glibc.

    What was freed among what still lives counts as resident until then: an original model's parameters, for one.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def return_library_pages() -> None:
    """Let go of the code of libraries that is in RAM: what is run comes back, from the kernel's cache of files, page by page.

    Most of what imports and tracing have run is never run again, and counts as resident until somebody needs the memory; how much
    it is depends on how large the pieces are in which the kernel has the files (docs/0058). Code that somebody has changed
    in memory, as debuggers do, stays.
    """
    with contextlib.suppress(AttributeError, OSError):
        madvise = ctypes.CDLL(None).madvise
        for begin, end in _library_code(_SMAPS.read_text().splitlines()):
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def map_from(nbytes: int) -> None:
    """From now on each value of so many bytes or more that no hole of the heap has room for has a mapping of its own, where the C
    library is glibc.

    Such a value leaves no hole when it is freed; its pages are new each time, though, which takes processor time. This is of
    the whole process, and ends glibc's own rule, by which it depends on what was freed before.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, nbytes)


def now() -> ProcessMemory:
    """What the process has in use; takes about a millisecond per GiB of heap."""
    info = _mallinfo()
    if info is None:
        return ProcessMemory(rss_bytes(), 0, 0)
    heap_bytes = sum(resident_bytes(begin, end - begin) for begin, end in _heaps(_MAPS.read_text().splitlines()))
    return ProcessMemory(rss_bytes(), info.uordblks + info.hblkhd, max(0, heap_bytes - info.uordblks))


def resident_bytes(address: int, nbytes: int) -> int:
    """How much of the pages from ``address`` on is in RAM; 0 where they are not mapped (any more)."""
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    if not pages or ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found):
        return 0
    return bytes(found).count(1) * mmap.PAGESIZE


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h: ``uordblks`` are the bytes in use in heaps, ``hblkhd`` those in mappings."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def _mallinfo() -> _Mallinfo | None:
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    mallinfo2.restype = _Mallinfo
    found: _Mallinfo = mallinfo2()
    return found


def _heaps(maps: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(begin, end) of each heap among the lines of /proc/self/maps: the one that is named, and those of threads, which
    are what is writable of a stretch of ``_ARENA_BYTES`` at a multiple of it."""
    lines = [line.split(maxsplit=5) for line in maps]
    bounds = [tuple(int(bound, 16) for bound in line[0].split("-")) for line in lines]
    for place, (line, (begin, end)) in enumerate(zip(lines, bounds, strict=True)):
        if line[5:] == ["[heap]"]:
            yield begin, end
        elif line[1] == "rw-p" and len(line) == 5 and begin % _ARENA_BYTES == 0:
            rest = place + 1 < len(lines) and lines[place + 1][1] == "---p" and bounds[place + 1][0] == end
            if (bounds[place + 1][1] if rest else end) == begin + _ARENA_BYTES:
                yield begin, end


def _library_code(smaps: Sequence[str]) -> Iterator[tuple[int, int]]:
    """(begin, end) of what is executable of each file that is mapped, where it is as in the file and ``_LIBRARY_BYTES`` of it or
    more are in RAM, by the lines of /proc/self/smaps."""
    bounds, resident_kib, is_code = (0, 0), 0, False
    for line in smaps:
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            begin, _, end = words[0].partition("-")
            bounds, is_code = (int(begin, 16), int(end, 16)), words[1] == "r-xp" and words[-1].startswith("/")
        elif words[0] == "Rss:":
            resident_kib = int(words[1])
        elif words[0] == "Anonymous:" and is_code and words[1] == "0" and resident_kib << 10 >= _LIBRARY_BYTES:
            yield bounds


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {key} line: the memory of this process cannot be known on this system")
