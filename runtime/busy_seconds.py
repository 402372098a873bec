"""busy_seconds: how long a lane worked, by the events of a step: recorded or simulated."""

from __future__ import annotations

from collections.abc import Iterable

from lohan_fx.runtime.timeline import Event

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same seconds as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def intervals(events: Iterable[Event]) -> list[Interval]:
    """When at least one of ``events`` was under way."""
    return union((event.start_s, event.end_s) for event in events)


def covered_s(events: Iterable[Event]) -> float:
    """Seconds in which at least one of ``events`` was under way."""
    return sum((end_s - start_s for start_s, end_s in intervals(events)), 0.0)


def uncovered_s(events: Iterable[Event], stalls: Iterable[Event]) -> float:
    """Seconds of ``events`` in which none of ``stalls`` was under way; these may lie outside them, too."""
    stalls = list(stalls)
    return covered_s([*events, *stalls]) - covered_s(stalls)


def busy_s(events: Iterable[Event], lane: str) -> float:
    """Seconds in which ``lane`` worked, however many threads it has; of compute without its stalls."""
    of_lane = [event for event in events if event.lane == lane]
    return uncovered_s(of_lane, (event for event in of_lane if event.is_stall))
