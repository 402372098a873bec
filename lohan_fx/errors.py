"""The exceptions lohan_fx raises on its own behalf.

A caller's mistake is a ``ValueError`` or ``TypeError``; these are for the rest. Every message says what was
asked, what was found, and what to do.
"""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path


class LohanError(RuntimeError):
    """Base of all errors below, so that a caller can catch them together."""


class OffloadedParameterError(LohanError):
    """An offloaded parameter (or its gradient) was read or written outside the compiled model."""


class InfeasiblePlan(LohanError):
    """No plan fits the budgets; names the tier, the bytes missing, and the smallest change that would fit."""


class CaptureError(LohanError):
    """The model could not be captured as one graph; names the place and the reason."""


class VerifyError(LohanError):
    """A rewritten graph breaks an invariant; names the node, its neighbourhood and the pass that broke it."""


class StoreError(LohanError):
    """Reading, writing or allocating in the NVMe store failed; names the file, the slot and what was asked."""


class LaneTimeout(LohanError):
    """A lane did not finish what somebody waited for within the time allowed.

    The message says what was waited for; a note under it (shown with the traceback) what every thread was doing then.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.add_note(_threads_now())


def _threads_now() -> str:
    frames = sys._current_frames()
    lines = ["what every thread was doing:"]
    for thread in threading.enumerate():
        found = traceback.extract_stack(frames[thread.ident], limit=4) if thread.ident in frames else []
        where = " < ".join(f"{entry.name} ({Path(entry.filename).name}:{entry.lineno})" for entry in reversed(found))
        lines.append(f"  {thread.name}: {where or 'starting or ending'}")
    return "\n".join(lines)


class StepError(LohanError):
    """Forward, backward and step were called in an order that would change the numbers."""
