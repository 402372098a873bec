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
from types import TracebackType

from lohan_fx.errors import LohanError

COMPUTE_LANE = "compute"
STALL = "wait:"
"""What labels of compute begin with where it waits; what it waits for follows."""


@dataclass(frozen=True)
class Event:
    """One job on one lane; ``bytes`` is what it moved, 0 if it moved nothing."""

    lane: str
    label: str
    start_s: float
    end_s: float
    bytes: int = 0

    @property
    def is_stall(self) -> bool:
        """Whether it is no work, but compute waited for another lane."""
        return self.lane == COMPUTE_LANE and self.label.startswith(STALL)


@dataclass(frozen=True)
class LaneTotals:
    """Totals since the timeline was made: seconds busy and bytes moved per lane, and seconds compute waited.

    ``busy_s`` adds up the threads of a lane; ``wall_s`` are the seconds in which at least one of them was busy.
    """

    busy_s: Mapping[str, float]
    bytes: Mapping[str, int]
    stall_s: float
    wall_s: Mapping[str, float]

    def since(self, earlier: LaneTotals) -> LaneTotals:
        """The part of these totals that came after ``earlier``, a snapshot of the same timeline."""
        return LaneTotals(
            busy_s={lane: total - earlier.busy_s.get(lane, 0.0) for lane, total in self.busy_s.items()},
            bytes={lane: total - earlier.bytes.get(lane, 0) for lane, total in self.bytes.items()},
            stall_s=self.stall_s - earlier.stall_s,
            wall_s={lane: total - earlier.wall_s.get(lane, 0.0) for lane, total in self.wall_s.items()},
        )


class Timeline:
    """Thread-safe recorder for the lanes compute, h2d, d2h, ssd and cpu."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_s: dict[str, float] = {}
        self._wall_s: dict[str, float] = {}
        self._bytes: dict[str, int] = {}
        self._stall_s = 0.0
        self._open_spans: dict[str, int] = {}
        self._wall_counted_to_s: dict[str, float] = {}
        self._events: list[Event] | None = None

    def record(
        self, lane: str, label: str, start_s: float, end_s: float, bytes: int = 0, *, idle_s: float = 0.0
    ) -> None:
        """Count one finished job on ``lane``, of which it idled ``idle_s``.

        For lanes that do one job at a time: where jobs overlap, ``wall_s`` needs ``span``, which sees them begin.
        """
        with self._lock:
            self._wall_s[lane] = self._wall_s.get(lane, 0.0) + (end_s - start_s) - idle_s
            self._count(lane, label, start_s, end_s, bytes, idle_s)

    def record_stall(self, label: str, start_s: float, end_s: float) -> None:
        """Count time compute spent waiting for ``label``; it is in ``stall_s``, never in compute's ``busy_s``."""
        with self._lock:
            self._stall_s += end_s - start_s
            if self._events is not None:
                self._events.append(Event(COMPUTE_LANE, f"{STALL}{label}", start_s, end_s))

    def span(self, lane: str, label: str, bytes: int = 0) -> contextlib.AbstractContextManager[None]:
        """Count the block as one job on ``lane``; its bytes count only if it does not raise."""
        return _Span(self, lane, label, bytes)

    def _begin(self, lane: str) -> float:
        with self._lock:
            start_s = time.perf_counter()
            self._count_wall(lane, start_s)
            self._open_spans[lane] = self._open_spans.get(lane, 0) + 1
            return start_s

    def _end(self, lane: str, label: str, start_s: float, moved: int) -> None:
        with self._lock:
            end_s = time.perf_counter()
            self._count_wall(lane, end_s)
            self._open_spans[lane] -= 1
            self._count(lane, label, start_s, end_s, moved, 0.0)

    def _count(self, lane: str, label: str, start_s: float, end_s: float, moved: int, idle_s: float) -> None:
        """Count a finished job, except for ``wall_s``. Called with the lock held."""
        self._busy_s[lane] = self._busy_s.get(lane, 0.0) + (end_s - start_s) - idle_s
        self._bytes[lane] = self._bytes.get(lane, 0) + moved
        if self._events is not None:
            self._events.append(Event(lane, label, start_s, end_s, moved))

    def _count_wall(self, lane: str, now_s: float) -> None:
        """Bring ``wall_s`` up to ``now_s``: open spans count already. Called with the lock held."""
        counted_to_s = self._wall_counted_to_s.get(lane, now_s)
        self._wall_s[lane] = self._wall_s.get(lane, 0.0) + (now_s - counted_to_s if self._open_spans.get(lane) else 0.0)
        self._wall_counted_to_s[lane] = now_s

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
        """All totals at one moment; take two and use ``later.since(earlier)``. Open spans are in ``wall_s`` alone."""
        with self._lock:
            for lane in self._open_spans:
                self._count_wall(lane, time.perf_counter())
            return LaneTotals(dict(self._busy_s), dict(self._bytes), self._stall_s, dict(self._wall_s))

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


class _Span:
    """``Timeline.span``: of each transfer, so not a generator, which takes three times as long."""

    __slots__ = ("_bytes", "_label", "_lane", "_start_s", "_timeline")

    def __init__(self, timeline: Timeline, lane: str, label: str, nbytes: int) -> None:
        self._timeline, self._lane, self._label, self._bytes = timeline, lane, label, nbytes

    def __enter__(self) -> None:
        self._start_s = self._timeline._begin(self._lane)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timeline._end(self._lane, self._label, self._start_s, 0 if error is not None else self._bytes)
