"""faulty_drive: a drive that does one thing wrong, once, at a chosen call; the same call and fault every time.

A file backend on real files: short reads and writes, EIO, ENOSPC, EINTR, a slow call, one that never returns, and a
bit flipped in what is read or on its way to the drive.
"""

from __future__ import annotations

import enum
import errno
import os
import random
import threading
import time
from pathlib import Path

from lohan_fx.runtime.file_backend import PosixBackend


class Fault(enum.Enum):
    """What goes wrong."""

    SHORT = "short"
    SHORT_ODD = "short by an odd count"
    EIO = "EIO"
    ENOSPC = "ENOSPC"
    EINTR = "EINTR"
    SLOW = "slow"
    STUCK = "stuck"
    BIT_FLIP = "bit flip"


ERRORS = {Fault.EIO: errno.EIO, Fault.ENOSPC: errno.ENOSPC, Fault.EINTR: errno.EINTR}
TRANSFERS = (Fault.SHORT, Fault.SHORT_ODD, Fault.EINTR, Fault.BIT_FLIP)
CALLS = {
    "preadv": (*TRANSFERS, Fault.EIO, Fault.SLOW, Fault.STUCK),
    "pwritev": (*TRANSFERS, Fault.EIO, Fault.ENOSPC, Fault.SLOW, Fault.STUCK),
    "fdatasync": (Fault.EIO, Fault.ENOSPC, Fault.SLOW, Fault.STUCK),
    "fallocate": (Fault.ENOSPC, Fault.EIO),
    "rename": (Fault.EIO, Fault.ENOSPC),
    "sync_directory": (Fault.EIO,),
    "remove": (Fault.EIO,),
    "open": (Fault.EIO, Fault.ENOSPC),
}
SLOW_S = 0.3


class FaultyDrive(PosixBackend):
    """At the ``at``-th ``call``, ``fault`` happens. ``counts`` are the calls so far; ``struck`` whether it happened."""

    def __init__(self, call: str = "", at: int = 0, fault: Fault | None = None, *, seed: int = 0) -> None:
        self.counts: dict[str, int] = dict.fromkeys(CALLS, 0)
        self.struck = False
        self._chosen = call, at
        self._fault = fault
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self._fault.value if self._fault else 'no fault'} at {self._chosen[0]} number {self._chosen[1]}"

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        fault = self._next("preadv")
        count = super().preadv(fd, self._cut(view, fault), offset)
        if fault is Fault.BIT_FLIP:
            view[self._random.randrange(count)] ^= 1 << self._random.randrange(8)
        return count

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        fault = self._next("pwritev")
        count = super().pwritev(fd, self._cut(view, fault), offset)
        if fault is Fault.BIT_FLIP:
            self._flip_on_disk(fd, offset + self._random.randrange(count))
        return count

    def fdatasync(self, fd: int) -> None:
        self._next("fdatasync")
        super().fdatasync(fd)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._next("fallocate")
        super().fallocate(fd, offset, nbytes)

    def rename(self, source: Path, target: Path) -> None:
        self._next("rename")
        super().rename(source, target)

    def sync_directory(self, directory: Path) -> None:
        self._next("sync_directory")
        super().sync_directory(directory)

    def remove(self, path: Path) -> None:
        self._next("remove")
        super().remove(path)

    def open(self, path: Path, *, direct: bool) -> int:
        self._next("open")
        return super().open(path, direct=direct)

    def _cut(self, view: memoryview, fault: Fault | None) -> memoryview:
        if fault is Fault.SHORT and len(view) > 4096:
            return view[: len(view) // 2 // 4096 * 4096 or 4096]
        # A direct call cannot be asked for an odd count; a drive may move less than it was asked for all the same.
        return view[:512] if fault is Fault.SHORT_ODD else view

    def _flip_on_disk(self, fd: int, place: int) -> None:
        with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
            byte = os.pread(file.fileno(), 1, place)[0]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << self._random.randrange(8)]), place)

    def _next(self, call: str) -> Fault | None:
        with self._lock:
            self.counts[call] += 1
            if (call, self.counts[call]) != self._chosen:
                return None
            self.struck = True
        fault = self._fault
        if fault in ERRORS:
            raise OSError(ERRORS[fault], os.strerror(ERRORS[fault]))
        if fault is Fault.SLOW:
            time.sleep(SLOW_S)
        if fault is Fault.STUCK:
            threading.Event().wait()
        return fault
