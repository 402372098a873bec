"""moments: who waits until the device has come to where it was when something was asked for.

A device that runs behind the thread that asks may still use the memory that a copy goes to. Where it has come that far by the
time the copy is ready, nobody waits; else one thread does, for one moment after the other.

Guarantees: moments are waited for in the order of ``after``, so that none waits for a later one. Any thread.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable

from lohan_fx.runtime.device_link import DeviceLink, Moment
from lohan_fx.runtime.lanes import Lane, Work

THERE: Work[None] = Work.completed(None)


class Passing:
    """A moment of the device; ``work`` once a thread is to wait for it."""

    __slots__ = ("moment", "work")

    def __init__(self, moment: Moment) -> None:
        self.moment = moment
        self.work: Work[None] | None = THERE if moment is None else None


class Moments:
    """The moments of one device; ``lane`` has the thread that waits."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._coming: deque[Passing] = deque()

    def after(self, link: DeviceLink) -> Passing:
        """The moment at which the device has done all that this thread has asked it for; on a CPU it has."""
        found = Passing(link.mark())
        if found.work is None:
            with self._lock:
                self._forget_past(link)
                self._coming.append(found)
        return found

    def then(self, link: DeviceLink, passing: Passing, call: Callable[[Work[None]], object]) -> None:
        """``call(work)`` once the device is past that moment, here and now if it is. ``work`` may have failed with it.

        Raises ``LohanError`` once the lane is closed.
        """
        with self._lock:
            if passing.work is None and not link.has_come(passing.moment):
                # Those before it first: their copies may be ready before it has come.
                self._forget_past(link)
                while self._coming and passing.work is None:
                    self._wait_for(link, self._coming.popleft())
                if passing.work is None:
                    self._wait_for(link, passing)
            work = passing.work or THERE
        work.add_done_callback(call)

    def _forget_past(self, link: DeviceLink) -> None:
        """Nobody need wait for those that have come. Called with the lock held."""
        while self._coming and link.has_come(self._coming[0].moment):
            self._coming.popleft()

    def _wait_for(self, link: DeviceLink, passing: Passing) -> None:
        wait = functools.partial(link.finish, passing.moment)
        passing.work = self._lane.submit(wait, label="what the device was asked for")
