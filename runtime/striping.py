"""Where the bytes of an extent lie: stripes over several files in proportion to their weights. Pure numbers."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """``nbytes`` of an extent from ``start_bytes`` on; they lie at ``file_offset_bytes`` in file ``file_index``."""

    start_bytes: int
    nbytes: int
    file_index: int
    file_offset_bytes: int


@dataclass(frozen=True)
class Part:
    """The bytes ``start_bytes`` to ``end_bytes`` of an extent, at ``file_offset_bytes`` in file ``file_index``."""

    start_bytes: int
    end_bytes: int
    file_index: int
    file_offset_bytes: int


def stripe_extent(nbytes: int, stripe_bytes: int, weights: Sequence[float], ends: list[int]) -> tuple[Piece, ...]:
    """Place ``nbytes`` in stripes, each in the file that would then be the least full for its weight.

    ``ends`` are the files' sizes in bytes and grow by what is placed, so that small extents spread too. Stripes that
    follow each other in one file are one piece. The same calls always give the same pieces.
    """
    pieces: list[Piece] = []
    for start in range(0, nbytes, stripe_bytes):
        length = min(stripe_bytes, nbytes - start)
        full = [(end + length) / weight for end, weight in zip(ends, weights, strict=True)]
        index = full.index(min(full))
        last = pieces[-1] if pieces else None
        if last is not None and last.file_index == index:
            pieces[-1] = Piece(last.start_bytes, last.nbytes + length, index, last.file_offset_bytes)
        else:
            pieces.append(Piece(start, length, index, ends[index]))
        ends[index] += length
    return tuple(pieces)


def most_bytes(room_bytes: Sequence[int], weights: Sequence[float]) -> tuple[int, int]:
    """(bytes, file): how much files with so much room take in stripes until the first of them is full, to a stripe each, and
    which one that is."""
    all_weights = math.fsum(weights)
    limits = [room * (all_weights / weight) for room, weight in zip(room_bytes, weights, strict=True)]
    first = limits.index(min(limits))
    return round(limits[first]), first


def parts_between(pieces: Sequence[Piece], start_bytes: int, end_bytes: int) -> Iterator[Part]:
    """The parts, in order, that make up ``start_bytes`` to ``end_bytes`` of the extent that ``pieces`` cover."""
    first = bisect_right(pieces, start_bytes, key=lambda piece: piece.start_bytes) - 1
    for index in range(max(first, 0), len(pieces)):
        piece = pieces[index]
        start = max(start_bytes, piece.start_bytes)
        end = min(end_bytes, piece.start_bytes + piece.nbytes)
        if start >= end:
            return
        yield Part(start, end, piece.file_index, piece.file_offset_bytes + start - piece.start_bytes)
