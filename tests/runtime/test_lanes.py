"""Lanes: order, errors at the waiter, named timeouts, and a close that leaves nothing behind."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
import weakref
from functools import partial

import pytest

from lohan_fx.errors import LaneTimeout, LohanError
from lohan_fx.runtime.lanes import Lane, Work
from lohan_fx.runtime.timeline import Timeline
from tests.runtime.test_in_time import interrupted_at, lines_of

pytestmark = pytest.mark.usefixtures("leak_check")

PATIENCE_S = 10.0


class Gate:
    """A job that has begun (``entered``) and ends when told to."""

    def __init__(self, lane: Lane, label: str = "gate") -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.work = lane.submit(self._run, priority=-100, label=label)
        assert self.entered.wait(PATIENCE_S)

    def _run(self) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE_S)


class Tensorlike:
    """Something whose death can be watched."""


def test_work_returns_the_jobs_value() -> None:
    with Lane("ssd") as lane:
        work = lane.submit(lambda: 6 * 7, label="answer")
        assert work.wait(PATIENCE_S) == 42
        assert work.done()
        assert work.wait(0) == 42


def test_completed_work_needs_no_lane() -> None:
    work = Work.completed("there")
    assert work.done()
    assert work.wait(0) == "there"


def test_lower_priority_numbers_start_first_and_equals_in_order_of_submission() -> None:
    order: list[str] = []
    with Lane("ssd") as lane:
        gate = Gate(lane)
        for label, priority in [("w0", 5), ("r0", 0), ("w1", 5), ("urgent", -1), ("r1", 0)]:
            lane.submit(partial(order.append, label), priority=priority, label=label)
        gate.opened.set()
        lane.drain(PATIENCE_S)
    assert order == ["urgent", "r0", "r1", "w0", "w1"]


def test_the_waiter_gets_the_very_exception_once_noted_and_the_worker_lives_on() -> None:
    raised = OSError(5, "boom")

    def fail() -> None:
        raise raised

    with Lane("ssd") as lane:
        work = lane.submit(fail, label="read w3")
        for _ in range(2):
            with pytest.raises(OSError) as caught:
                work.wait(PATIENCE_S)
            assert caught.value is raised
        assert raised.__notes__ == ["raised by job 'read w3' on lane 'ssd'"]
        assert lane.submit(lambda: "alive").wait(PATIENCE_S) == "alive"


def test_even_a_system_exit_belongs_to_the_waiter() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with Lane("cpu") as lane:
        work = lane.submit(leave)
        with pytest.raises(SystemExit):
            work.wait(PATIENCE_S)
        assert lane.submit(lambda: "alive").wait(PATIENCE_S) == "alive"


def test_a_late_job_is_named_with_its_lane_and_state() -> None:
    with Lane("h2d") as lane:
        gate = Gate(lane, label="copy w1")
        queued = lane.submit(lambda: None, label="copy w2")
        with pytest.raises(LaneTimeout, match=r"'copy w1' on lane 'h2d'.*running"):
            gate.work.wait(0)
        with pytest.raises(LaneTimeout, match=r"'copy w2' on lane 'h2d'.*queued"):
            queued.wait(0)
        with pytest.raises(LaneTimeout, match=r"'h2d' to drain: \['copy w1'\] still running and 1 queued"):
            lane.drain(0)
        assert not queued.done()
        gate.opened.set()
        queued.wait(PATIENCE_S)


def test_a_timeout_tells_what_all_lanes_run_and_have_queued() -> None:
    with Lane("h2d") as lane, Lane("ssd", threads=2) as other, Lane("cpu"):
        gates = [Gate(lane, label="copy w1"), Gate(other, label="read w2"), Gate(other, label="read w3")]
        jobs = [other.submit(lambda: None, label=f"write w{n}") for n in range(10)]
        with pytest.raises(LaneTimeout) as caught:
            gates[0].work.wait(0)
        (note,) = caught.value.__notes__
        assert re.search(r"lohan-h2d-0 has been running 'copy w1' for \d+\.\d s", note)
        assert re.search(r"lohan-ssd-[01] has been running 'read w3' for", note)
        assert "10 queued on 'ssd': 'write w0', " in note and "'write w7', ..." in note
        assert "lane 'cpu' is idle" in note
        assert "MainThread: " in note and "test_lanes.py" in note
        for gate in gates:
            gate.opened.set()
        for job in jobs:
            job.wait(PATIENCE_S)


def test_a_jobs_own_timeout_error_is_not_taken_for_a_late_job() -> None:
    def fail() -> None:
        raise LaneTimeout("of another lane")

    with Lane("cpu") as lane, pytest.raises(LaneTimeout, match="of another lane"):
        lane.submit(fail).wait(PATIENCE_S)


def test_callbacks_run_once_on_the_worker_or_at_once() -> None:
    calls: list[tuple[str, str]] = []

    def note(name: str) -> None:
        calls.append((name, threading.current_thread().name))

    with Lane("d2h") as lane:
        gate = Gate(lane)
        gate.work.add_done_callback(lambda work: note("early" if work is gate.work else "wrong work"))
        gate.opened.set()
        lane.drain(PATIENCE_S)
        gate.work.add_done_callback(lambda work: note("late"))
    assert calls == [("early", "lohan-d2h-0"), ("late", threading.current_thread().name)]


def test_a_failing_callback_is_logged_and_harms_neither_the_others_nor_the_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[str] = []

    def fail(work: Work[None]) -> None:
        raise RuntimeError("callback broke")

    with caplog.at_level(logging.ERROR), Lane("d2h") as lane:
        gate = Gate(lane, label="grad w1")
        gate.work.add_done_callback(fail)
        gate.work.add_done_callback(lambda work: calls.append("second"))
        gate.opened.set()
        assert lane.submit(lambda: "alive").wait(PATIENCE_S) == "alive"
    assert calls == ["second"]
    assert "'grad w1'" in caplog.text and "callback broke" in caplog.text


def test_an_interrupt_at_any_line_of_submit_leaves_no_job_that_nobody_serves() -> None:
    with Lane("ssd") as lane:
        for line in lines_of(Lane.submit.__code__):
            while not lane._asleep:
                time.sleep(0.001)
            served: list[int] = []
            with interrupted_at(Lane.submit.__code__, line), contextlib.suppress(KeyboardInterrupt):
                lane.submit(partial(served.append, line))
            lane.drain(PATIENCE_S)
            assert lane.submit(lambda: 6 * 7).wait(PATIENCE_S) == 42
            assert served in ([], [line])
            lane.drain(PATIENCE_S)


def test_drain_covers_jobs_that_jobs_submit() -> None:
    order: list[str] = []
    with Lane("cpu") as lane:
        lane.submit(lambda: lane.submit(lambda: order.append("inner")))
        lane.drain(PATIENCE_S)
        assert order == ["inner"]


def test_drain_does_not_raise_a_jobs_error() -> None:
    with Lane("cpu") as lane:
        work = lane.submit(lambda: 1 // 0)
        lane.drain(PATIENCE_S)
        with pytest.raises(ZeroDivisionError):
            work.wait(0)


def test_close_lets_running_jobs_end_and_fails_queued_ones() -> None:
    lane = Lane("ssd")
    gate = Gate(lane, label="write w1")
    queued = lane.submit(lambda: None, label="write w2")
    with pytest.raises(LaneTimeout, match=r"'ssd' to close: \['write w1'\] still running"):
        lane.close(timeout_s=0)
    with pytest.raises(LohanError, match="lane closed: 'write w2'"):
        queued.wait(0)
    gate.opened.set()
    lane.close(PATIENCE_S)
    gate.work.wait(0)
    lane.close(PATIENCE_S)
    with pytest.raises(LohanError, match=r"'ssd' is closed: cannot submit 'write w3'"):
        lane.submit(lambda: None, label="write w3")


def test_a_lane_cannot_be_drained_or_closed_by_its_own_job() -> None:
    with Lane("cpu") as lane:
        for call in (lane.drain, lane.close):
            with pytest.raises(LohanError, match="one of its own jobs"):
                lane.submit(call).wait(PATIENCE_S)
        assert lane.submit(lambda: "alive").wait(PATIENCE_S) == "alive"


def test_threads_work_side_by_side_under_their_names() -> None:
    together = threading.Barrier(3)

    def meet() -> str:
        together.wait(PATIENCE_S)
        return threading.current_thread().name

    with Lane("ssd", threads=3) as lane:
        works = [lane.submit(meet) for _ in range(3)]
        assert {work.wait(PATIENCE_S) for work in works} == {"lohan-ssd-0", "lohan-ssd-1", "lohan-ssd-2"}
        assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("lohan-ssd-"))


def test_the_initializer_runs_in_every_worker_before_its_jobs() -> None:
    local = threading.local()
    together = threading.Barrier(2)

    def meet() -> str:
        together.wait(PATIENCE_S)
        return str(local.mark)

    def initialize() -> None:
        local.mark = "set"

    with Lane("cpu", threads=2, initializer=initialize) as lane:
        works = [lane.submit(meet) for _ in range(2)]
        assert [work.wait(PATIENCE_S) for work in works] == ["set", "set"]


def test_a_failing_initializer_fails_the_construction() -> None:
    def fail() -> None:
        raise OSError("no such core")

    with pytest.raises(OSError, match="no such core"):
        Lane("cpu", threads=2, initializer=fail)


def test_a_lane_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="asked for 0 threads"):
        Lane("cpu", threads=0)


def test_the_timeline_has_a_job_before_it_is_settled_and_no_bytes_of_failed_ones() -> None:
    timeline = Timeline()
    timeline.start_recording()
    with Lane("ssd", timeline=timeline) as lane:
        gate = Gate(lane)
        work = lane.submit(lambda: None, label="read w1", nbytes=4096)
        seen: list[dict[str, int]] = []
        work.add_done_callback(lambda work: seen.append(timeline.bytes))
        lane.submit(lambda: 1 // 0, label="read w2", nbytes=8192)
        gate.opened.set()
        lane.drain(PATIENCE_S)
    assert seen == [{"ssd": 4096}]
    events = timeline.stop_recording()
    assert [(event.lane, event.label, event.bytes) for event in events] == [
        ("ssd", "gate", 0),
        ("ssd", "read w1", 4096),
        ("ssd", "read w2", 0),
    ]
    assert all(event.start_s <= event.end_s for event in events)


def test_an_idle_worker_keeps_nothing_of_its_last_job_alive() -> None:
    died = threading.Event()
    held = Tensorlike()
    weakref.finalize(held, died.set)
    with Lane("h2d") as lane:
        work = lane.submit(partial(id, held))
        work.wait(PATIENCE_S)
        del held
        assert died.wait(PATIENCE_S)


def test_the_time_in_line_is_no_work() -> None:
    timeline = Timeline()
    timeline.start_recording()
    with Lane("ssd", timeline=timeline) as lane:
        gate = Gate(lane, "first")
        lane.submit(lambda: None, label="second")
        gate.opened.set()
        lane.drain(PATIENCE_S)
    first, second = timeline.stop_recording()
    assert (first.label, second.label) == ("first", "second")
    assert second.start_s >= first.end_s


def test_one_of_two_workers_that_is_stuck_is_told() -> None:
    lane = Lane("ssd", threads=2)
    gate = Gate(lane, "stuck")
    with pytest.raises(LaneTimeout, match=r"lane 'ssd' to close: \['stuck'\] still running"):
        lane.close(0.05)
    gate.opened.set()
    lane.close(PATIENCE_S)
