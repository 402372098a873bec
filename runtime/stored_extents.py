"""stored_extents: a checkpoint read where it lies, without a store: for ``lohan-fx fsck`` and ``lohan-fx export``.

Guarantees: nothing is written but the lock, which keeps runs away meanwhile (nothing at all where the file system is read-only);
no link is followed; memory is a chunk for each thread that reads. What is read comes from the drives and not from the page
cache, where the file system can do that.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from lohan_fx.errors import StoreError
from lohan_fx.runtime.checksum import checksum
from lohan_fx.runtime.file_backend import lock_to_read
from lohan_fx.runtime.generation_files import survey
from lohan_fx.runtime.huge_pages import ThreadScratch
from lohan_fx.runtime.manifest import ExtentRecord
from lohan_fx.runtime.store_file import STORE_NAME, reported_as_store_error
from lohan_fx.runtime.striping import parts_between


class StoredExtents:
    """The checkpoints in ``directories``: ``manifests``, oldest first, never none; ``damaged``, by number, why others cannot be
    read. Use it in a ``with`` block."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = list(directories)
        for directory in self._directories:
            if not directory.is_dir():
                raise ValueError(f"{directory} is no directory: name those of the run, in its order")
        if len({directory.resolve() for directory in self._directories}) < len(self._directories):
            raise ValueError(
                f"a directory is named twice among {', '.join(map(str, directories))}: name each drive's once"
            )
        self._fds: list[int] = []
        self._memory = ThreadScratch()
        with ExitStack() as taken:
            for directory in self._directories:
                with reported_as_store_error(f"locking {directory}"):
                    taken.callback(lock_to_read(directory))
            found = survey(self._directories)
            self.manifests, self.damaged = found.whole, found.damaged
            if not self.manifests:
                if self.damaged:
                    raise self.damaged[max(self.damaged)]
                raise StoreError(f"there is no checkpoint in {', '.join(map(str, self._directories))}")
            for directory, nbytes in zip(self._directories, self.manifests[-1].file_bytes, strict=True):
                self._fds.append(_open(directory / STORE_NAME, nbytes))
                taken.callback(os.close, self._fds[-1])
            self._taken = taken.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._taken.close()

    @property
    def drives(self) -> int:
        """How many directories there are."""
        return len(self._directories)

    def read(self, record: ExtentRecord, chunk: int) -> tuple[memoryview, bool]:
        """The chunk's whole pages, and whether they are what was written. Raises ``StoreError`` if the drive fails.
        Any thread; the bytes are there until it reads again."""
        start = chunk * record.chunk_bytes
        end = min(start + record.chunk_bytes, record.padded_bytes)
        data = self._memory.take(end - start)
        for part in parts_between(record.slots[record.current[chunk]], start, end):
            view = data[part.start_bytes - start : part.end_bytes - start]
            self._fill(view, part.file_index, part.file_offset_bytes)
        return data, checksum(data) == int(record.sums[chunk])

    def place(self, record: ExtentRecord, chunk: int) -> str:
        """Where the chunk begins, for people."""
        start = chunk * record.chunk_bytes
        part = next(parts_between(record.slots[record.current[chunk]], start, start + 1))
        return f"{self._directories[part.file_index] / STORE_NAME} at {part.file_offset_bytes}"

    def _fill(self, view: memoryview, index: int, offset: int) -> None:
        done = 0
        while done < len(view):
            where = f"reading {len(view) - done} bytes at {offset + done} of {self._directories[index] / STORE_NAME}"
            with reported_as_store_error(where):
                count = os.preadv(self._fds[index], [view[done:]], offset + done)
            if count <= 0:
                raise StoreError(f"{where}: the file ends there; did another program cut it?")
            done += count


def _open(path: Path, nbytes: int) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with reported_as_store_error(f"opening {path}"):
        try:
            fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = os.open(path, flags)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes:
        os.close(fd)
        raise StoreError(f"{path} has {status.st_size} bytes; the checkpoint needs a file of {nbytes}")
    return fd
