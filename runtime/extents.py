"""extents: the named stretches of bytes of a store: which there are, and where in its files each lies. No I/O.

Guarantees: what is added keeps its place; looking one up takes no lock.
Assumes: one caller at a time adds; ``ends``, the sizes of the files, are taken on disk before what was laid out is added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from lohan_fx.runtime.host_pool import PAGE_BYTES, page_padded_bytes
from lohan_fx.runtime.striping import Piece, stripe_extent
from lohan_fx.runtime.versions import Versions


@dataclass(frozen=True)
class Extent:
    """``chunk_bytes``: what is kept of it is kept by chunks of this size; None: scratch. ``versions`` once kept."""

    nbytes: int
    pieces: tuple[Piece, ...]
    chunk_bytes: int | None = None
    versions: Versions | None = None


class Extents:
    """All extents of one store, striped over its files by ``weights``."""

    def __init__(self, stripe_bytes: int, weights: Sequence[float]) -> None:
        self._stripe_bytes = stripe_bytes
        self._weights = list(weights)
        self._named: Mapping[str, Extent] = {}

    def __getitem__(self, name: str) -> Extent:
        return self._named[name]

    def all(self) -> Mapping[str, Extent]:
        """Those that there are now, by name."""
        return self._named

    def add(self, extents: Mapping[str, Extent]) -> None:
        """Add those, in place of what had the same name."""
        # A new dict, never changed in place: readers look names up without the lock.
        self._named = {**self._named, **extents}

    def asked(self, name: str, offset: int, nbytes: int, what: str) -> Extent:
        """The extent ``name``. Raises ``ValueError`` unless ``nbytes`` from ``offset`` on are inside, from a page's start."""
        extent = self._named.get(name)
        if extent is None:
            raise ValueError(f"{what}: there is no such extent; allocate it first")
        if offset % PAGE_BYTES or not 0 <= offset <= offset + nbytes <= extent.nbytes:
            raise ValueError(
                f"{what}, which has {extent.nbytes} bytes: stay inside, at an offset that is a multiple of {PAGE_BYTES}"
            )
        return extent

    # --- places -----------------------------------------------------------------------------------------------

    def laid_out(self, sizes: Mapping[str, int], chunk_bytes: Mapping[str, int], ends: list[int]) -> dict[str, Extent]:
        """New extents of the given byte sizes behind ``ends``, which grow. Those in ``chunk_bytes`` may be kept.

        Raises ``ValueError`` for a negative size or a name in use.
        """
        found: dict[str, Extent] = {}
        for name, nbytes in sizes.items():
            if name in self._named:
                raise ValueError(
                    f"allocate: {nbytes} bytes asked for extent {name!r}, which exists with "
                    f"{self._named[name].nbytes} bytes; allocate each name once"
                )
            if nbytes < 0:
                raise ValueError(f"allocate: {nbytes} bytes asked for extent {name!r}; ask for at least 0")
            found[name] = Extent(nbytes, self._place(page_padded_bytes(nbytes), ends), chunk_bytes.get(name))
        return found

    def with_slots(self, extents: Mapping[str, Extent], keep: int, ends: list[int]) -> dict[str, Extent]:
        """``extents``, those with chunks with ``keep`` more places each."""
        found = dict(extents)
        for name, extent in extents.items():
            if extent.chunk_bytes is not None and extent.nbytes:
                padded = page_padded_bytes(extent.nbytes)
                more = [self._place(padded, ends) for _ in range(keep)]
                versions = Versions(padded, extent.chunk_bytes, [extent.pieces, *more])
                found[name] = replace(extent, versions=versions)
        return found

    def _place(self, padded_bytes: int, ends: list[int]) -> tuple[Piece, ...]:
        return stripe_extent(padded_bytes, self._stripe_bytes, self._weights, ends)

    # --- what checkpoints keep --------------------------------------------------------------------------------

    def kept(self) -> Iterator[tuple[str, Versions]]:
        """(name, versions) of those that checkpoints keep."""
        for name, extent in self._named.items():
            if extent.versions is not None:
                yield name, extent.versions

    def kept_ends(self, files: int) -> list[int]:
        """The size that each of so many files needs for what checkpoints keep."""
        ends = [0] * files
        for piece in (piece for _, versions in self.kept() for slot in versions.slots for piece in slot):
            ends[piece.file_index] = max(ends[piece.file_index], piece.file_offset_bytes + piece.nbytes)
        return ends
