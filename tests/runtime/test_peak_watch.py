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
    watch = PeakWatch(lambda: notes.append(memory.bytes))
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


def test_what_a_note_raises_is_told_to_who_asks(memory: Memory) -> None:
    def note() -> None:
        raise ZeroDivisionError("no book")

    watch = PeakWatch(note)
    watch._thread.join(LONG_S)
    with pytest.raises(LohanError, match="memory was watched until this: no book"):
        watch.raise_error()
    watch.stop()
    watch.stop()
