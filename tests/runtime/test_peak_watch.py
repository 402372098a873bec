"""The watch takes a note when memory rises, and only then."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lohan_fx.errors import LohanError
from lohan_fx.runtime import peak_watch
from lohan_fx.runtime.peak_watch import STEP_BYTES, PeakWatch

LONG_S = 30.0


class Memory:
    """What the process is said to use. ``looks`` is released once per look."""

    def __init__(self) -> None:
        self.bytes = 1 << 30
        self.looks = threading.Semaphore(0)

    def read(self) -> int:
        self.looks.release()
        return self.bytes

    def await_looks(self, count: int) -> None:
        """So many looks begin after this call; the one before the last of them is over."""
        while self.looks.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self.looks.acquire(timeout=LONG_S)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, leak_check: None) -> Iterator[Memory]:
    found = Memory()
    monkeypatch.setattr(peak_watch, "resident_bytes", found.read)
    monkeypatch.setattr(peak_watch, "INTERVAL_S", 1e-3)
    yield found


def test_a_note_for_each_new_peak(memory: Memory) -> None:
    notes: list[int] = []

    def note() -> int:
        notes.append(memory.bytes)
        return memory.bytes

    watch = PeakWatch(note)
    memory.await_looks(3)
    first = memory.bytes
    memory.bytes += STEP_BYTES // 2
    memory.await_looks(3)
    assert notes == [first], "so little more is no new peak"
    memory.bytes = second = 2 * first
    memory.await_looks(3)
    memory.bytes = first
    memory.await_looks(3)
    assert notes == [first, second]
    watch.begin_anew()
    memory.await_looks(3)
    assert notes == [first, second, first]
    watch.stop()
    memory.bytes = 3 * first
    assert notes == [first, second, first]
    watch.raise_error()


def test_a_peak_that_was_gone_before_it_was_noted_is_looked_for_again(memory: Memory) -> None:
    low, noted = memory.bytes, threading.Semaphore(0)

    def late() -> int:
        noted.release()
        return low

    watch = PeakWatch(late)
    memory.bytes = 2 * low
    for _ in range(3):
        assert noted.acquire(timeout=LONG_S)
    watch.stop()


def test_what_a_note_raises_is_told_to_who_asks(memory: Memory) -> None:
    def note() -> int:
        raise ZeroDivisionError("no book")

    watch = PeakWatch(note)
    watch._thread.join(LONG_S)
    with pytest.raises(LohanError, match="memory was watched until this: no book"):
        watch.raise_error()
    watch.stop()
    watch.stop()
