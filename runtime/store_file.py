"""One file of the NVMe store: every call does all of what it was asked for or raises ``StoreError``.

Guarantees: short counts are continued where they stopped and interrupted calls repeated; any other outcome names
the file, the offset, the bytes asked and what to do. The file is its owner's only (mode 0600), and direct
(O_DIRECT) where the file system can. ``read`` and ``write`` may run on many threads at once.
A call that comes after ``close`` fails, whoever has the number of its descriptor by then.
Assumes: the directory is locked by the caller, who also orders ``grow``, ``cut_back`` and ``close`` against the rest.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lohan_fx.errors import StoreError
from lohan_fx.runtime.file_backend import FileBackend, forget_descriptor, keep_from_children
from lohan_fx.runtime.host_pool import PAGE_BYTES

STORE_NAME = "lohan_fx.store"
CLOSED = -1

_REMEDIES = {
    errno.EIO: "the drive reported a failure: see dmesg and smartctl, and move the store to another drive",
    errno.ENOSPC: "free disk space there or add another directory",
    errno.EDQUOT: "raise the disk quota or use another directory",
    errno.EOPNOTSUPP: "use a file system that can preallocate, such as ext4 or xfs",
}
_LOG = logging.getLogger(__name__)


@contextmanager
def reported_as_store_error(what: str) -> Iterator[None]:
    """Turn an ``OSError`` inside into a ``StoreError`` that says what was asked, the errno, and what to do."""
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        remedy = _REMEDIES.get(code, "check that drive and its file system, or use another directory")
        raise StoreError(f"{what} failed: {os.strerror(code)} (errno {code}); {remedy}") from error


class StoreFile:
    """The store's file in ``directory``, created empty; one that a killed run left there is removed first.

    With ``resumed_bytes`` the one that is there is opened, and cut to that size: what follows was scratch.
    """

    def __init__(self, directory: Path, backend: FileBackend, resumed_bytes: int | None = None) -> None:
        self.path = directory / STORE_NAME
        self.nbytes = 0
        self._backend = backend
        self._fd: int
        if resumed_bytes is not None:
            self._reopen(resumed_bytes)
            keep_from_children(self._fd)
            return
        with reported_as_store_error(f"creating {self.path}"):
            if self.path.exists():
                _LOG.warning("removing %s (%d bytes), left by an earlier run", self.path, self.path.stat().st_size)
            self._fd, self.direct = self._open()
        keep_from_children(self._fd)

    def grow(self, nbytes: int) -> None:
        """Preallocate up to a size of ``nbytes``; the new bytes read as zeros."""
        added = nbytes - self.nbytes
        if added > 0:
            with reported_as_store_error(f"preallocating {added} bytes in {self.path}"):
                self._backend.fallocate(self._fd, self.nbytes, added)
        self.nbytes = nbytes

    def cut_back(self, nbytes: int) -> None:
        """Undo ``grow``, also one that failed half-way; never raises, as a failure is on its way to the caller."""
        self.nbytes = nbytes
        with suppress(OSError):
            self._backend.truncate(self._fd, nbytes)

    def read(self, view: memoryview, offset: int, what: str) -> None:
        """Fill ``view``, whole pages, from ``offset``; ``what`` opens the message of an error."""
        self._transfer(self._backend.preadv, view, offset, what)

    def write(self, view: memoryview, offset: int, what: str) -> None:
        """Write all of ``view``, whole pages, at ``offset``; ``what`` opens the message of an error."""
        self._transfer(self._backend.pwritev, view, offset, what)

    def flush(self) -> None:
        """Return when everything written is on the drive."""
        with reported_as_store_error(f"flushing {self.path}"):
            self._backend.fdatasync(self._fd)

    def forget(self) -> None:
        """After ``flush``: have the next read ask the drive, also where the page cache is used."""
        if not self.direct:
            with reported_as_store_error(f"dropping what is in memory of {self.path}"):
                self._backend.forget(self._fd)

    def close(self, *, remove: bool) -> None:
        """Close the descriptor and, if asked, remove the file."""
        # A call that hung, and was left behind (in_time), must not go on in what the next store opens.
        fd, self._fd = self._fd, CLOSED
        with reported_as_store_error(f"closing {self.path}"):
            try:
                if remove:
                    self.path.unlink(missing_ok=True)
            finally:  # also where the file system has become read-only
                forget_descriptor(fd)
                self._backend.close(fd)

    def _open(self) -> tuple[int, bool]:
        self.path.unlink(missing_ok=True)
        try:
            return self._backend.open(self.path, direct=True), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.path.unlink(missing_ok=True)  # a refused O_DIRECT may have created it all the same
        return self._backend.open(self.path, direct=False), False

    def _reopen(self, nbytes: int) -> None:
        with reported_as_store_error(f"opening {self.path}"):
            try:
                self._fd, self.direct = self._backend.open_existing(self.path, direct=True), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._fd, self.direct = self._backend.open_existing(self.path, direct=False), False
        try:
            status = os.fstat(self._fd)
            ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
            if not ours or status.st_size < nbytes:
                raise StoreError(
                    f"{self.path} has {status.st_size} bytes, owner {status.st_uid} and mode "
                    f"{stat.S_IMODE(status.st_mode):04o}; the checkpoint needs {nbytes} bytes in a file of this user "
                    "alone: it was left as it is"
                )
            with reported_as_store_error(f"cutting {self.path} to {nbytes} bytes"):
                self._backend.truncate(self._fd, nbytes)
        except BaseException:
            self._backend.close(self._fd)
            raise
        self.nbytes = nbytes

    def _transfer(self, call: Callable[[int, memoryview, int], int], view: memoryview, offset: int, what: str) -> None:
        moved = 0
        while moved < len(view):
            asked = len(view) - moved
            where = f"{what}: {asked} bytes at {offset + moved} in {self.path}"
            with reported_as_store_error(where):
                try:
                    count = call(self._fd, view[moved:], offset + moved)
                except InterruptedError:
                    continue
            if count <= 0:
                raise StoreError(f"{where}: nothing was moved; did another program cut the file?")
            if self.direct and count % PAGE_BYTES:
                # The rest is not at an aligned place, so O_DIRECT could not continue.
                raise StoreError(f"{where}: only {count} moved, not whole pages; see dmesg for that drive")
            moved += count
