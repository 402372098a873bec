"""peak_watch: looks at the process's memory, and has a note taken wherever there is more of it than ever before.

Guarantees: between two looks lie ``INTERVAL_S``, whatever the graph is doing, also within an op; below the peak a look
costs some 10 microseconds. ``note`` runs on the watch's thread. ``stop`` returns once it will not run any more.

Assumes: ``note`` is quick and takes no lock that a thread holds while it waits for ours. It returns the resident bytes that it
noted: memory may be gone again by then, and the peak is looked for until a note has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lohan_fx.errors import LohanError
from lohan_fx.runtime.resident_limit import resident_bytes

INTERVAL_S = 0.01
STEP_BYTES = 2 << 20
STEP_SHARE = 1 / 256
"""A note is taken where there is more than at the last one by at least so much, and by this share of it."""
STOP_TIMEOUT_S = 10.0


class PeakWatch:
    """Calls ``note`` while resident memory rises; begins at once."""

    def __init__(self, note: Callable[[], int]) -> None:
        self._note = note
        self._noted_bytes = 0
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="lohan-peak-watch", daemon=True)
        self._thread.start()

    def begin_anew(self) -> None:
        """Forget the peak so far."""
        self._noted_bytes = 0

    def raise_error(self) -> None:
        """Raise what ``note`` has raised, after which nobody watches."""
        if self._error is not None:
            raise LohanError(f"memory was watched until this: {self._error}") from self._error

    def stop(self) -> None:
        """End the thread. Idempotent."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_TIMEOUT_S)

    def _watch(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            found_bytes = resident_bytes()
            if found_bytes < self._noted_bytes + max(STEP_BYTES, int(STEP_SHARE * self._noted_bytes)):
                continue
            try:
                self._noted_bytes = max(self._noted_bytes, self._note())
            except BaseException as error:  # raised to whoever asks for the table
                self._error = error
                return
