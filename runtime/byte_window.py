"""byte_window: so many bytes may be under way; who would exceed that waits.

Guarantees: what is under way never exceeds ``limit_bytes``, or is one single piece that is larger. ``wait_for`` is woken by
``give_back`` from any thread, hears Ctrl-C, and has a timeout that names what it waited for.

Assumes: one thread waits and takes at a time; whoever took gives back, whatever becomes of the transfer.
"""

from __future__ import annotations

import functools
import threading

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S, wait_hearing
from lohan_fx.runtime.timeline import Timeline


class ByteWindow:
    """``limit_bytes`` None: no limit."""

    def __init__(self, timeline: Timeline, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._timeline = timeline
        self._used = self._peak = 0
        self._changed = threading.Condition()

    @property
    def peak_bytes(self) -> int:
        """The most that was ever under way."""
        return self._peak

    def narrow(self, limit_bytes: int) -> None:
        """From now on no more than ``limit_bytes``."""
        self.limit_bytes = limit_bytes if self.limit_bytes is None else min(self.limit_bytes, limit_bytes)

    def wait_for(self, nbytes: int, label: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Return once there is room for ``nbytes``; waiting is a stall of compute called ``label``."""
        with self._changed:
            if not self._has_room(nbytes):
                with self._timeline.stall(label):
                    room = functools.partial(self._changed.wait_for, lambda: self._has_room(nbytes))
                    if not wait_hearing(room, timeout_s):
                        raise LaneTimeout(
                            f"waited {timeout_s:g} s for {label}: {self._used:,} bytes are still under way"
                        )

    def take(self, nbytes: int) -> None:
        """Count ``nbytes``, for which there is room, as under way."""
        with self._changed:
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def give_back(self, nbytes: int) -> None:
        with self._changed:
            self._used -= nbytes
            self._changed.notify_all()

    def _has_room(self, nbytes: int) -> bool:
        return not self._used or self.limit_bytes is None or self._used + nbytes <= self.limit_bytes
