"""interrupts: Ctrl-C where Python would lose it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_waits() -> Iterator[None]:
    """A SIGINT that comes within counts at the end: what its handler raises in a finalizer, Python prints and forgets, and
    a collection of garbage after tracing runs thousands, of Dynamo's weak references."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # handlers run in the main thread only
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])
