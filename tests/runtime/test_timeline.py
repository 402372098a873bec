"""The timeline counts always, keeps events only while recording, and loses nothing under threads."""

from __future__ import annotations

import threading

import pytest

from lohan_fx.errors import LohanError
from lohan_fx.runtime import timeline as timeline_module
from lohan_fx.runtime.timeline import Event, Timeline


def test_totals_are_counted_without_recording() -> None:
    timeline = Timeline()
    timeline.record("ssd", "read a", 1.0, 1.5, 4096)
    timeline.record("ssd", "read b", 2.0, 2.25, 1000)
    timeline.record("compute", "layer 0", 1.0, 4.0)
    assert timeline.busy_s == {"ssd": 0.75, "compute": 3.0}
    assert timeline.bytes == {"ssd": 5096, "compute": 0}


def test_events_are_kept_only_while_recording_and_come_by_start_time() -> None:
    timeline = Timeline()
    timeline.record("cpu", "before", 0.0, 1.0)
    timeline.start_recording()
    timeline.record("cpu", "long", 2.0, 9.0)
    timeline.record("h2d", "short", 1.0, 3.0, 7)
    assert timeline.stop_recording() == [Event("h2d", "short", 1.0, 3.0, 7), Event("cpu", "long", 2.0, 9.0)]
    timeline.record("cpu", "after", 10.0, 11.0)
    timeline.start_recording()
    assert timeline.stop_recording() == []


def test_a_stall_is_not_busy_time() -> None:
    timeline = Timeline()
    timeline.start_recording()
    timeline.record_stall("layer 3", 1.0, 1.5)
    assert timeline.stall_s == 0.5
    assert timeline.busy_s == {}
    assert timeline.stop_recording() == [Event("compute", "wait:layer 3", 1.0, 1.5)]


def test_snapshots_are_copies_and_their_difference_is_what_came_between() -> None:
    timeline = Timeline()
    timeline.record("ssd", "a", 0.0, 1.0, 10)
    earlier = timeline.snapshot()
    timeline.record("ssd", "b", 0.0, 2.0, 30)
    timeline.record("d2h", "c", 0.0, 4.0, 50)
    timeline.record_stall("d", 0.0, 8.0)
    assert earlier.busy_s == {"ssd": 1.0}
    between = timeline.snapshot().since(earlier)
    assert between.busy_s == {"ssd": 2.0, "d2h": 4.0}
    assert between.bytes == {"ssd": 30, "d2h": 50}
    assert between.stall_s == 8.0


def test_returned_totals_cannot_change_the_timeline() -> None:
    timeline = Timeline()
    timeline.record("ssd", "a", 0.0, 1.0, 10)
    timeline.busy_s["ssd"] = 99.0
    timeline.bytes["ssd"] = 99
    assert (timeline.busy_s, timeline.bytes) == ({"ssd": 1.0}, {"ssd": 10})


def test_recording_out_of_order_is_refused() -> None:
    timeline = Timeline()
    with pytest.raises(LohanError, match="no recording is running"):
        timeline.stop_recording()
    timeline.start_recording()
    with pytest.raises(LohanError, match="running already"):
        timeline.start_recording()


def test_concurrent_records_are_all_counted() -> None:
    timeline = Timeline()
    timeline.start_recording()
    together = threading.Barrier(4)

    def record_many() -> None:
        together.wait(timeout=10)
        for _ in range(500):
            timeline.record("ssd", "x", 0.0, 1.0, 2)
            timeline.record_stall("y", 0.0, 1.0)

    threads = [threading.Thread(target=record_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert timeline.busy_s == {"ssd": 2000.0}
    assert timeline.bytes == {"ssd": 4000}
    assert timeline.stall_s == 2000.0
    assert len(timeline.stop_recording()) == 4000


def test_spans_and_stalls_count_their_block_and_bytes_only_of_those_that_succeed() -> None:
    timeline = Timeline()
    timeline.start_recording()
    with timeline.span("h2d", "copy a", 10):
        pass
    with pytest.raises(ZeroDivisionError), timeline.span("h2d", "copy b", 20):
        _ = 1 // 0
    with timeline.stall("copy b"):
        pass
    assert timeline.bytes == {"h2d": 10}
    events = timeline.stop_recording()
    assert [(event.lane, event.label, event.bytes) for event in events] == [
        ("h2d", "copy a", 10),
        ("h2d", "copy b", 0),
        ("compute", "wait:copy b", 0),
    ]


class FakeClock:
    """``time`` for the timeline: stands still until told otherwise."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(timeline_module, "time", clock)
    return clock


def test_overlapping_spans_count_once_in_wall_seconds(clock: FakeClock) -> None:
    timeline = Timeline()
    with timeline.span("ssd", "read a"):
        clock.now_s += 1.0
        with timeline.span("ssd", "read b"), timeline.span("cpu", "update"):
            clock.now_s += 2.0
        clock.now_s += 4.0
    clock.now_s += 8.0
    with timeline.span("ssd", "write a"):
        clock.now_s += 16.0
    totals = timeline.snapshot()
    assert totals.busy_s == {"ssd": 7.0 + 2.0 + 16.0, "cpu": 2.0}
    assert totals.wall_s == {"ssd": 7.0 + 16.0, "cpu": 2.0}


def test_wall_seconds_of_an_open_span_are_split_between_snapshots(clock: FakeClock) -> None:
    timeline = Timeline()
    with timeline.span("ssd", "read a"):
        clock.now_s += 1.0
        earlier = timeline.snapshot()
        clock.now_s += 2.0
    later = timeline.snapshot()
    assert (earlier.wall_s, earlier.busy_s) == ({"ssd": 1.0}, {})
    assert (later.since(earlier).wall_s, later.since(earlier).busy_s) == ({"ssd": 2.0}, {"ssd": 3.0})


def test_a_recorded_job_counts_in_wall_seconds_without_its_idle_time() -> None:
    timeline = Timeline()
    timeline.record("compute", "forward", 1.0, 4.0, idle_s=0.5)
    totals = timeline.snapshot()
    assert totals.wall_s == totals.busy_s == {"compute": 2.5}
