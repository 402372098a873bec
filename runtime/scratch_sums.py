"""scratch_sums: checksums of what is only lent to the store (activations, gradients), so that a flipped bit is found.

Kept in memory, per write, and compared by the read of the same bytes; others read unchecked.
"""

from __future__ import annotations

import threading
from collections import defaultdict

from lohan_fx.errors import StoreError
from lohan_fx.runtime.checksum import checksum


class ScratchSums:
    """Per extent: offset -> (bytes, checksum) of what was written last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[str, dict[int, tuple[int, int]]] = defaultdict(dict)

    def begin_write(self, name: str, start: int, nbytes: int) -> None:
        """These bytes are about to change: what is known of any of them holds no more."""
        with self._lock:
            sums = self._sums[name]
            for offset in [o for o, (length, _) in sums.items() if o < start + nbytes and start < o + length]:
                del sums[offset]

    def end_write(self, name: str, start: int, view: memoryview) -> None:
        found = checksum(view)
        with self._lock:
            self._sums[name][start] = len(view), found

    def check(self, name: str, start: int, view: memoryview, what: str) -> None:
        """Raises ``StoreError`` where ``view`` was just read and is not what was written."""
        with self._lock:
            known = self._sums[name].get(start)
        if known is not None and known[0] == len(view) and known[1] != checksum(view):
            raise StoreError(f"{what}: what was read is not what was written: the drive or its memory flips bits")
