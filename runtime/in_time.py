"""in_time: calls to the system that may never return, made so that the main thread can stop waiting.

Guarantees: on the main thread a call ends with its result, its exception or ``LaneTimeout``, and Ctrl-C is heard
meanwhile: ``KeyboardInterrupt`` is raised once the call is over, so that nobody takes memory or files from under it, or
after ``INTERRUPT_S``. A call that hangs is left behind on its thread. On other threads (lanes), whose jobs are waited
for with a timeout already, it is made right there.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S, Lane, Work

T = TypeVar("T")
CLOSE_TIMEOUT_S = 1.0
INTERRUPT_S = 2.0


def patience_s(error: BaseException) -> float:
    """How long, after ``error``, to wait for calls under way: not long where it says that a drive may hang, or is Ctrl-C."""
    may_hang = isinstance(error, LaneTimeout) or not isinstance(error, Exception)
    return INTERRUPT_S if may_hang else DEFAULT_TIMEOUT_S


def several(calls: Iterable[tuple[Callable[[], None], str]], threads: int) -> None:
    """Make all ``calls``, each with what it does in words, so many at a time. Raises the first error when none is under way any
    more; those that hang are left behind."""
    left = iter(calls)
    first = next(left, None)
    if first is None:  # as at most commits, which must not pay for threads
        return
    under_way: deque[Work[None]] = deque()
    lane = Lane("several", threads=threads)
    close_s = DEFAULT_TIMEOUT_S
    try:
        for call, what in itertools.chain((first,), left):
            if len(under_way) == 2 * threads:
                under_way.popleft().wait()
            under_way.append(lane.submit(call, label=what))
        while under_way:
            under_way.popleft().wait()
    except BaseException as error:
        close_s = patience_s(error)
        raise
    finally:
        with suppress(LaneTimeout):
            lane.close(close_s)


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
