"""versions: the chunks of one extent over generations: in which of its slots each is, and its checksum.

An extent that checkpoints keep has several places (slots) on disk, each with room for all of it. A chunk is in one of
them; the rest of its slots hold what committed generations need, or are free.

Guarantees: after ``committed`` the slot of a chunk that a kept generation needs is never given out for writing.
Assumes: calls that overlap in a chunk are ordered by the callers; the store's lock is held where a docstring says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lohan_fx.runtime.checksum import checksum
from lohan_fx.runtime.striping import Piece

SlotNumbers = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Span:
    """The bytes ``start`` to ``end`` of an extent, all in chunk ``chunk``; ``whole``: they are all of it."""

    chunk: int
    start: int
    end: int
    whole: bool

    @property
    def nbytes(self) -> int:
        return self.end - self.start


class Versions:
    """``slots``: the pieces of each slot, all of ``padded_bytes``. What was never written has no known checksum."""

    def __init__(self, padded_bytes: int, chunk_bytes: int, slots: Sequence[tuple[Piece, ...]]) -> None:
        self.padded_bytes = padded_bytes
        self.chunk_bytes = chunk_bytes
        self.slots = tuple(slots)
        count = -(-padded_bytes // chunk_bytes)
        self.current: SlotNumbers = np.zeros(count, np.uint8)
        self.sums: Sums = np.zeros(count, np.uint64)
        self.known = np.zeros(count, np.bool_)
        # By chunk: the first and the last byte + 1 of what was to be written, and has not been since.
        self.lost: dict[int, tuple[int, int]] = {}
        self.kept: list[SlotNumbers] = []
        # Written since the last commit, so that no generation needs what is there.
        self._fresh = np.ones(count, np.bool_)
        # Compared with its checksum, or written, by this process.
        self._trusted = np.ones(count, np.bool_)

    @classmethod
    def resumed(
        cls, padded_bytes: int, chunk_bytes: int, slots: Sequence[tuple[Piece, ...]], current: SlotNumbers, sums: Sums
    ) -> Versions:
        """As a manifest says; nothing is trusted before it was compared with its checksum."""
        versions = cls(padded_bytes, chunk_bytes, slots)
        versions.current, versions.sums = current.copy(), sums.copy()
        versions.known[:] = True
        versions._fresh[:] = False
        versions._trusted[:] = False
        return versions

    def blank(self) -> None:
        """Its slots are new: all of it reads as zeros, of which the checksum is known."""
        zeros = {span.end - span.start: 0 for span in (self.span_of(0), self.span_of(len(self.sums) - 1))}
        zeros = {nbytes: checksum(bytes(nbytes)) for nbytes in zeros}
        self.sums[:] = zeros[self.span_of(0).end]
        last = self.span_of(len(self.sums) - 1)
        self.sums[-1] = zeros[last.end - last.start]
        self.known[:] = True

    @property
    def largest_bytes(self) -> int:
        """Of its chunks."""
        return min(self.chunk_bytes, self.padded_bytes)

    def span_of(self, chunk: int) -> Span:
        """All of a chunk."""
        start = chunk * self.chunk_bytes
        return Span(chunk, start, min(start + self.chunk_bytes, self.padded_bytes), True)

    def spans(self, start: int, end: int) -> Iterator[Span]:
        """``start`` to ``end`` of the extent, cut where chunks end."""
        for chunk in range(start // self.chunk_bytes, -(-end // self.chunk_bytes)):
            whole = self.span_of(chunk)
            first, last = max(start, whole.start), min(end, whole.end)
            yield Span(chunk, first, last, (first, last) == (whole.start, whole.end))

    def runs(self, spans: Iterable[Span]) -> Iterator[list[Span]]:
        """``spans``, which follow each other, together where their chunks are in the same slot now: one transfer."""
        for _, run in itertools.groupby(spans, key=lambda span: int(self.current[span.chunk])):
            yield list(run)

    def pieces(self, chunk: int) -> tuple[Piece, ...]:
        """Where the chunk is now."""
        return self.slots[self.current[chunk]]

    def needs_copy(self, span: Span) -> bool:
        """Whether writing ``span`` must be preceded by a copy of the rest of the chunk. Lock held."""
        return not span.whole and not self._fresh[span.chunk]

    def free_slot(self, chunk: int) -> int:
        """A slot of the chunk that no kept generation needs. Lock held."""
        taken = {int(generation[chunk]) for generation in self.kept} | {int(self.current[chunk])}
        return next(slot for slot in range(len(self.slots)) if slot not in taken)

    def move(self, chunk: int, slot: int) -> None:
        """The chunk is in ``slot`` from now on. Lock held."""
        self.current[chunk] = slot
        self._fresh[chunk] = True

    def begin_write(self, span: Span) -> None:
        """``span`` is about to be written: find it a place, and know nothing of it until it is there. Lock held."""
        if not self._fresh[span.chunk]:
            self.move(span.chunk, self.free_slot(span.chunk))
        self.known[span.chunk] = False
        self._trusted[span.chunk] = True

    def end_write(self, span: Span, checksum: int | None) -> None:
        """``span`` is written; ``checksum`` is that of the chunk, where it is the whole of it. Lock held."""
        if checksum is not None:
            self.sums[span.chunk], self.known[span.chunk] = checksum, True
        if span.chunk in self.lost:
            start, end = self.lost.pop(span.chunk)
            if span.start <= start:
                start = max(start, span.end)
            if span.end >= end:
                end = min(end, span.start)
            if start < end:
                self.lost[span.chunk] = start, end

    def write_failed(self, span: Span) -> None:
        """What is there now is neither old nor new: nothing is committed before all of it is written again. Lock held."""
        start, end = self.lost.get(span.chunk, (span.start, span.end))
        self.lost[span.chunk] = min(start, span.start), max(end, span.end)

    def must_check(self, span: Span) -> bool:
        """Whether what is read of ``span`` is to be compared with the chunk's checksum: where that is known, if all of
        the chunk is read anyway, or if what an earlier process wrote has not been compared yet."""
        return bool(self.known[span.chunk] and (span.whole or not self._trusted[span.chunk]))

    def checked(self, chunk: int) -> None:
        self._trusted[chunk] = True

    def committed(self, keep: int) -> None:
        """A manifest of what is current is on the drive. Lock held."""
        self.kept = [*self.kept, self.current.copy()][-keep:]
        self._fresh[:] = False

    def unknown(self) -> list[int]:
        """Chunks without a checksum."""
        return np.flatnonzero(~self.known).tolist()

    def fresh(self) -> list[int]:
        """Chunks written since the last commit."""
        return np.flatnonzero(self._fresh).tolist()
