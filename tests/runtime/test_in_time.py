"""Calls that never return are left behind by the main thread, which says what every thread was doing."""

from __future__ import annotations

import threading

import pytest

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.in_time import InTime
from lohan_fx.runtime.lanes import Work

pytestmark = pytest.mark.usefixtures("leak_check")


def test_results_and_exceptions_come_through() -> None:
    in_time = InTime()
    assert in_time(lambda: threading.current_thread().name, "asking") == "lohan-store-0"
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, "dividing")
    in_time.close()


def test_other_threads_do_it_themselves() -> None:
    in_time, found = InTime(), list[str]()
    thread = threading.Thread(
        target=lambda: found.append(in_time(lambda: threading.current_thread().name, "x")), name="me"
    )
    thread.start()
    thread.join()
    assert found == ["me"]


def test_a_call_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work.wait, "__defaults__", (0.05,))
    in_time, released = InTime(), threading.Event()
    lanes = []
    with pytest.raises(LaneTimeout, match=r"'reading 3 bytes' on lane 'store'") as caught:
        in_time(lambda: lanes.append(threading.current_thread()) or released.wait(60.0), "reading 3 bytes")
    (note,) = caught.value.__notes__
    assert "MainThread: " in note and "lohan-store-0: wait (threading.py:" in note
    monkeypatch.undo()
    assert in_time(lambda: 5, "asking again") == 5  # on a new thread: it does not queue behind the hanging one
    released.set()
    in_time.close()
    # The abandoned lane idles as a daemon for as long as the process lives; here it must not count as a leak.
    lanes[0].name = "left behind"
