"""What each lane did and when: totals that are always counted, events only while someone records.

Guarantees: every method may be called from any thread; ``snapshot`` is consistent (nothing is counted in its
seconds and not in its bytes). Assumes: times come from ``time.perf_counter()``, so that they share one clock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lohan_fx.errors import LohanError

COMPUTE_LANE = "compute"


@dataclass(frozen=True)
class Event:
    """One job on one lane; ``bytes`` is what it moved, 0 if it moved nothing."""

    lane: str
    label: str
    start_s: float
    end_s: float
    bytes: int = 0


@dataclass(frozen=True)
class LaneTotals:
    """Totals since the timeline was made: seconds busy and bytes moved per lane, and seconds compute waited."""

    busy_s: Mapping[str, float]
    bytes: Mapping[str, int]
    stall_s: float

    def since(self, earlier: LaneTotals) -> LaneTotals:
        """The part of these totals that came after ``earlier``, a snapshot of the same timeline."""
        return LaneTotals(
            busy_s={lane: total - earlier.busy_s.get(lane, 0.0) for lane, total in self.busy_s.items()},
            bytes={lane: total - earlier.bytes.get(lane, 0) for lane, total in self.bytes.items()},
            stall_s=self.stall_s - earlier.stall_s,
        )


class Timeline:
    """Thread-safe recorder for the lanes compute, h2d, d2h, ssd and cpu."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_s: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._stall_s = 0.0
        self._events: list[Event] | None = None

    def record(
        self, lane: str, label: str, start_s: float, end_s: float, bytes: int = 0, *, idle_s: float = 0.0
    ) -> None:
        """Count one job on ``lane``, of which it idled ``idle_s``.

        A lane with two threads can be busy for two seconds per second.
        """
        with self._lock:
            self._busy_s[lane] = self._busy_s.get(lane, 0.0) + (end_s - start_s) - idle_s
            self._bytes[lane] = self._bytes.get(lane, 0) + bytes
            if self._events is not None:
                self._events.append(Event(lane, label, start_s, end_s, bytes))

    def record_stall(self, label: str, start_s: float, end_s: float) -> None:
        """Count time compute spent waiting for ``label``; it is in ``stall_s``, never in compute's ``busy_s``."""
        with self._lock:
            self._stall_s += end_s - start_s
            if self._events is not None:
                self._events.append(Event(COMPUTE_LANE, f"wait:{label}", start_s, end_s))

    @contextlib.contextmanager
    def span(self, lane: str, label: str, bytes: int = 0) -> Iterator[None]:
        """Count the block as one job on ``lane``; its bytes count only if it does not raise."""
        start_s, moved = time.perf_counter(), 0
        try:
            yield
            moved = bytes
        finally:
            self.record(lane, label, start_s, time.perf_counter(), moved)

    @contextlib.contextmanager
    def stall(self, label: str) -> Iterator[None]:
        """Count the block as time compute waited for ``label``."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.record_stall(label, start_s, time.perf_counter())

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds of finished jobs per lane (a copy)."""
        with self._lock:
            return dict(self._busy_s)

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes moved by finished jobs per lane (a copy)."""
        with self._lock:
            return dict(self._bytes)

    @property
    def stall_s(self) -> float:
        """Seconds compute waited for other lanes."""
        with self._lock:
            return self._stall_s

    def snapshot(self) -> LaneTotals:
        """All totals at one moment; take two and use ``later.since(earlier)``."""
        with self._lock:
            return LaneTotals(dict(self._busy_s), dict(self._bytes), self._stall_s)

    def start_recording(self) -> None:
        """Keep events from here on. Raises ``LohanError`` if a recording is running already."""
        with self._lock:
            if self._events is not None:
                raise LohanError(
                    f"start_recording: a recording with {len(self._events)} events is running already; "
                    "call stop_recording() first"
                )
            self._events = []

    def stop_recording(self) -> list[Event]:
        """The events since ``start_recording``, by start time. Raises ``LohanError`` if nothing was recording."""
        with self._lock:
            if self._events is None:
                raise LohanError("stop_recording: no recording is running; call start_recording() first")
            events, self._events = self._events, None
        return sorted(events, key=lambda event: event.start_s)
