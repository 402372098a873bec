"""garbage: graphs that planning makes and drops go soon, not when Python happens to look for garbage.

A graph and its nodes lead to each other, so one that was dropped stays until the collector has found it; and that looks through
everything only once a quarter has been added to all that there is, which with torch and a library of models imported are
hundreds of thousands of objects: tens of MB of dropped graphs, more or fewer from run to run, beside what a promise has room for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from lohan_fx.runtime.interrupts import interrupt_waits

USUAL_THRESHOLDS = 700, 10, 10
"""Python's own, of which others may have made more."""


@contextmanager
def collected_soon() -> Iterator[None]:
    """What is made and dropped within is collected by what is made within: what was there before is not looked through, which
    saves its time too. It may still die; as garbage it is found afterwards. Nothing is done where somebody has frozen
    objects for themselves, or a caller is within already: ``gc.unfreeze`` knows all or none."""
    if gc.get_freeze_count():
        yield
        return
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    with interrupt_waits():
        gc.collect()
    try:
        gc.freeze()
        gc.collect()  # of nothing; what there is counts anew from here
        gc.set_threshold(*USUAL_THRESHOLDS)
        gc.enable()
        yield
    finally:
        if not enabled:
            gc.disable()
        gc.set_threshold(*thresholds)
        gc.unfreeze()
