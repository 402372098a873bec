"""process_memory: how much RAM this process has in use, as the kernel counts it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"


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


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{_STATUS} has no {key} line: the memory of this process cannot be known on this system")
