"""scratch_sums: checksums of what is only lent to the store (activations, gradients), so that a flipped bit is found.

Kept in memory, per write, and compared by the read of the same bytes; others read unchecked.
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict

from lohan_fx.errors import StoreError
from lohan_fx.runtime.checksum import Checksums, Compare, checksum


class ScratchSums:
    """Per extent: offset -> (bytes, checksums) of what was written last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[str, dict[int, tuple[int, Checksums]]] = defaultdict(dict)

    def begin_write(self, name: str, start: int, nbytes: int) -> None:
        """These bytes are about to change: what is known of any of them holds no more."""
        with self._lock:
            sums = self._sums[name]
            for offset in [o for o, (length, _) in sums.items() if o < start + nbytes and start < o + length]:
                del sums[offset]

    def end_write(self, name: str, start: int, nbytes: int, checksums: Checksums) -> None:
        """They are written, and have these ``checksums``."""
        with self._lock:
            self._sums[name][start] = nbytes, checksums

    def comparisons(self, name: str, start: int, view: memoryview, what: str) -> list[Compare]:
        """What compares ``view``, which was just read, with what was written."""
        with self._lock:
            known = self._sums[name].get(start)
        if known is None or known[0] != len(view):
            return []
        return [functools.partial(_compare, known[1], view, what)]


def _compare(expected: Checksums, view: memoryview, what: str) -> None:
    if expected != (checksum(view),):
        raise StoreError(f"{what}: what was read is not what was written: the drive or its memory flips bits")
