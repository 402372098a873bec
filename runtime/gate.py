"""gate: what many wait at until one opens it, once and for good.

``threading.Event`` does the same with a condition, whose making and every wait make locks of their own; a transfer has
several of them, and each microsecond of them holds the interpreter (docs/0043).

Guarantees: ``wait`` returns True once ``open`` was called, however many wait. Where Ctrl-C comes between one waiter's two
calls of the lock, those who wait then are let through when their time is over. Assumes: it is opened once.
"""

from __future__ import annotations

import threading


class Gate:
    """Closed until ``open``."""

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """Let everybody through, now and from now on. Once."""
        self.is_open = True
        self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is open, after waiting for that for ``timeout_s`` at most."""
        if self.is_open:
            return True
        if self._lock.acquire(timeout=timeout_s):
            self._lock.release()  # for the next one who waits
            return True
        return self.is_open
