"""scratch: the host memory that an op takes beside what it reads and makes, only while it runs.

Nothing announces it: a kernel that lacks instructions for a dtype converts what it is given, and one that has them brings
weights into an order of its own, in memory that neither torch's allocator nor its profiler reports. So what is resident is looked
at while the op runs. What stays resident afterwards is no scratch: a library's own buffers, generated code.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Iterator

import torch

from lohan_fx.passes.annotate import at_hint
from lohan_fx.process_memory import return_free_memory
from lohan_fx.runtime.resident_limit import resident_bytes

NOTICED_BYTES = 1 << 20
"""Less is not told from what other threads of the process do meanwhile."""
LOOKED_AT_BYTES = 8 << 20
"""An op that reads and writes less is not watched: what it could take is within the rounding of a plan."""
_EVERY_S = 1e-4
_ITEM_BYTES = (1, 2, 4, 8)
_INEXACT_SHARE, _INEXACT_BYTES = 0.03, 512 << 10
"""What is resident is seen every so often, by pages."""
_SOME_PAGES_BYTES = 128 << 10
"""What runs of one op differ by; so many above whole MiB, which several copies often take together, count as those."""
_LOCK = threading.Lock()


def watched(run: Callable[[], object]) -> int:
    """Bytes that ``run()``, called once, had resident at the most beside what was there before or is afterwards; 0 below
    ``NOTICED_BYTES``."""
    with _LOCK, _no_collection():
        return_free_memory()  # else it may be taken from holes, which are resident already
        with _Watch() as watch:
            made = run()
        return_free_memory()
        found = watch.most_bytes - max(watch.before_bytes, resident_bytes())
        del made
    return found if found >= NOTICED_BYTES else 0


def as_copy(nbytes: int, values: Iterable[object]) -> int:
    """``nbytes`` as the size of one of ``values`` in some dtype, where it is about that: what kernels take is mostly such a copy,
    and a plan should not depend on when it was looked at. Else rounded to MiB. Symbolic sizes count at their hints: a graph
    whose sizes were compared with ``nbytes`` would hold for no other ones."""
    inexact = max(_INEXACT_SHARE * nbytes, _INEXACT_BYTES)
    counts = [at_hint(value.numel()) for value in values if isinstance(value, torch.Tensor)]
    copies = (count * item for count in counts for item in _ITEM_BYTES)
    near = [copy for copy in copies if abs(copy - nbytes) <= inexact]
    if near:
        return min(near, key=lambda copy: (abs(copy - nbytes), copy))
    return -(-(nbytes - _SOME_PAGES_BYTES) // NOTICED_BYTES) * NOTICED_BYTES


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What the collector frees while an op runs would hide as much of what the op takes."""
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()


class _Watch:
    """What is resident within a ``with`` block: before it, and at the most. A thread looks at it, so what is there for less than
    some tenths of a millisecond may be missed, and what other threads take counts."""

    def __init__(self) -> None:
        self.before_bytes = self.most_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="lohan-watch", daemon=True)

    def __enter__(self) -> _Watch:
        try:
            self._thread.start()
            self.before_bytes = self.most_bytes = resident_bytes()  # with the thread's own
        except BaseException:  # an interrupt, after which nobody calls ``__exit__``: the thread would look for good
            self._over.set()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.most_bytes = max(self.most_bytes, resident_bytes())
