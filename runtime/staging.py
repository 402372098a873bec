"""staging: whole extents between tensors and the store, in parts, by as many requests at a time as the drives serve.

The calling thread copies and casts, with torch's threads; a lane moves what is copied already, or brings what is copied next.

Guarantees: memory is a page-aligned buffer of the largest part for each request under way (``requests_at_once``); it and the
lane are there during a call, or as long as they are ``kept``. What is raised is raised once no request is under way any more,
except where that might never be: after a timeout, or Ctrl-C (``in_time``). What is left behind then keeps its memory, and
``store.close`` does not wait for it.
Assumes: parts of one call do not overlap.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.host_pool import Buffer, HostPool, Reservation
from lohan_fx.runtime.in_time import patience_s
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S, Lane, Work
from lohan_fx.runtime.nvme_store import NvmeStore, requests_at_once

REQUEST_BYTES = 4 << 20
"""Of a part, for those who cut."""

_STAGING = "staging"


def requests_bytes(drives: int) -> int:
    """What calls with parts of ``REQUEST_BYTES`` take at most."""
    return REQUEST_BYTES * requests_at_once(drives, REQUEST_BYTES)


@dataclass(frozen=True)
class Part:
    """``nbytes`` of ``extent`` from ``offset`` on, a whole number of pages. ``copy`` fills a buffer with them, to be written; or
    takes them out of one, as they were read."""

    extent: str
    offset: int
    nbytes: int
    copy: Callable[[torch.Tensor], object]


class Staging:
    """What is between tensors and ``store``. One call at a time: other threads wait."""

    def __init__(self, store: NvmeStore) -> None:
        self._store = store
        self._calling = threading.RLock()
        self._keepers = 0
        self._behind = False
        self._requests: _Requests | None = None

    @contextmanager
    def kept(self, *, behind: bool = False) -> Iterator[None]:
        """Keep memory and threads for all calls in here: many small ones would make them anew each. ``behind``: a write is over
        once its last part is copied, and what it raises may be raised by a later one, or at the end."""
        with self._calling, self._ended_if_failing():
            before = self._keepers, self._behind
            try:
                self._keepers, self._behind = self._keepers + 1, self._behind or behind
                yield
            finally:
                self._keepers, self._behind = before
            self._settle()

    def write(self, parts: Sequence[Part]) -> None:
        """Write each part. Raises ``StoreError`` and ``LaneTimeout`` as the store does."""
        with self._calling, self._ended_if_failing():
            requests = self._requests_for(parts)
            for part in parts:
                requests.settle_those_done()
                buffer = requests.buffer()
                part.copy(buffer.tensor)
                requests.write(functools.partial(self._write, part, buffer), f"write {part.extent}")
            self._settle()

    def _write(self, part: Part, buffer: Buffer) -> None:
        with buffer:
            self._store.write(part.extent, part.offset, buffer.tensor, part.nbytes)

    def read(self, parts: Sequence[Part]) -> None:
        """Read each part. Raises as ``write``; some parts may have been copied then."""
        with self._calling, self._ended_if_failing():
            requests = self._requests_for(parts)
            requests.settle()
            left = iter(parts)
            under_way: deque[tuple[Part, Buffer, Work[None]]] = deque()

            def begin(count: int) -> None:
                for part in itertools.islice(left, count):
                    buffer = requests.buffer()
                    reading = functools.partial(self._store.read, part.extent, part.offset, buffer.tensor, part.nbytes)
                    under_way.append((part, buffer, requests.begin(reading, f"read {part.extent}")))

            begin(requests.count)
            while under_way:
                part, buffer, work = under_way.popleft()
                work.wait()
                part.copy(buffer.tensor)
                buffer.release()
                begin(1)
            self._settle()

    def _requests_for(self, parts: Sequence[Part]) -> _Requests:
        largest_bytes = max((part.nbytes for part in parts), default=1)
        if self._requests is not None and self._requests.nbytes < largest_bytes:
            self._requests.settle()
            self._end()
        if self._requests is None:
            most = requests_at_once(self._store.drives, largest_bytes)
            count = most if self._keepers else max(1, min(most, len(parts)))
            self._requests = _Requests(self._store, count, largest_bytes)
        return self._requests

    def _settle(self) -> None:
        """At the end of a call: wait for its writes, unless it is among some that are behind, and give up what nobody keeps."""
        if self._requests is not None and not self._behind:
            self._requests.settle()
        if not self._keepers:
            self._end()

    @contextmanager
    def _ended_if_failing(self) -> Iterator[None]:
        """With whatever is raised in here, no request is under way any more, nor will one be."""
        try:
            yield
        except BaseException as error:
            self._end(patience_s(error))
            raise

    def _end(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.close(timeout_s)


class _Requests:
    """Buffers of ``nbytes`` for ``count`` requests at a time, and a lane that makes them; of a single one, the calling thread."""

    def __init__(self, store: NvmeStore, count: int, nbytes: int) -> None:
        self.count = count
        self.nbytes = nbytes
        self._store = store
        self._pool = HostPool({_STAGING: Reservation(count, nbytes)})
        self._lane = Lane(_STAGING, threads=count) if count > 1 else None
        self._writes: deque[Work[None]] = deque()

    def buffer(self) -> Buffer:
        """One that no request uses any more. Raises what a write raised that it waited for."""
        while (free := self._pool.try_acquire(_STAGING)) is None:
            self._writes.popleft().wait()
        return free

    def begin(self, request: Callable[[], None], label: str) -> Work[None]:
        if self._lane is not None:
            return self._lane.submit(request, label=label)
        request()
        return Work.completed(None)

    def write(self, request: Callable[[], None], label: str) -> None:
        """``begin`` one that ``settle`` waits for."""
        self._writes.append(self.begin(request, label))

    def settle_those_done(self) -> None:
        """Raise what a write raised that is over."""
        while self._writes and self._writes[0].done():
            self._writes.popleft().wait()

    def settle(self) -> None:
        """Wait for all writes."""
        while self._writes:
            self._writes.popleft().wait()

    def close(self, timeout_s: float) -> None:
        """Once none is under way. Those that are so after ``timeout_s`` are left to themselves: their threads are daemons."""
        try:
            with suppress(LaneTimeout):
                if self._lane is not None:
                    self._lane.close(timeout_s)
                self._pool.close(force=True)
        finally:
            if self._lane is not None:
                self._store.leave_behind(self._lane.threads)
