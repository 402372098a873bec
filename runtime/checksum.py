"""checksum: of a chunk on disk: XXH3, 64 bits, seed 0. It finds damage; it does not keep a forger out."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

Compare = Callable[[], None]
"""Compares what was read with what was written: raises ``StoreError`` where they differ."""
Checksums = tuple[int | None, ...]
"""Of what is to be written: one for each chunk of which it has all, None for others; of scratch, one for all of it."""


def checksum(data: bytes | bytearray | memoryview) -> int:
    """The checksum of ``data``; releases the GIL for large ones."""
    return xxhash.xxh3_64_intdigest(data)
