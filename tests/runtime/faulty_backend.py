"""A file backend that fails on demand: real files underneath, scripted faults on top."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan_fx.runtime.file_backend import PosixBackend


@dataclass(frozen=True)
class Short:
    """Only this many bytes are moved; of fallocate, the rest then fails with ENOSPC."""

    nbytes: int


@dataclass(frozen=True)
class Claim:
    """Nothing is moved and this count returned."""

    nbytes: int


Fault = int | Short | Claim | None


class FaultyBackend(PosixBackend):
    """``faults[call]`` lists what the next calls of that name do, first one first; after them all is well.

    An errno is raised as ``OSError``. ``Short(n)`` moves only ``n`` bytes, ``Claim(n)`` moves none and reports ``n``,
    None lets one call pass. ``direct`` overrides what the file system can: True pretends O_DIRECT, False refuses it.
    """

    def __init__(
        self,
        faults: Mapping[str, Sequence[Fault]] | None = None,
        *,
        direct: bool | None = None,
        free_bytes: dict[Path, int] | None = None,
    ) -> None:
        self.faults = {call: list(script) for call, script in (faults or {}).items()}
        self.calls: list[str] = []
        self._direct = direct
        self._free_bytes = free_bytes or {}
        self._lock = threading.Lock()

    def open(self, path: Path, *, direct: bool) -> int:
        self._next("open")
        if direct and self._direct is False:
            os.close(super().open(path, direct=False))  # as Linux does: the file is there although open fails
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, direct=direct and self._direct is None)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        fault = self._next("preadv")
        if isinstance(fault, Claim):
            return fault.nbytes
        return super().preadv(fd, view[: fault.nbytes] if fault else view, offset)

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        fault = self._next("pwritev")
        if isinstance(fault, Claim):
            return fault.nbytes
        return super().pwritev(fd, view[: fault.nbytes] if fault else view, offset)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        fault = self._next("fallocate")
        if fault:
            super().fallocate(fd, offset, fault.nbytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().fallocate(fd, offset, nbytes)

    def fdatasync(self, fd: int) -> None:
        self._next("fdatasync")
        super().fdatasync(fd)

    def free_bytes(self, directory: Path) -> int:
        self._next("free_bytes")
        return self._free_bytes.get(directory, super().free_bytes(directory))

    def _next(self, call: str) -> Short | Claim | None:
        with self._lock:
            self.calls.append(call)
            script = self.faults.get(call)
            fault = script.pop(0) if script else None
        if isinstance(fault, int):
            raise OSError(fault, os.strerror(fault))
        return fault
