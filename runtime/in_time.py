"""in_time: calls to the system that may never return, made so that the main thread can stop waiting.

Guarantees: on the main thread a call ends with its result, its exception or ``LaneTimeout``, and Ctrl-C is heard
meanwhile: ``KeyboardInterrupt`` is raised once the call is over, so that nobody takes memory or files from under it, or
after ``INTERRUPT_S``. A call that hangs is left behind on its thread. On other threads (lanes), whose jobs are waited
for with a timeout already, it is made right there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.lanes import Lane

T = TypeVar("T")
CLOSE_TIMEOUT_S = 1.0
INTERRUPT_S = 2.0


class InTime:
    """``in_time(fn, "reading ...")`` is ``fn()``."""

    def __init__(self) -> None:
        self._lane: Lane | None = None

    def __call__(self, fn: Callable[[], T], what: str) -> T:
        if threading.current_thread() is not threading.main_thread():
            return fn()
        if self._lane is None:
            self._lane = Lane("store")
        over = threading.Event()

        def call() -> T:
            try:
                return fn()
            finally:
                over.set()

        try:
            return self._lane.submit(call, label=what).wait()
        except LaneTimeout:
            # Whoever comes next must not queue behind a call that hangs.
            self._lane = None
            raise
        except BaseException:
            # Its own error, and then it is over; or this thread was interrupted, maybe while it submitted.
            if not over.wait(INTERRUPT_S):
                self._lane = None
            raise

    def close(self) -> None:
        """End the thread, unless it hangs: it is a daemon."""
        lane, self._lane = self._lane, None
        if lane is not None:
            with suppress(LaneTimeout):
                lane.close(CLOSE_TIMEOUT_S)
