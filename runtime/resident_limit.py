"""resident_limit: holes in the heap go back to the system before the process outgrows its promise, or what is expected of it.

Activations of many sizes come and go among those that stay, and what was freed in between counts as resident until the
C library is asked to return it. That takes milliseconds, so it is asked only where the limit is passed.

Guarantees: a look costs microseconds below the limit. Above it, it asks again only after ``STEP_BYTES`` more, or as soon as that
much beyond the limit is passed, and after twice as much each time that it asked in vain again: where others in the process took
memory, the limit is passed for good.
So it is not asked while the process grows by as much as it is beyond the limit, with all given back, and ``STEP_BYTES``;
where giving back helps, or below the limit, the first step counts again. What the graph takes until the next look counts as
taken already (``begin``): a loss over a large vocabulary takes a GB between two parameters; and so does what was asked for
earlier and has not arrived. Of what it takes in a ``Room``, only as much as was not in RAM yet: what is free there would be given
back to be cleared by the kernel again at once.

Before the promise is passed it asks once more, in vain or not; and at every look as long as enough is known to be free for the
promise to hold (``free_bytes``): what a large value was to take counted when it was asked last, and is free once that value
has died. Where that is not enough, there is a last resort (docs/0058).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from lohan_fx import ops

STEP_BYTES = 16 << 20
IN_VAIN_BYTES = STEP_BYTES // 2
"""Who gave back less gave back in vain."""


class Rise(NamedTuple):
    """Bytes that a graph takes at the most beyond those of a moment: of the heap, of the room for what is brought to it, and of
    that for what outlives it."""

    heap_bytes: int
    brought_bytes: int
    outliving_bytes: int


Rises = Mapping[ops.Look, Rise]
"""What the graph takes from each look until the next."""
_NO_RISE = Rise(0, 0, 0)


class ResidentLimit:
    """``look`` calls ``give_back`` where the process has, or is about to have, more than ``limit_bytes`` in RAM; None: never.

    ``growth_bytes(rise)``: by how much the process grows by it, ``sum(rise)`` or less. ``coming_bytes()``: by how much it grows
    as what was asked for before arrives. ``promise_bytes``: what must never be passed; None: ``STEP_BYTES`` beyond the limit.
    ``free_bytes()``: how much ``give_back`` gives back at the least. ``last_resort()`` is asked where the promise would be passed
    all the same; False: there is nothing more to do.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        give_back: Callable[[], None],
        growth_bytes: Callable[[Rise], int] = sum,
        coming_bytes: Callable[[], int] = lambda: 0,
        promise_bytes: int | None = None,
        free_bytes: Callable[[], int] = lambda: 0,
        last_resort: Callable[[], bool] = lambda: False,
    ) -> None:
        self._most_bytes = self._limit_bytes = limit_bytes
        never_bytes = (limit_bytes or 0) + STEP_BYTES
        self._near_bytes = never_bytes if promise_bytes is None else promise_bytes - IN_VAIN_BYTES
        self._asks_at = sorted({never_bytes, self._near_bytes})
        self._give_back, self._last_resort = give_back, last_resort
        self._growth_bytes, self._coming_bytes, self._free_bytes = growth_bytes, coming_bytes, free_bytes
        self._again_bytes = 0
        self._step_bytes = STEP_BYTES
        self._rises: Rises = {}

    def expect(self, nbytes: int) -> None:
        """From now on so many bytes are the limit, if the promised one is not lower: what exceeds them are holes."""
        if self._most_bytes is not None:
            self._limit_bytes = min(self._most_bytes, nbytes)
            self._again_bytes, self._step_bytes = 0, STEP_BYTES

    def begin(self, rises: Rises) -> None:
        """A graph that takes ``rises`` begins."""
        self._rises = rises
        self.look(None)

    def look(self, at: ops.Look) -> None:
        if self._limit_bytes is None:
            return
        rise_bytes = sum(rise := self._rises.get(at, _NO_RISE))
        before_bytes = resident_bytes() + self._coming_bytes()
        if before_bytes + rise_bytes > self._limit_bytes:
            rise_bytes = self._growth_bytes(rise)
        expected_bytes = before_bytes + rise_bytes
        if expected_bytes <= self._limit_bytes:
            self._again_bytes, self._step_bytes = min(self._again_bytes, self._asks_at[0]), STEP_BYTES
        may_pass = expected_bytes <= max(self._limit_bytes, self._again_bytes)
        if may_pass and not self._would_hold(expected_bytes, sum(rise) - rise_bytes):
            return
        self._give_back()
        after_bytes = resident_bytes() + self._coming_bytes()
        # What the rise was to take of rooms is among what was given back.
        if after_bytes + self._growth_bytes(rise) > self._near_bytes and self._last_resort():
            after_bytes = resident_bytes() + self._coming_bytes()
        in_vain = before_bytes - after_bytes < IN_VAIN_BYTES
        if not in_vain:
            self._step_bytes = STEP_BYTES
        reached_bytes = after_bytes + rise_bytes
        beyond = [nbytes for nbytes in self._asks_at if nbytes > reached_bytes]
        self._again_bytes = min([reached_bytes + self._step_bytes, *beyond])
        if in_vain:
            self._step_bytes *= 2

    def _would_hold(self, expected_bytes: int, reused_bytes: int) -> bool:
        """Whether the promise, near which ``expected_bytes`` are, holds with what is free given back, ``reused_bytes`` of which
        the graph takes again."""
        if expected_bytes <= self._near_bytes:
            return False
        free_bytes = self._free_bytes() - reused_bytes
        return free_bytes >= IN_VAIN_BYTES and expected_bytes - free_bytes <= self._near_bytes


def resident_bytes() -> int:
    """What the process has in RAM, as /proc/self/statm tells: quicker than ``status``, and as exact as needed here."""
    text = ctypes.create_string_buffer(128)
    if _pread(_statm(os.getpid()), text, len(text) - 1, 0) <= 0:
        raise OSError("/proc/self/statm cannot be read: is /proc mounted?")
    return int(text.value.split(None, 2)[1]) * mmap.PAGESIZE


@functools.lru_cache(maxsize=1)
def _statm(pid: int) -> int:
    """/proc/self/statm of the process ``pid``, which is this one, open as long as it lives; what a fork inherits tells of its
    parent. Opening it each time takes seven times as long as reading it, and while threads of the lanes use the interpreter
    a hundred microseconds and more."""
    del pid
    return os.open("/proc/self/statm", os.O_RDONLY)


_pread = ctypes.PyDLL(None).pread
"""As ``os.pread``, but it keeps the interpreter meanwhile, which to get back may take a hundred times as long as reading."""
_pread.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long)
_pread.restype = ctypes.c_ssize_t
