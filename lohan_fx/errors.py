"""The exceptions lohan_fx raises on its own behalf.

A caller's mistake is a ``ValueError`` or ``TypeError``; these are for the rest. Every message says what was
asked, what was found, and what to do.
"""

from __future__ import annotations

import copy
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

STACK_DEPTH = 8


class LohanError(RuntimeError):
    """Base of all errors below, so that a caller can catch them together."""


class OffloadedParameterError(LohanError):
    """An offloaded parameter (or its gradient) was read or written outside the compiled model."""


class InfeasiblePlan(LohanError):
    """No plan fits the budgets; names the tier, the bytes missing, and the smallest change that would fit."""


class NoDrive(InfeasiblePlan, ValueError):
    """No plan fits memory alone, and the hardware profile has no drive for the rest."""


class CaptureError(LohanError):
    """The model could not be captured as one graph; names the place and the reason."""


class VerifyError(LohanError):
    """A rewritten graph breaks an invariant; names the node, its neighbourhood and the pass that broke it."""


class StoreError(LohanError):
    """Reading, writing or allocating in the NVMe store failed; names the file, the slot and what was asked."""


class WearBudgetExceeded(LohanError):
    """The next step would write more to the drives than ``max_bytes_written``; what was trained is whole.

    ``bytes_written`` of ``max_bytes`` are used; ``checkpoint`` is the number of the one made now, None without one.
    """

    def __init__(self, message: str, *, bytes_written: int, max_bytes: int, checkpoint: int | None = None) -> None:
        super().__init__(message)
        self.bytes_written = bytes_written
        self.max_bytes = max_bytes
        self.checkpoint = checkpoint


class LaneTimeout(LohanError):
    """A lane did not finish what somebody waited for within the time allowed.

    The message says what was waited for; a note under it (shown with the traceback) what each lane was running and had
    queued then, and where every thread was.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.add_note("\n".join([*(line for describe in _describers for line in describe()), *_threads_now()]))


_describers: list[Callable[[], Iterable[str]]] = []


def describe_timeouts_with(describe: Callable[[], Iterable[str]]) -> None:
    """Let ``describe()`` tell, line by line, what else was going on when a ``LaneTimeout`` was raised.

    It is called on a thread that may hold any lock, so it must take none.
    """
    _describers.append(describe)


def _threads_now() -> list[str]:
    frames = sys._current_frames()
    lines = ["what every thread was doing:"]
    for thread in threading.enumerate():
        found = traceback.extract_stack(frames[thread.ident], limit=STACK_DEPTH) if thread.ident in frames else []
        where = " < ".join(f"{entry.name} ({Path(entry.filename).name}:{entry.lineno})" for entry in reversed(found))
        lines.append(f"  {thread.name}: {where or 'starting or ending'}")
    return lines


def without_traceback(error: BaseException) -> BaseException:
    """A copy of ``error`` to raise where it is waited for: what failed keeps the original, and a traceback leads to tensors of
    every frame that it went through. The original itself where its class cannot be copied."""
    try:
        return copy.copy(error)
    except Exception:
        return error


class StepError(LohanError):
    """Forward, backward and step were called in an order that would change the numbers."""
