"""The operating-system calls of the NVMe store: files, the lock on a directory, the mount table.

``FileBackend`` is where tests inject faults; ``PosixBackend`` is the real one. Neither retries nor interprets: a
short count is returned and an ``OSError`` raised as the system gave it, and the store decides.

Guarantees: two holders of ``lock_directory`` never coexist on one directory, in one process or several, also when
lock files are removed meanwhile; a killed holder's lock is free, and so is the disk space of what it had removed, also
while children that it has forked live on. ``preadv`` and ``pwritev`` release the GIL.
Assumes: Linux, and a file system whose ``flock`` holds across processes.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from lohan_fx.errors import StoreError

LOCK_NAME = "lohan_fx.lock"
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})
MOUNTS = "/proc/mounts"

_not_for_children: set[int] = set()


class FileBackend(Protocol):
    """What the store asks of the operating system; every method may raise ``OSError``."""

    def open(self, path: Path, *, direct: bool) -> int:
        """Create ``path`` (which must not exist) for its owner only and return a descriptor to read and write."""

    def open_existing(self, path: Path, *, direct: bool) -> int:
        """Open the file ``path``, which must not be a link, to read and write."""

    def rename(self, source: Path, target: Path) -> None:
        """Give ``source`` the name ``target``, at once and in place of what had it."""

    def remove(self, path: Path) -> None:
        """Remove the file."""

    def sync_directory(self, directory: Path) -> None:
        """Return when the names in ``directory`` are on the drive."""

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        """Read into ``view`` from ``offset``; returns the bytes read, maybe fewer than asked."""

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        """Write ``view`` at ``offset``; returns the bytes written, maybe fewer than asked."""

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the file disk space for these bytes, which read as zeros until written."""

    def truncate(self, fd: int, nbytes: int) -> None:
        """Cut the file to ``nbytes``."""

    def fdatasync(self, fd: int) -> None:
        """Return when everything written is on the drive."""

    def forget(self, fd: int) -> None:
        """Drop what the system holds in memory of the file, which is on the drive: the next read asks the drive."""

    def close(self, fd: int) -> None:
        """Close the descriptor."""

    def free_bytes(self, directory: Path) -> int:
        """Disk space this process may still take in ``directory``."""


class PosixBackend:
    """``FileBackend`` on real files."""

    def open(self, path: Path, *, direct: bool) -> int:
        # O_EXCL also refuses a symbolic link, so nothing outside the directory is ever opened.
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        return os.open(path, flags, 0o600)

    def open_existing(self, path: Path, *, direct: bool) -> int:
        # O_NONBLOCK: a pipe of that name must not block us before it is seen to be none of our files.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        return os.open(path, flags)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def sync_directory(self, directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwritev(fd, [view], offset)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        os.posix_fallocate(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def forget(self, fd: int) -> None:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        os.close(fd)

    def free_bytes(self, directory: Path) -> int:
        status = os.statvfs(directory)
        return status.f_bavail * status.f_frsize


def keep_from_children(fd: int) -> int:
    """From now on forked children do not have ``fd``, which is returned: theirs would keep its lock, or the disk space of its
    file, for as long as they live."""
    _not_for_children.add(fd)
    return fd


def forget_descriptor(fd: int) -> None:
    """``fd`` is about to be closed, and its number may be another's soon."""
    _not_for_children.discard(fd)


def _in_child() -> None:
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _not_for_children:
        os.dup2(nothing, fd, inheritable=False)  # taken all the same: our objects are here too, and may close it
    _not_for_children.clear()
    os.close(nothing)


os.register_at_fork(after_in_child=_in_child)


def lock_directory(directory: Path) -> int:
    """Lock ``directory`` for this store and return the descriptor that holds the lock.

    Raises ``StoreError`` with the holder's process id if it is taken.
    """
    path = directory / LOCK_NAME
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            _lock(fd, path)
            # Between our open and flock the last holder may have removed the file: then we hold a lock that nobody
            # else will meet, and the file of that name, if any, is another's. Only the lock on the named file counts.
            if _is_named(fd, path):
                os.ftruncate(fd, 0)
                # The id is for messages only, and a full disk is no reason not to read a checkpoint.
                with suppress(OSError):
                    os.pwrite(fd, str(os.getpid()).encode(), 0)
                return keep_from_children(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def lock_to_read(directory: Path) -> Callable[[], None]:
    """``lock_directory``, also on a file system that is read-only, where no run can begin; what gives the lock back."""
    try:
        return functools.partial(unlock_directory, directory, lock_directory(directory))
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
    path = directory / LOCK_NAME
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return lambda: None
    try:
        _lock(fd, path)  # a run may be left there from when it could be written to
    except BaseException:
        os.close(fd)
        raise
    return functools.partial(os.close, fd)


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace") or "that has not written its id yet"
        ours = any(_is_named(held, path) for held in _not_for_children.copy())
        raise StoreError(_taken(path.parent, holder, ours=ours)) from error


def _taken(directory: Path, holder: str, *, ours: bool) -> str:
    if ours:
        return (
            f"{directory} is used by a store of this very process, process {holder}, as by a model that was compiled "
            "before: give this one another directory, or lohan_fx.release(model) that one, or lohan_fx.reset(model) to lose it; "
            "where no variable leads to it any more, as in a notebook whose cell ran twice, lohan_fx.reset() ends all"
        )
    # Ids do not tell: in containers that share a drive all runs may have the same.
    elsewhere = " of another container or host" if holder == str(os.getpid()) else ""
    return (
        f"{directory} is used by another lohan_fx run, process {holder}{elsewhere} (this one is {os.getpid()}): "
        "wait for that process or end it, which keeps its last checkpoint; a new training may be given another directory"
    )


def unlock_directory(directory: Path, fd: int) -> None:
    """Remove the lock file and give the lock back."""
    try:
        # Removed while still locked: a later lock_directory then sees that its file lost its name.
        (directory / LOCK_NAME).unlink(missing_ok=True)
    finally:  # also where the file system has become read-only
        # Explicit, because a child that was forked by other means than Python's may hold a copy of the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        forget_descriptor(fd)
        os.close(fd)


def file_system_type(directory: Path, mounts: str) -> str:
    """The type (``ext4``, ``tmpfs``) of the file system of ``directory``; ``mounts`` is the text of /proc/mounts."""
    resolved = directory.resolve()
    found, found_depth = "unknown", -1
    for line in mounts.split("\n"):
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # The kernel writes blanks in paths as octal escapes.
        mount_point = Path(fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        # >=, because a later mount on the same point hides the earlier one.
        if resolved.is_relative_to(mount_point) and len(mount_point.parts) >= found_depth:
            found, found_depth = fields[2], len(mount_point.parts)
    return found


def is_memory_backed(directory: Path) -> bool:
    """Whether files in ``directory`` take RAM instead of a drive."""
    # A mount point may have a name of any bytes, that of somebody's old disk too.
    return file_system_type(directory, os.fsdecode(Path(MOUNTS).read_bytes())) in MEMORY_FILE_SYSTEMS


def _is_named(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
