"""Calls that never return are left behind by the main thread, which says what every thread was doing."""

from __future__ import annotations

import functools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pytest

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime import in_time as in_time_module
from lohan_fx.runtime.in_time import InTime, several
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


def test_several_calls_are_made_at_the_same_time() -> None:
    met, made = threading.Barrier(3, timeout=60.0), list[int]()

    def call(number: int) -> None:
        met.wait()
        made.append(number)

    several(((functools.partial(call, number), f"call {number}") for number in range(12)), threads=3)
    assert sorted(made) == list(range(12))
    several((), threads=3)


@pytest.mark.parametrize("fails", [0, 5, 11])
def test_the_first_error_of_several_comes_when_none_is_under_way(fails: int) -> None:
    under_way, lock, begun = set[int](), threading.Lock(), list[int]()

    def call(number: int) -> None:
        with lock:
            begun.append(number)
            under_way.add(number)
        time.sleep(0.005)
        with lock:
            under_way.discard(number)
        if number == fails:
            raise OSError(f"call {number} failed")

    with pytest.raises(OSError, match=f"call {fails} failed"):
        several(((functools.partial(call, number), f"call {number}") for number in range(12)), threads=3)
    assert not under_way and len(begun) <= fails + 1 + 2 * 3


def test_those_of_several_that_hang_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work.wait, "__defaults__", (0.05,))
    monkeypatch.setattr(in_time_module, "INTERRUPT_S", 0.05)
    released = threading.Event()
    with pytest.raises(LaneTimeout, match=r"'call 0' on lane 'several'"):
        several(((functools.partial(released.wait, 60.0), f"call {number}") for number in range(3)), threads=2)
    released.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lohan-several"):
            thread.join(60.0)


def test_an_interrupt_is_heard_once_the_call_is_over() -> None:
    in_time, ended = InTime(), list[bool]()

    def call() -> None:
        interrupt_main_thread()
        time.sleep(0.05)
        ended.append(True)

    with interruptible(), pytest.raises(KeyboardInterrupt):
        in_time(call, "writing")
    assert ended == [True]
    assert in_time(lambda: 5, "asking again") == 5
    in_time.close()


def test_an_interrupt_does_not_wait_for_a_call_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan_fx.runtime.in_time.INTERRUPT_S", 0.05)
    in_time, released = InTime(), threading.Event()

    def call() -> None:
        interrupt_main_thread()
        released.wait(60.0)
        # As above: the thread is a daemon that nobody waits for.
        threading.current_thread().name = "left behind"

    with interruptible(), pytest.raises(KeyboardInterrupt):
        in_time(call, "writing")
    assert in_time(lambda: 5, "asking again") == 5
    released.set()
    in_time.close()
    while any(thread.name.startswith("lohan-") for thread in threading.enumerate()):
        time.sleep(0.01)


def interrupt_main_thread() -> None:
    """Ctrl-C, heard by the thread that waits for this one."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


@contextmanager
def interruptible() -> Iterator[None]:
    """A shell that starts the tests in the background has them ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interrupted_at(code: CodeType, line: int) -> Iterator[None]:
    """SIGINT comes as this thread is about to run ``line`` of ``code``, the first time."""

    def global_trace(frame: FrameType, event: str, argument: object) -> Any:
        return local_trace if frame.f_code is code else None

    def local_trace(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return local_trace

    with interruptible():
        sys.settrace(global_trace)
        try:
            yield
        finally:
            sys.settrace(None)


def lines_of(code: CodeType) -> list[int]:
    """Where ``interrupted_at`` can interrupt ``code``."""
    return sorted({line for _, _, line in code.co_lines() if line is not None} - {code.co_firstlineno})
