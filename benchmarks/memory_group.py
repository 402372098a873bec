"""memory_group: a control group in which the kernel lets processes have so much memory and no more.

What a process has before it joins is counted elsewhere; what it takes from then on counts here, with the pages of files that it
reads, which the kernel gives up when memory is short. A process that needs more is killed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

_V1 = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes")
_V2 = ("memory.max", "memory.swap.max", "memory.peak")
"""The files of a group, by the version of the kernel's interface: its limit, that of memory with swap space (v1) or of swap
space (v2), and its peak."""


@contextlib.contextmanager
def memory_group() -> Iterator[Path | None]:
    """The folder of a new group below that of this process, gone afterwards; None where this user may not make one."""
    folder = next(filter(None, map(_made, _parents())), None)
    try:
        yield folder
    finally:
        if folder is not None:
            folder.rmdir()


def _made(parent: Path) -> Path | None:
    """A new group below ``parent``, if that has groups for memory and lets this user make one."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="lohan_fx-", dir=parent))
    except OSError:
        return None
    if _files(folder) is not None:
        return folder
    folder.rmdir()
    return None


def join(folder: Path, nbytes: int) -> None:
    """This process may take ``nbytes`` more, of RAM and without any swap space."""
    files = _files(folder)
    assert files is not None, f"{folder} is no group for memory"
    limit, swap, _ = files
    (folder / limit).write_text(str(nbytes))
    if (folder / swap).exists():
        (folder / swap).write_text(str(nbytes if files is _V1 else 0))
    (folder / "cgroup.procs").write_text(str(os.getpid()))


def peak_bytes(folder: Path) -> int | None:
    """The most that was in use in the group at once; None where the kernel does not say."""
    files = _files(folder)
    path = folder / files[2] if files is not None else folder
    return int(path.read_text()) if path.is_file() else None


def _files(folder: Path) -> tuple[str, str, str] | None:
    return next((files for files in (_V1, _V2) if (folder / files[0]).exists()), None)


def _parents() -> Iterator[Path]:
    """Folders of this process's group for memory, by either version, as far as they are mounted where they usually are."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            mounted = Path("/sys/fs/cgroup") / controllers
            yield mounted / path.lstrip("/")
            yield mounted
