"""A window of bytes under way: who would exceed it waits, and is told what for."""

from __future__ import annotations

import threading

import pytest

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.byte_window import ByteWindow
from lohan_fx.runtime.timeline import Timeline

PATIENCE_S = 30.0


def take(window: ByteWindow, nbytes: int, label: str, **timeout: float) -> None:
    window.wait_for(nbytes, label, **timeout)
    window.take(nbytes)


def test_no_more_is_under_way_than_the_window_holds() -> None:
    window = ByteWindow(Timeline(), 100)
    take(window, 60, "a")
    take(window, 40, "b")
    taken = threading.Event()

    def third() -> None:
        take(window, 50, "c")
        taken.set()

    threading.Thread(target=third, daemon=True).start()
    window.give_back(40)  # 60 are left: not enough room yet
    assert not taken.wait(0.05)
    window.give_back(60)
    assert taken.wait(PATIENCE_S) and window.peak_bytes == 100


def test_what_is_larger_than_the_window_goes_alone() -> None:
    timeline = Timeline()
    window = ByteWindow(timeline, 100)
    take(window, 500, "large")
    with pytest.raises(LaneTimeout, match=r"waited 0.01 s for small: 500 bytes are still under way"):
        take(window, 1, "small", timeout_s=0.01)
    assert timeline.stall_s >= 0.01
    window.give_back(500)
    take(window, 1, "small", timeout_s=0.01)


def test_without_a_limit_nobody_waits() -> None:
    timeline = Timeline()
    window = ByteWindow(timeline)
    for _ in range(100):
        take(window, 1 << 40, "x", timeout_s=0.01)
    assert timeline.stall_s == 0.0


def test_the_narrowest_limit_counts() -> None:
    window = ByteWindow(Timeline())
    for asked, limit in ((100, 100), (200, 100), (50, 50)):
        window.narrow(asked)
        assert window.limit_bytes == limit
