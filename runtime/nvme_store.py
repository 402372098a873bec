"""The NVMe tier: named extents in preallocated files, striped over directories, read and written in place.

Guarantees:
- ``read`` and ``write`` move exactly the whole pages asked for, without a copy in between, or raise a ``StoreError``
  that names file, extent, offset and bytes. What was never written reads as zeros.
- They may be called from any number of threads at once; calls on disjoint pages do not disturb each other, and no
  lock is held during I/O. One call does its parts one after the other: drives overlap through several callers.
- ``allocate`` takes all of what it was asked for or nothing, and checks free space before it writes anything.
- A directory serves one store at a time. ``close`` waits for calls under way, but for those that hung and were left behind
  (``in_time``, ``leave_behind``), so no descriptor is closed under another, and leaves no descriptor and (with ``remove``, and
  unless checkpoints are in them) no file.
- Extents with chunks can be kept over the process's death (``keep_generations``, ``commit``: see ``generations``).

Assumes: nobody else touches the files; callers order overlapping reads and writes themselves. Without a checkpoint the
contents are scratch: a store file that a killed run left behind is removed by the next store in that directory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from lohan_fx.errors import LaneTimeout, StoreError
from lohan_fx.runtime.checksum import Checksums, Compare
from lohan_fx.runtime.extents import Extent, Extents
from lohan_fx.runtime.file_backend import FileBackend, PosixBackend, lock_directory, unlock_directory
from lohan_fx.runtime.generation_files import generations_in, refuse_checkpoints
from lohan_fx.runtime.generations import Generations
from lohan_fx.runtime.host_pool import page_padded_bytes
from lohan_fx.runtime.in_time import InTime, several
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S
from lohan_fx.runtime.manifest import MAX_SLOTS, Manifest
from lohan_fx.runtime.store_arguments import check_directory, check_striping, log_buffered, memory_of
from lohan_fx.runtime.store_file import StoreFile, reported_as_store_error
from lohan_fx.runtime.store_space import take_space
from lohan_fx.runtime.striping import Piece, parts_between

DEFAULT_STRIPE_BYTES = 4 * 1024 * 1024
SSD_THREADS = 3
"""Callers per drive that keep it busy."""
MOST_BYTES = 64 << 20
"""Of memory beside that of a step, for what moves or reads all states."""

_LOG = logging.getLogger(__name__)


def ssd_threads(drives: int) -> int:
    """For so many drives: a request is on one of them at a time, and by chance two are on the same."""
    return SSD_THREADS * max(1, drives)


def requests_at_once(drives: int, nbytes: int) -> int:
    """How many requests of so many bytes each: what keeps ``drives`` busy, within ``MOST_BYTES``, or one."""
    return max(1, min(MOST_BYTES // max(1, nbytes), ssd_threads(drives)))


class NvmeStore:
    """Extents on one or more directories; ``weights`` are the directories' bandwidths, equal if not given.

    With ``resume`` (from ``read_generations``) the store is as the last of these manifests says. The directories of a
    ``temporary`` one go with the run, so that it refuses to keep checkpoints.

    Raises ``ValueError`` for a directory that is missing or not writable and ``StoreError`` for one that another
    store uses, or that holds checkpoints while none is resumed; warns if one is in memory. Close it, or use it in a
    ``with`` block.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        *,
        weights: Sequence[float] | None = None,
        stripe_bytes: int = DEFAULT_STRIPE_BYTES,
        backend: FileBackend | None = None,
        resume: Sequence[Manifest] = (),
        temporary: bool = False,
    ) -> None:
        self._directories = [Path(directory) for directory in directories]
        weights = [1.0] * len(directories) if weights is None else weights
        check_striping(self._directories, weights, stripe_bytes)
        for directory in self._directories:
            check_directory(directory)
        self._backend: FileBackend = PosixBackend() if backend is None else backend
        self._extents = Extents(stripe_bytes, weights)
        self._allocating = threading.Lock()
        self._changed = threading.Condition()  # guards the four below
        self._active: list[tuple[threading.Thread, str]] = []
        self._closed = False
        self._bytes_read = 0
        self._bytes_written = self._scratch_bytes_written = 0
        self._remove = True
        self._files: list[StoreFile] = []
        self._generations: Generations | None = None
        self._unused_run: str | None = None
        self._in_time = InTime()
        self._temporary = temporary
        # On any failure in here, what is taken so far is given back, last first; else close() does that.
        with ExitStack() as taken:
            for directory in self._directories:
                with reported_as_store_error(f"locking {directory}"):
                    taken.callback(unlock_directory, directory, lock_directory(directory))
            if resume:
                self._resume(resume)
            else:
                self._unused_run = refuse_checkpoints(self._directories)
            for index, directory in enumerate(self._directories):
                resumed_bytes = resume[-1].file_bytes[index] if resume else None
                self._files.append(StoreFile(directory, self._backend, resumed_bytes))
                taken.callback(self._close_file, self._files[-1])
            self._taken = taken.pop_all()
        self._direct = any(file.direct for file in self._files)
        log_buffered([file for file in self._files if not file.direct])

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
    def scratch_bytes_written(self) -> int:
        """Those of ``bytes_written`` that no checkpoint is to keep."""
        with self._changed:
            return self._scratch_bytes_written

    @property
    def nbytes_allocated(self) -> int:
        """Disk bytes the extents take, padding included."""
        return sum(file.nbytes for file in self._files)

    def allocate(
        self, extents: Mapping[str, int], *, chunk_bytes: Mapping[str, int] | None = None, unless_there: bool = False
    ) -> None:
        """Add extents of the given byte sizes, all or none. Those named in ``chunk_bytes`` are for checkpoints to keep.
        ``unless_there``: but for those that there are.

        Raises ``ValueError`` for a negative size or a name in use, and ``StoreError`` if the disk space is not there.
        """
        with self._call("allocating extents"):
            allocate = partial(self._allocate, extents, chunk_bytes or {}, unless_there=unless_there)
            self._in_time(allocate, f"preallocating in {self._where()}")

    def _allocate(self, extents: Mapping[str, int], chunk_bytes: Mapping[str, int], *, unless_there: bool) -> None:
        """All of it is one call ``in_time``, as that of ``keep_generations`` is: where Ctrl-C comes, it is done or will be."""
        with self._allocating:
            if unless_there:
                extents = {name: nbytes for name, nbytes in extents.items() if name not in self._extents.all()}
            ends = [file.nbytes for file in self._files]
            added = self._extents.laid_out(extents, chunk_bytes, ends)
            if self._generations is not None:
                added = self._extents.with_slots(added, self._generations.keep, ends)
                for extent in added.values():
                    if extent.versions is not None:
                        extent.versions.blank()
                self._tell_space(added, self._generations.keep)
            take_space(self._directories, self._files, ends, self._backend)
            if self._generations is not None:
                self._generations.add(added)
            self._extents.add(added)

    def _tell_space(self, extents: Mapping[str, Extent], keep: int) -> None:
        """Before it is taken: what checkpoints cost in disk space."""
        states_bytes = sum(page_padded_bytes(e.nbytes) for e in extents.values() if e.versions is not None)
        if states_bytes:
            _LOG.info(
                "checkpoints: %d bytes of states in %s, and %d more to keep the last %d",
                states_bytes, self._where(), keep * states_bytes, keep,
            )  # fmt: skip

    def keep_generations(self, keep: int) -> None:
        """From now on ``commit`` can make checkpoints, of which the last ``keep`` stay. Costs ``keep`` times the disk
        space of the extents with chunks, taken here. Raises ``StoreError`` if it is not there."""
        with self._call("preparing for checkpoints"):
            self._in_time(partial(self._keep_generations, keep), f"preallocating in {self._where()}")

    def _keep_generations(self, keep: int) -> None:
        with self._allocating:
            if self._generations is not None:
                if keep != self._generations.keep:
                    raise ValueError(
                        f"this store keeps {self._generations.keep} checkpoints; it cannot keep {keep} now"
                    )
                return
            if self._temporary:
                raise ValueError(
                    f"{self._where()} is removed at the end of this run, and a checkpoint with it: name directories that "
                    "outlive it, by lohan_fx.compile(..., nvme=...) or in the hardware profile"
                )
            if type(keep) is not int or not 1 <= keep < MAX_SLOTS:
                raise ValueError(f"checkpoints to keep: expected 1 to {MAX_SLOTS - 1}, got {keep!r}")
            ends = [file.nbytes for file in self._files]
            extents = self._extents.with_slots(self._extents.all(), keep, ends)
            self._tell_space(extents, keep)
            take_space(self._directories, self._files, ends, self._backend)
            generations = Generations(self._directories, self, self._backend, keep, run=self._unused_run)
            generations.add(extents)
            self._extents.add(extents)
            self._generations = generations

    @property
    def is_temporary(self) -> bool:
        """Whether the directories go with the run, so that no checkpoint can be kept in them."""
        return self._temporary

    @property
    def drives(self) -> int:
        """How many directories it has."""
        return len(self._directories)

    @property
    def keeps(self) -> int:
        """How many checkpoints are kept; 0 before ``keep_generations``."""
        return 0 if self._generations is None else self._generations.keep

    @property
    def committed(self) -> int:
        """The number of the last checkpoint; 0 before the first."""
        return 0 if self._generations is None else self._generations.committed

    def commit(self, state: Mapping[str, Any], *, verify: bool = False) -> int:
        """Make what is written a checkpoint, with ``state`` (JSON); its number. ``verify``: read it back first.

        Nothing may be under way. Raises ``StoreError``; then the checkpoint before is in force.
        """
        if self._generations is None:
            raise ValueError("commit: keep_generations() was not called")
        with self._call("committing a checkpoint"):
            self._generations.refuse_if_lacking(self._extents.all())
            ends = self._extents.kept_ends(len(self._files))
            try:
                if verify:
                    self._verify(self._generations)
                self._find_checksums(self._generations)
                before_bytes = self._generations.manifest_bytes
                commit = partial(self._generations.commit, state, ends)
                number = self._in_time(commit, f"committing a checkpoint in {self._where()}")
                with self._changed:
                    self._bytes_written += self._generations.manifest_bytes - before_bytes
                return number
            except BaseException as error:
                if self._generations.committing:  # it hangs, and this thread has stopped waiting for it
                    self._generations.distrust(error)
                raise

    def _verify(self, generations: Generations) -> None:
        """A call per chunk: reading all may take longer than any one call is waited for."""
        if not all(file.direct for file in self._files):  # else what is read back would be what is in memory
            self._in_time(generations.flush, f"flushing what is in {self._where()}")
            for file in self._files:
                self._in_time(file.forget, f"dropping what is in memory of {file.path}")
        calls = (
            (partial(generations.verify, name, chunk), f"reading back chunk {chunk} of {name!r}")
            for name, versions in self._extents.kept()
            for chunk in versions.fresh()
        )
        several(calls, self._chunks_at_once())

    def _find_checksums(self, generations: Generations) -> None:
        """Of what was written in parts, or before checkpoints were asked for, which may be all: a call per chunk, as above."""
        calls = (
            (partial(generations.find_checksum, name, chunk), f"reading chunk {chunk} of {name!r} for its checksum")
            for name, chunk in generations.without_checksum()
        )
        several(calls, self._chunks_at_once())

    def _chunks_at_once(self) -> int:
        """How many threads read a chunk each, into memory of their own."""
        largest_bytes = max((versions.largest_bytes for _, versions in self._extents.kept()), default=0)
        return requests_at_once(self.drives, largest_bytes)

    def _resume(self, manifests: Sequence[Manifest]) -> None:
        """Before the files are opened, and after the lock: what was read before it may be old."""
        newest = manifests[-1]
        if generations_in(self._directories[0])[-1:] != [newest.generation]:
            raise StoreError(f"the checkpoints in {self._where()} changed while they were read: try again")
        self._generations = Generations(self._directories, self, self._backend, newest.keep)
        self._generations.resume(newest, manifests[:-1])
        kept = {
            name: Extent(record.nbytes, record.slots[0], record.chunk_bytes, self._generations.versions(name))
            for name, record in newest.extents.items()
        }
        self._extents.add(kept)

    def read(self, name: str, offset: int, buffer: torch.Tensor, nbytes: int, *, at: int = 0) -> None:
        """Fill ``buffer``, from its byte ``at`` on, with ``nbytes`` of extent ``name`` from ``offset`` on, and on to the end of
        the last page.

        ``offset`` is a multiple of 4096; ``buffer`` a contiguous uint8 CPU tensor with room for ``nbytes`` rounded up
        to 4096, page-aligned where the files are direct. Raises ``ValueError`` otherwise, ``StoreError`` if I/O fails.
        """
        for compare in self.read_uncompared(name, offset, buffer, nbytes, at=at):
            compare()

    def read_uncompared(
        self, name: str, offset: int, buffer: torch.Tensor, nbytes: int, *, at: int = 0
    ) -> list[Compare]:
        """``read``, but with checkpoints what was read may not be used before all that is returned has been called.

        For who uses ``buffer`` next, on another thread: a checksum takes less time where a cache has it (docs/0040).
        """
        extent, view, what = self._asked("reading", name, offset, buffer, nbytes, at)
        with self._call(what):
            return self._in_time(lambda: self._read(extent, name, offset, view, what), what)

    def _read(self, extent: Extent, name: str, offset: int, view: memoryview, what: str) -> list[Compare]:
        if self._generations is not None and extent.versions is not None:
            return self._generations.read_uncompared(extent.versions, offset, view, what)
        self.read_pieces(extent.pieces, offset, view, what)
        return [] if self._generations is None else self._generations.scratch.comparisons(name, offset, view, what)

    def checksums(self, name: str, offset: int, buffer: torch.Tensor, nbytes: int) -> Checksums | None:
        """What a ``write`` of the same arguments needs to know of ``buffer``, found now; None where nothing is kept."""
        if self._generations is None:
            return None
        extent, view, _ = self._asked("writing", name, offset, buffer, nbytes)
        return self._generations.checksums(extent.versions, offset, view)

    def write(
        self, name: str, offset: int, buffer: torch.Tensor, nbytes: int, checksums: Checksums | None = None
    ) -> None:
        """Write ``nbytes`` of ``buffer`` to extent ``name`` at ``offset``, and on to the end of the last page.

        Whole pages are written: what follows ``nbytes`` in ``buffer`` replaces the rest of the last page in the
        extent. Arguments and errors as in ``read``. ``checksums``: from ``checksums``, where ``buffer`` has not changed since.
        """
        extent, view, what = self._asked("writing", name, offset, buffer, nbytes)
        with self._call(what):
            self._in_time(lambda: self._write(extent, name, offset, view, what, checksums), what)
        if extent.chunk_bytes is None:
            with self._changed:
                self._scratch_bytes_written += len(view)

    def _write(
        self, extent: Extent, name: str, offset: int, view: memoryview, what: str, checksums: Checksums | None
    ) -> None:
        if self._generations is None:
            self.write_pieces(extent.pieces, offset, view, what)
            return
        if checksums is None:
            checksums = self._generations.checksums(extent.versions, offset, view)
        if extent.versions is not None:
            self._generations.write(extent.versions, offset, view, what, checksums)
        else:
            self._generations.scratch.begin_write(name, offset, len(view))
            self.write_pieces(extent.pieces, offset, view, what)
            self._generations.scratch.end_write(name, offset, len(view), checksums)

    def read_pieces(self, pieces: Sequence[Piece], start: int, view: memoryview, what: str) -> None:
        """For ``generations``: fill ``view`` from byte ``start`` of what ``pieces`` cover."""
        for part in parts_between(pieces, start, start + len(view)):
            part_view = view[part.start_bytes - start : part.end_bytes - start]
            self._files[part.file_index].read(part_view, part.file_offset_bytes, what)
        with self._changed:
            self._bytes_read += len(view)

    def write_pieces(self, pieces: Sequence[Piece], start: int, view: memoryview, what: str) -> None:
        """For ``generations``: write ``view`` at byte ``start`` of what ``pieces`` cover."""
        for part in parts_between(pieces, start, start + len(view)):
            part_view = view[part.start_bytes - start : part.end_bytes - start]
            self._files[part.file_index].write(part_view, part.file_offset_bytes, what)
        with self._changed:
            self._bytes_written += len(view)

    def flush(self) -> None:
        """Return when everything written so far is on the drives."""
        with self._call("flushing"):
            for file in self._files:
                self._in_time(file.flush, f"flushing {file.path}")

    def close(self, remove: bool = True, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Refuse new calls, wait for those under way, give everything back. Idempotent.

        ``remove=False`` keeps the store files, for a look after a failure; the locks go in any case. Raises
        ``LaneTimeout`` if a call does not end in time; then ``close`` may be called again.
        """
        with self._changed:
            self._closed = True
            if not self._changed.wait_for(lambda: not self._active, timeout_s):
                raise LaneTimeout(
                    f"waited {timeout_s:g} s to close the store in {self._where()}: still {[w for _, w in self._active]}; "
                    "call close() again to keep waiting, or see dmesg if a drive hangs"
                )
        # An interrupted caller counts as gone while its call still runs there; the files go after it, unless it hangs. Not
        # under the lock, which that call takes.
        self._in_time.close()
        with self._changed:
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

    def leave_behind(self, threads: Collection[threading.Thread]) -> None:
        """What ``threads`` have under way hangs: ``close`` does not wait for it any more."""
        with self._changed:
            self._active = [call for call in self._active if call[0] not in threads]
            self._changed.notify_all()

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        """A call under way, which ``close`` waits for; refused once closed."""
        call = threading.current_thread(), what
        with self._changed:
            if self._closed:
                raise StoreError(f"{what}: the store in {self._where()} is closed; do this before close()")
            self._active.append(call)
        try:
            yield
        finally:
            with self._changed:
                if call in self._active:  # unless it was left behind
                    self._active.remove(call)
                    self._changed.notify_all()

    def _close_file(self, file: StoreFile) -> None:
        file.close(remove=self._remove and not (self._generations is not None and self._generations.may_be_needed))

    def _asked(
        self, verb: str, name: str, offset: int, buffer: torch.Tensor, nbytes: int, at: int = 0
    ) -> tuple[Extent, memoryview, str]:
        """Checks the arguments; the extent, the memory in whole pages, and the request in words."""
        what = f"{verb} {nbytes} bytes at {offset} of extent {name!r}"
        extent = self._extents.asked(name, offset, nbytes, what)
        return extent, memory_of(buffer, page_padded_bytes(nbytes), what, aligned=self._direct, at=at), what
