"""Arrival: many small transfers that somebody waits for as one.

Guarantees: settled once all parts are done or one has failed *and* the rest are done, so that nobody reuses memory
that a late part still writes. ``wait`` raises the first failure, a copy without traceback, and always has a
timeout that names what was waited for. Callbacks run on the thread that settled it.

Assumes: every part reports exactly once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lohan_fx.errors import LaneTimeout, without_traceback
from lohan_fx.runtime.device_link import Moment
from lohan_fx.runtime.gate import Gate
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S, wait_hearing


class Arrival:
    """``parts`` transfers under one ``label``. ``timeout_s``: how long ``wait`` is patient where its caller does not say."""

    def __init__(self, label: str, parts: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.label = label
        self._timeout_s = timeout_s
        self.moment: Moment = None
        self._parts = parts
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._done = Gate()
        self._callbacks: list[Callable[[], None]] = []
        if parts == 0:
            self._done.open()

    def part_done(self, error: BaseException | None = None, moment: Moment = None) -> None:
        """One part is there, or failed with ``error``. ``moment``: when its copy completes on its stream."""
        with self._lock:
            self._parts -= 1
            self._error = self._error or error
            # Parts of one arrival are copied by one stream in order, so the last one's moment covers all.
            self.moment = moment if moment is not None else self.moment
            if self._parts:
                return
            self._done.open()
            callbacks, self._callbacks = self._callbacks, []
        for call in callbacks:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """``call()`` once settled, here and now if that has happened."""
        with self._lock:
            if not self._done.is_open:
                self._callbacks.append(call)
                return
        call()

    def done(self) -> bool:
        return self._done.is_open

    @property
    def error(self) -> BaseException | None:
        return self._error

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once everything is there; raises the first failure, or ``LaneTimeout``."""
        self.settle(timeout_s)
        if self._error is not None:
            # Its traceback will lead here, and from here to the original: a cycle that keeps the tensors of a whole graph.
            raise without_traceback(self._error)

    def settle(self, timeout_s: float | None = None) -> None:
        """Return once everything is there or has failed; raises ``LaneTimeout``."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if not wait_hearing(self._done.wait, timeout_s):
            raise LaneTimeout(f"waited {timeout_s:g} s for {self.label}: {self._parts} transfers are still under way")
