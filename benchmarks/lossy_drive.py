"""lossy_drive: a drive that loses what was not synced, at the moment of a chosen call: a power loss without the power.

A file backend on real files. Up to the chosen call all is as usual. Then each page written since its file's last
``fdatasync`` gets any of the contents that it had since then, so writes are dropped and reordered; names made, changed
or removed since their directory's last sync are, each by chance, as they were before.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lohan_fx.runtime.file_backend import PosixBackend

PAGE_BYTES = 4096


def kill_this_process() -> None:
    """As ``kill -9`` would, from within: at a moment that is known to the call."""
    os.kill(os.getpid(), signal.SIGKILL)


class LossyDrive(PosixBackend):
    """``die_at``: the number of the call (of those that change something) at which ``on_death`` is called.

    ``loses``: whether what was not synced is lost then; False is a killed process, of which nothing is.
    """

    def __init__(
        self,
        die_at: int | None = None,
        *,
        seed: int = 0,
        loses: bool = True,
        on_death: Callable[[], None] = kill_this_process,
    ) -> None:
        self.calls: list[str] = []
        self._die_at = die_at
        self._random = random.Random(seed)
        self._loses = loses
        self._on_death = on_death
        # Held during each call, so that nothing is under way at the moment of death.
        self._lock = threading.RLock()
        self._paths: dict[int, Path] = {}
        self._pages: defaultdict[Path, dict[int, list[bytes]]] = defaultdict(dict)
        self._names: list[tuple[Path, Callable[[], None]]] = []

    def die_in(self, calls: int) -> None:
        """Die at the call number ``calls`` from now on."""
        with self._lock:
            self._die_at = len(self.calls) + calls

    def open(self, path: Path, *, direct: bool) -> int:
        with self._lock:
            self._next("open")
            fd = super().open(path, direct=direct)
            self._paths[fd] = path
            self._names.append((path.parent, lambda: path.unlink(missing_ok=True)))
            return fd

    def open_existing(self, path: Path, *, direct: bool) -> int:
        fd = super().open_existing(path, direct=direct)
        self._paths[fd] = path
        return fd

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        # Not while what is lost is being undone: the process would see it, and end by an error before it dies.
        with self._lock:
            return super().preadv(fd, view, offset)

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        with self._lock:
            if self._loses:
                self._remember(self._paths[fd], offset, len(view))
            self._next("pwritev", lambda: super(LossyDrive, self).pwritev(fd, view, offset))
            count = super().pwritev(fd, view, offset)
            if self._loses:
                self._remember(self._paths[fd], offset, len(view))
            return count

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            self._next("fdatasync")
            super().fdatasync(fd)
            self._pages.pop(self._paths[fd], None)

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            self._next("rename", lambda: super(LossyDrive, self).rename(source, target))
            before = target.read_bytes() if target.exists() else None
            super().rename(source, target)
            self._names.append((target.parent, lambda: _rename_back(source, target, before)))

    def remove(self, path: Path) -> None:
        with self._lock:
            self._next("remove")
            before = path.read_bytes()
            super().remove(path)
            self._names.append((path.parent, lambda: _make(path, before)))

    def sync_directory(self, directory: Path) -> None:
        with self._lock:
            self._next("sync_directory")
            super().sync_directory(directory)
            self._names = [entry for entry in self._names if entry[0] != directory]

    def _remember(self, path: Path, offset: int, nbytes: int) -> None:
        pages = self._pages[path]
        with path.open("rb", buffering=0) as file:
            for page in range(offset // PAGE_BYTES, -(-(offset + nbytes) // PAGE_BYTES)):
                pages.setdefault(page, []).append(os.pread(file.fileno(), PAGE_BYTES, page * PAGE_BYTES))

    def _next(self, call: str, perform: Callable[[], object] | None = None) -> None:
        """Count the call; at the chosen one die, before it or (by chance) after it was done."""
        self.calls.append(call)
        if self._die_at is None or len(self.calls) < self._die_at:
            return
        if perform is not None and len(self.calls) == self._die_at and self._random.random() < 0.5:
            perform()
        if self._loses and len(self.calls) == self._die_at:
            self._lose()
        self._on_death()

    def _lose(self) -> None:
        for _, undo in reversed(self._names):
            if self._random.random() < 0.5:
                with suppress(FileNotFoundError):
                    undo()
        for path, pages in self._pages.items():
            if not path.exists():
                continue
            with path.open("r+b", buffering=0) as file:
                for page, contents in pages.items():
                    found = self._random.choice(contents)
                    os.pwrite(file.fileno(), found.ljust(PAGE_BYTES, b"\0"), page * PAGE_BYTES)


def _rename_back(source: Path, target: Path, before: bytes | None) -> None:
    target.rename(source)
    if before is not None:
        _make(target, before)


def _make(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)
    path.chmod(0o600)
