"""generations: checkpoints of a store that are a manifest each, not a copy (docs/0010).

After a commit the first write to a chunk goes to a free slot of it and later ones stay there, so what the manifest
names is never overwritten. Commit: everything else to the drive (``fdatasync``), then the manifest into a temporary
file, ``fdatasync`` of it, an atomic rename, ``fsync`` of the directory.

Guarantees: killed at any moment, or after a power loss that keeps what was synced, the newest manifest of the
directory names chunks that are whole and of one moment. A commit that fails leaves the one before it in force; one of
which that is unknown stops all further writes. What is read is compared with its checksum: whole chunks always,
parts of one only where an earlier process wrote it, once.
Assumes: nothing is under way during ``commit``; the directories are locked.
"""

from __future__ import annotations

import functools
import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lohan_fx.errors import StoreError
from lohan_fx.runtime.checksum import Checksums, Compare, checksum
from lohan_fx.runtime.extents import Extent
from lohan_fx.runtime.file_backend import FileBackend
from lohan_fx.runtime.generation_files import (
    generation_path,
    generations_in,
    make_checkpoint_directory,
    remove_generation,
    write_generation,
    write_identity,
)
from lohan_fx.runtime.huge_pages import ThreadScratch, scratch
from lohan_fx.runtime.manifest import ExtentRecord, Manifest
from lohan_fx.runtime.scratch_sums import ScratchSums
from lohan_fx.runtime.store_file import reported_as_store_error
from lohan_fx.runtime.striping import Piece
from lohan_fx.runtime.versions import Span, Versions

_LOG = logging.getLogger(__name__)


class Files(Protocol):
    """What the store lends: raw transfers between memory and pieces, and a flush of its files."""

    def read_pieces(self, pieces: Sequence[Piece], start: int, view: memoryview, what: str) -> None: ...
    def write_pieces(self, pieces: Sequence[Piece], start: int, view: memoryview, what: str) -> None: ...
    def flush(self) -> None: ...


class Generations:
    """The extents of one store that checkpoints keep. ``keep`` checkpoints are there at a time, each chunk having
    ``keep + 1`` slots."""

    def __init__(
        self, directories: Sequence[Path], files: Files, backend: FileBackend, keep: int, *, run: str | None = None
    ) -> None:
        self.keep = keep
        self.run = run or uuid.uuid4().hex
        self.committed = 0
        self.manifest_bytes = 0
        self._directories = list(directories)
        self._files = files
        self._backend = backend
        self._extents: dict[str, tuple[int, Versions]] = {}
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._uncertain: BaseException | None = None
        self._committing = False
        self._named = False
        self.scratch = ScratchSums()
        self._memory = ThreadScratch()

    def add(self, extents: Mapping[str, Extent]) -> None:
        """From now on keep those of ``extents`` that have versions."""
        for name, extent in extents.items():
            if extent.versions is not None:
                self._extents[name] = extent.nbytes, extent.versions

    def refuse_if_lacking(self, extents: Mapping[str, Extent]) -> None:
        """Raises ``StoreError`` where a checkpoint would lack one of ``extents`` that has chunks, and be refused at a resume."""
        lacking = [n for n, e in extents.items() if e.chunk_bytes is not None and e.nbytes and n not in self._extents]
        if lacking:
            raise StoreError(
                f"committing a checkpoint: it would lack {len(lacking)} extents, of them {lacking[0]!r}, because preparing for "
                "checkpoints did not come to its end; save model and optimizer by their state_dict(), and end this run"
            )

    def versions(self, name: str) -> Versions:
        """The chunks of extent ``name``."""
        return self._extents[name][1]

    def resume(self, manifest: Manifest, older: Sequence[Manifest]) -> None:
        """Go on after ``manifest``; ``older`` are kept too, oldest first. All of one run and layout."""
        self.run, self.committed, self._named = manifest.run, manifest.generation, True
        for name, record in manifest.extents.items():
            versions = Versions.resumed(
                record.padded_bytes, record.chunk_bytes, record.slots, record.current, record.sums
            )
            kept = [*(m.extents[name].current for m in older), record.current]
            versions.kept = [slots.copy() for slots in kept][-self.keep :]
            self._extents[name] = record.nbytes, versions

    # --- transfers --------------------------------------------------------------------------------------------

    def read(self, versions: Versions, start: int, view: memoryview, what: str) -> None:
        """Fill ``view`` from ``start`` of the extent. ``StoreError`` where it is not what was once written."""
        for compare in self.read_uncompared(versions, start, view, what):
            compare()

    def read_uncompared(self, versions: Versions, start: int, view: memoryview, what: str) -> list[Compare]:
        """``read``, but whole chunks are compared with their checksums by the calls of what is returned."""
        comparisons: list[Compare] = []
        for spans in versions.runs(versions.spans(start, start + len(view))):
            part = _part(view, start, spans)
            self._files.read_pieces(versions.pieces(spans[0].chunk), spans[0].start, part, what)
            for span in filter(versions.must_check, spans):
                part = _part(view, start, [span])
                compare = functools.partial(self._compare, versions, span.chunk, int(versions.sums[span.chunk]), what)
                if span.whole:
                    comparisons.append(functools.partial(compare, part))
                else:
                    whole = versions.span_of(span.chunk)
                    part = scratch(whole.nbytes)
                    self._files.read_pieces(versions.pieces(span.chunk), whole.start, part, what)
                    compare(part)
        return comparisons

    def _compare(self, versions: Versions, chunk: int, expected: int, what: str, view: memoryview) -> None:
        """``view``: all of the chunk, as it was read."""
        found = checksum(view)
        if found != expected:
            whole = versions.span_of(chunk)
            raise StoreError(
                f"{what}: bytes {whole.start} to {whole.end} of it are damaged: their checksum is {found:#018x}, that of "
                f"what was written {expected:#018x}; lohan-fx fsck lists all damage in "
                f"{', '.join(map(str, self._directories))}"
            )
        versions.checked(chunk)

    @staticmethod
    def checksums(versions: Versions | None, start: int, view: memoryview) -> Checksums:
        """Of ``view``, which begins at ``start`` of the extent; of scratch, which has no ``versions``, a single one."""
        if versions is None:
            return (checksum(view),)
        spans = versions.spans(start, start + len(view))
        return tuple(checksum(_part(view, start, [span])) if span.whole else None for span in spans)

    def write(self, versions: Versions, start: int, view: memoryview, what: str, checksums: Checksums) -> None:
        """Write ``view``, whose ``checksums`` are these, at ``start`` of the extent, to slots that no kept generation needs."""
        self._refuse_if_uncertain(what)
        sums = iter(checksums)
        left = list(versions.spans(start, start + len(view)))
        for span in left:
            self._copy_rest(versions, span, what)
        with self._lock:
            for span in left:
                versions.begin_write(span)
        try:
            for spans in versions.runs(list(left)):
                part = _part(view, start, spans)
                self._files.write_pieces(versions.pieces(spans[0].chunk), spans[0].start, part, what)
                with self._lock:
                    for span in spans:
                        versions.end_write(span, next(sums))
                del left[: len(spans)]
        except BaseException:
            with self._lock:
                for span in left:
                    versions.write_failed(span)
            raise

    def _copy_rest(self, versions: Versions, span: Span, what: str) -> None:
        """The first write after a commit is to a part of a chunk: its new slot gets the rest from the old one."""
        with self._copying:
            with self._lock:
                if not versions.needs_copy(span):
                    return
                slot = versions.free_slot(span.chunk)
            whole = versions.span_of(span.chunk)
            view = scratch(whole.nbytes)
            self.read(versions, whole.start, view, what)
            self._files.write_pieces(versions.slots[slot], whole.start, view, what)
            with self._lock:
                versions.move(span.chunk, slot)

    # --- commit -----------------------------------------------------------------------------------------------

    def commit(self, state: Mapping[str, Any], file_bytes: Sequence[int]) -> int:
        """Make what is written a checkpoint with ``state``; its number. Raises ``StoreError``; then the last holds."""
        self._committing = True
        try:
            return self._commit(state, file_bytes)
        finally:
            self._committing = False

    @property
    def committing(self) -> bool:
        """Whether a commit is under way, on whatever thread."""
        return self._committing

    @property
    def may_be_needed(self) -> bool:
        """Whether there is, or may be, a manifest that names what is in the files."""
        return bool(self.committed) or self._committing or self._uncertain is not None

    def without_checksum(self) -> Iterator[tuple[str, int]]:
        """Name and number of the chunks whose checksum must be found before a commit. Raises ``StoreError`` where none can
        be made."""
        self._refuse_if_uncertain("committing a checkpoint")
        for name, (_, versions) in self._extents.items():
            self._refuse_if_failed(name, versions)
        for name, (_, versions) in self._extents.items():
            yield from ((name, chunk) for chunk in versions.unknown())

    def find_checksum(self, name: str, chunk: int) -> None:
        """Read the chunk for its checksum."""
        versions = self.versions(name)
        span = versions.span_of(chunk)
        view = self._memory.take(span.nbytes)
        self._files.read_pieces(versions.pieces(chunk), span.start, view, f"reading {name!r} for its checksum")
        versions.sums[chunk], versions.known[chunk] = checksum(view), True

    def _commit(self, state: Mapping[str, Any], file_bytes: Sequence[int]) -> int:
        for name, chunk in self.without_checksum():
            self.find_checksum(name, chunk)
        self.flush()
        directory = self._directories[0]
        if not self._named:
            self._name_directories()
        number = self.committed + 1
        manifest = Manifest(
            run=self.run,
            generation=number,
            keep=self.keep,
            file_bytes=tuple(file_bytes),
            extents={name: _record(nbytes, versions) for name, (nbytes, versions) in self._extents.items()},
            state=state,
        )
        data = manifest.to_bytes()
        self._undone_if_failing(number, lambda: write_generation(directory, number, data, self._backend))
        with self._lock:
            for _, versions in self._extents.values():
                versions.committed(self.keep)
            self.committed = number
            self.manifest_bytes += len(data)
        self._remove_old(number)
        return number

    def flush(self) -> None:
        """Have what is written on the drives. Where that fails, nothing is written or committed any more."""
        try:
            self._files.flush()
        except BaseException as error:
            # What the drive dropped once it may not miss the next time: a later flush that succeeds proves nothing.
            self._uncertain = error
            raise

    def verify(self, name: str, chunk: int) -> None:
        """Read the chunk from the drive and compare it with its checksum. Raises ``StoreError`` where they differ."""
        versions = self.versions(name)
        if versions.known[chunk]:
            whole = versions.span_of(chunk)
            self.read(versions, whole.start, self._memory.take(whole.nbytes), f"reading back {name!r}")

    def _refuse_if_failed(self, name: str, versions: Versions) -> None:
        if versions.lost:
            raise StoreError(
                f"committing a checkpoint: a write to {name!r} failed, and what it was to write has not been written "
                "since; finish another step, or resume from the last checkpoint"
            )

    def _name_directories(self) -> None:
        for index, directory in enumerate(self._directories):
            with reported_as_store_error(f"preparing {directory} for checkpoints"):
                make_checkpoint_directory(directory, self._backend)
                write_identity(directory, self.run, index, len(self._directories), self._backend)
        self._named = True

    def _undone_if_failing(self, number: int, write: Callable[[], None]) -> None:
        """If it cannot be known whether the new manifest is in force, its chunks may not be written again."""
        try:
            write()
        except BaseException as error:
            try:
                with suppress(FileNotFoundError):
                    remove_generation(self._directories[0], number, self._backend)
            except OSError:
                self._uncertain = error
            raise

    def _remove_old(self, newest: int) -> None:
        """What cannot be removed now, the next commit tries again: the newest is in force all the same."""
        directory = self._directories[0]
        try:
            numbers = generations_in(directory)
        except StoreError as error:
            _LOG.warning("cannot look for old checkpoints: %s", error)
            return
        for number in numbers:
            if number <= newest - self.keep:
                try:
                    remove_generation(directory, number, self._backend)
                except OSError as error:
                    _LOG.warning("cannot remove the old checkpoint %s: %s", generation_path(directory, number), error)

    def distrust(self, error: BaseException) -> None:
        """A commit may or may not have come to its end: nothing is written any more."""
        self._uncertain = error

    def _refuse_if_uncertain(self, what: str) -> None:
        if self._uncertain is not None:
            raise StoreError(
                f"{what}: an earlier commit failed in a way that leaves open what is on the drive ({self._uncertain}); "
                "end this run and resume from the last checkpoint"
            ) from self._uncertain


def _record(nbytes: int, versions: Versions) -> ExtentRecord:
    return ExtentRecord(nbytes, versions.chunk_bytes, versions.slots, versions.current, versions.sums)


def _part(view: memoryview, start: int, spans: Sequence[Span]) -> memoryview:
    """Of ``view``, which begins at ``start`` of the extent, what neighbouring ``spans`` cover."""
    return view[spans[0].start - start : spans[-1].end - start]
