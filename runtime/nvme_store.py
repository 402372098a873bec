"""The NVMe tier: named extents in preallocated files, striped over directories, read and written in place.

Guarantees:
- ``read`` and ``write`` move exactly the whole pages asked for, without a copy in between, or raise a ``StoreError``
  that names file, extent, offset and bytes. What was never written reads as zeros.
- They may be called from any number of threads at once; calls on disjoint pages do not disturb each other, and no
  lock is held during I/O. One call does its parts one after the other: drives overlap through several callers.
- ``allocate`` takes all of what it was asked for or nothing, and checks free space before it writes anything.
- A directory serves one store at a time. ``close`` waits for calls under way, so no descriptor is closed under one,
  and leaves no descriptor and (with ``remove``) no file.

Assumes: nobody else touches the files; callers order overlapping reads and writes themselves. The contents are
scratch: a store file that a killed run left behind is removed by the next store in that directory.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from lohan_fx.errors import LaneTimeout, StoreError
from lohan_fx.runtime.file_backend import FileBackend, PosixBackend, is_memory_backed, lock_directory, unlock_directory
from lohan_fx.runtime.host_pool import PAGE_BYTES, page_padded_bytes
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S
from lohan_fx.runtime.store_file import StoreFile, reported_as_store_error
from lohan_fx.runtime.striping import Piece, parts_between, stripe_extent

DEFAULT_STRIPE_BYTES = 4 * 1024 * 1024

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Extent:
    nbytes: int
    pieces: tuple[Piece, ...]


class NvmeStore:
    """Extents on one or more directories; ``weights`` are the directories' bandwidths, equal if not given.

    Raises ``ValueError`` for a directory that is missing or not writable and ``StoreError`` for one that another
    store uses; warns if one is in memory. Close it, or use it in a ``with`` block.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        weights: Sequence[float] | None = None,
        stripe_bytes: int = DEFAULT_STRIPE_BYTES,
        backend: FileBackend | None = None,
    ) -> None:
        self._directories = [Path(directory) for directory in directories]
        self._weights = [1.0] * len(directories) if weights is None else list(weights)
        _check_striping(self._directories, self._weights, stripe_bytes)
        for directory in self._directories:
            _check_directory(directory)
        self._stripe_bytes = stripe_bytes
        self._backend: FileBackend = PosixBackend() if backend is None else backend
        self._extents: dict[str, _Extent] = {}
        self._allocating = threading.Lock()
        self._changed = threading.Condition()  # guards the four below
        self._active: list[str] = []
        self._closed = False
        self._bytes_read = 0
        self._bytes_written = 0
        self._remove = True
        self._files: list[StoreFile] = []
        # On any failure in here, what is taken so far is given back, last first; else close() does that.
        with ExitStack() as taken:
            for directory in self._directories:
                with reported_as_store_error(f"locking {directory}"):
                    taken.callback(unlock_directory, directory, lock_directory(directory))
            for directory in self._directories:
                self._files.append(StoreFile(directory, self._backend))
                taken.callback(self._close_file, self._files[-1])
            self._taken = taken.pop_all()
        self._direct = any(file.direct for file in self._files)
        _log_buffered([file for file in self._files if not file.direct])

    @property
    def bytes_read(self) -> int:
        """Bytes moved by reads that succeeded, padding included."""
        with self._changed:
            return self._bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes moved by writes that succeeded, padding included."""
        with self._changed:
            return self._bytes_written

    @property
    def nbytes_allocated(self) -> int:
        """Disk bytes the extents take, padding included."""
        return sum(file.nbytes for file in self._files)

    def allocate(self, extents: Mapping[str, int]) -> None:
        """Add extents of the given byte sizes, all or none.

        Raises ``ValueError`` for a negative size or a name in use, and ``StoreError`` if the disk space is not there.
        """
        with self._call("allocating extents"), self._allocating:
            ends = [file.nbytes for file in self._files]
            added: dict[str, _Extent] = {}
            for name, nbytes in extents.items():
                if name in self._extents:
                    raise ValueError(
                        f"allocate: {nbytes} bytes asked for extent {name!r}, which exists with "
                        f"{self._extents[name].nbytes} bytes; allocate each name once"
                    )
                if nbytes < 0:
                    raise ValueError(f"allocate: {nbytes} bytes asked for extent {name!r}; ask for at least 0")
                pieces = stripe_extent(page_padded_bytes(nbytes), self._stripe_bytes, self._weights, ends)
                added[name] = _Extent(nbytes, pieces)
            self._check_free_space(ends)
            self._grow_files(ends)
            # A new dict, never changed in place: readers look names up without the lock.
            self._extents = {**self._extents, **added}

    def read(self, name: str, offset: int, buffer: torch.Tensor, nbytes: int) -> None:
        """Fill ``buffer`` with ``nbytes`` of extent ``name`` from ``offset`` on, and on to the end of the last page.

        ``offset`` is a multiple of 4096; ``buffer`` a contiguous uint8 CPU tensor with room for ``nbytes`` rounded up
        to 4096, page-aligned where the files are direct. Raises ``ValueError`` otherwise, ``StoreError`` if I/O fails.
        """
        moved = self._transfer(StoreFile.read, "reading", name, offset, buffer, nbytes)
        with self._changed:
            self._bytes_read += moved

    def write(self, name: str, offset: int, buffer: torch.Tensor, nbytes: int) -> None:
        """Write ``nbytes`` of ``buffer`` to extent ``name`` at ``offset``, and on to the end of the last page.

        Whole pages are written: what follows ``nbytes`` in ``buffer`` replaces the rest of the last page in the
        extent. Arguments and errors as in ``read``.
        """
        moved = self._transfer(StoreFile.write, "writing", name, offset, buffer, nbytes)
        with self._changed:
            self._bytes_written += moved

    def flush(self) -> None:
        """Return when everything written so far is on the drives."""
        with self._call("flushing"):
            for file in self._files:
                file.flush()

    def close(self, remove: bool = True, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Refuse new calls, wait for those under way, give everything back. Idempotent.

        ``remove=False`` keeps the store files, for a look after a failure; the locks go in any case. Raises
        ``LaneTimeout`` if a call does not end in time; then ``close`` may be called again.
        """
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._active, timeout_s):
                raise LaneTimeout(
                    f"waited {timeout_s:g} s to close the store in {self._where()}: still {self._active}; "
                    "call close() again to keep waiting, or see dmesg if a drive hangs"
                )
            self._remove = remove
            self._taken.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _where(self) -> str:
        return ", ".join(map(str, self._directories))

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        """A call under way, which ``close`` waits for; refused once closed."""
        with self._changed:
            if self._closed:
                raise StoreError(f"{what}: the store in {self._where()} is closed; do this before close()")
            self._active.append(what)
        try:
            yield
        finally:
            with self._changed:
                self._active.remove(what)
                self._changed.notify_all()

    def _close_file(self, file: StoreFile) -> None:
        file.close(remove=self._remove)

    def _check_free_space(self, ends: Sequence[int]) -> None:
        """Directories on one file system share its free space, so their needs are added up."""
        devices = [os.stat(directory).st_dev for directory in self._directories]
        added = [end - file.nbytes for end, file in zip(ends, self._files, strict=True)]
        for directory, device in zip(self._directories, devices, strict=True):
            needed = sum(nbytes for nbytes, other in zip(added, devices, strict=True) if other == device)
            with reported_as_store_error(f"asking for the free space of {directory}"):
                free = self._backend.free_bytes(directory)
            if needed > free:
                raise StoreError(
                    f"allocating in {directory}: {needed} bytes are needed on its file system and {free} are free; "
                    f"free {needed - free} bytes there or add a directory on another drive"
                )

    def _grow_files(self, ends: Sequence[int]) -> None:
        before = [file.nbytes for file in self._files]
        try:
            for file, end in zip(self._files, ends, strict=True):
                file.grow(end)
        except BaseException:
            for file, nbytes in zip(self._files, before, strict=True):
                file.cut_back(nbytes)
            raise

    def _transfer(
        self,
        move: Callable[[StoreFile, memoryview, int, str], None],
        verb: str,
        name: str,
        offset: int,
        buffer: torch.Tensor,
        nbytes: int,
    ) -> int:
        """Checks the arguments, moves every part and returns the padded bytes."""
        what = f"{verb} {nbytes} bytes at {offset} of extent {name!r}"
        extent = self._extents.get(name)
        if extent is None:
            raise ValueError(f"{what}: there is no such extent; allocate it first")
        if offset % PAGE_BYTES or not 0 <= offset <= offset + nbytes <= extent.nbytes:
            raise ValueError(
                f"{what}, which has {extent.nbytes} bytes: stay inside, at an offset that is a multiple of {PAGE_BYTES}"
            )
        length = page_padded_bytes(nbytes)
        view = _memory_of(buffer, length, what, aligned=self._direct)
        with self._call(what):
            for part in parts_between(extent.pieces, offset, offset + length):
                part_view = view[part.start_bytes - offset : part.end_bytes - offset]
                move(self._files[part.file_index], part_view, part.file_offset_bytes, what)
        return length


def _memory_of(buffer: torch.Tensor, length: int, what: str, *, aligned: bool) -> memoryview:
    """The first ``length`` bytes of ``buffer`` itself; valid while the caller holds the tensor."""
    if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ValueError(
            f"{what}: the buffer is a {'' if buffer.is_contiguous() else 'non-'}contiguous {buffer.dtype} tensor on "
            f"{buffer.device}; pass a contiguous torch.uint8 tensor on cpu"
        )
    if buffer.numel() < length:
        raise ValueError(f"{what}: whole pages need a buffer of {length} bytes, this one has {buffer.numel()}")
    address = buffer.data_ptr()
    if aligned and address % PAGE_BYTES:
        raise ValueError(
            f"{what}: O_DIRECT needs a page-aligned buffer, this one is at {address:#x}; take it from the HostPool"
        )
    if length == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def _check_striping(directories: Sequence[Path], weights: Sequence[float], stripe_bytes: int) -> None:
    if not directories:
        raise ValueError("NvmeStore: no directory was given; name at least one on a drive with free space")
    if len(weights) != len(directories) or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"NvmeStore: weights {list(weights)} for {len(directories)} directories; "
            "give each directory one finite weight above 0, such as its bytes per second"
        )
    if stripe_bytes <= 0 or stripe_bytes % PAGE_BYTES:
        raise ValueError(f"NvmeStore: stripe_bytes is {stripe_bytes}; use a positive multiple of {PAGE_BYTES}")


def _check_directory(directory: Path) -> None:
    if not directory.is_dir():
        found = "not a directory" if directory.exists() else "missing"
        raise ValueError(f"NvmeStore: {directory} is {found}; create it (mkdir -p) or name an existing one")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(f"NvmeStore: {directory} is not writable for this process; chmod it or name another one")
    if is_memory_backed(directory):
        warnings.warn(
            f"NvmeStore: {directory} is in memory (tmpfs), so what is stored there takes RAM; name one on a drive",
            stacklevel=3,
        )


def _log_buffered(files: Sequence[StoreFile]) -> None:
    if files:
        _LOG.warning(
            "no O_DIRECT for %s: using the page cache, which copies every byte once more and takes memory outside the "
            "host budget; use a directory on ext4 or xfs to avoid this",
            ", ".join(str(file.path) for file in files),
        )
