"""Lanes: worker threads over one priority queue, and the handles by which others wait for their jobs.

Guarantees:
- Jobs start lowest priority number first, and in the order of submission within a priority. With one thread they
  also finish in that order.
- A job that raises never ends its worker: the exception is raised, the same object, wherever the job is waited for.
- Every submitted job is settled exactly once: with its value, its exception, or "lane closed". No wait can hang:
  each has a timeout and its ``LaneTimeout`` names what was waited for.
- A settled job's callbacks run on the thread that settled it, after waiters have been released. ``drain`` and
  ``close`` return after the callbacks of the jobs they cover.
- An idle worker holds no reference to the last job, so a job's tensors die with its caller's references.

Assumes: jobs do not wait for later jobs of the same lane (with one thread that can only time out); the process does
not fork and use the lane in the child, where the workers do not exist.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from lohan_fx.errors import LaneTimeout, LohanError, describe_timeouts_with
from lohan_fx.runtime.gate import Gate
from lohan_fx.runtime.timeline import Timeline

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 300.0
"""Long enough for any one honest job; a caller that waits for a long queue (a whole step) allows more."""

HEARING_S = 0.5
SHOWN_QUEUED = 8
"""How many of the queued jobs a ``LaneTimeout`` names."""

_LOG = logging.getLogger(__name__)
_lanes: list[weakref.ref[Lane]] = []


def wait_hearing(wait: Callable[[float], bool], timeout_s: float) -> bool:
    """``wait(timeout_s)``, in pieces, so that Ctrl-C is heard: a signal that reaches the main thread just before it
    falls asleep is handled only when it wakes."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        if wait(min(left_s, HEARING_S)):
            return True
        if left_s <= HEARING_S:
            return False


class Work(Generic[T]):
    """The result of a submitted job, there or still to come."""

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_started", "_value", "label", "lane")

    def __init__(self, *, label: str, lane: str) -> None:
        self.label = label
        self.lane = lane
        self._lock = threading.Lock()
        self._done = Gate()
        self._started = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Work[T]], object]] = []

    @classmethod
    def completed(cls, value: T) -> Work[T]:
        """A result that is there already, for callers that sometimes have nothing to wait for."""
        work: Work[T] = cls(label="completed", lane="none")
        work._finish(value)
        return work

    def wait(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> T:
        """The job's value. Raises the job's exception, or ``LaneTimeout`` if it is late."""
        if not wait_hearing(self._done.wait, timeout_s):
            state = "running" if self._started else "queued"
            raise LaneTimeout(
                f"waited {timeout_s:g} s for {self.label!r} on lane {self.lane!r}: it is still {state}; "
                "if the machine is only slow, allow a longer timeout, else look at what this lane is doing"
            )
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._done.is_open

    def add_done_callback(self, fn: Callable[[Work[T]], object]) -> None:
        """Call ``fn(self)`` once settled: on the settling thread, or here and now if that has happened.

        A callback must not block on this work's lane. What it raises is logged, since nobody waits for it.
        """
        with self._lock:
            if not self._done.is_open:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def _finish(self, value: T) -> None:
        self._value = value
        self._settle()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._settle()

    def _settle(self) -> None:
        # Under the lock a callback is either in the list taken here, or its adder sees the gate open: never lost.
        with self._lock:
            self._done.open()
            callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            self._call(fn)

    def _call(self, fn: Callable[[Work[T]], object]) -> None:
        try:
            fn(self)
        except Exception:
            _LOG.exception("a done-callback of %r on lane %r failed", self.label, self.lane)


class _Job:
    """A submitted function and who hears of its end."""

    __slots__ = ("fn", "nbytes", "started_s", "work")

    def __init__(self, fn: Callable[[], Any], nbytes: int, work: Work[Any]) -> None:
        self.fn = fn
        self.nbytes = nbytes
        self.work = work
        self.started_s = 0.0


class Lane:
    """Worker threads named ``lohan-<name>-<i>`` that serve one queue.

    ``initializer`` runs first in each worker (``torch.set_num_threads`` for Adam); if it raises, so does this
    constructor. Every job's time, and the bytes of those that succeeded, go to ``timeline`` under ``name``.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int = 1,
        timeline: Timeline | None = None,
        initializer: Callable[[], None] | None = None,
    ) -> None:
        if threads < 1:
            raise ValueError(f"lane {name!r}: asked for {threads} threads; a lane needs at least 1")
        self.name = name
        self._timeline = timeline
        self._initializer = initializer
        self._changed = threading.Condition()  # of who drains: a job wakes one worker, and nobody else
        self._queue: list[tuple[int, int, _Job]] = []  # by priority, and then as they came
        self._sequence = itertools.count()
        self._asleep = 0  # workers that wait for a ``_wake`` each
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._running: dict[threading.Thread, _Job] = {}
        self._closed = False
        starts: list[Work[None]] = [Work(label=f"start of worker {i}", lane=name) for i in range(threads)]
        # Daemons, so that a worker stuck in a device or disk call cannot hold up the interpreter's exit.
        self._threads = [
            threading.Thread(target=self._serve, args=(started,), name=f"lohan-{name}-{i}", daemon=True)
            for i, started in enumerate(starts)
        ]
        for thread in self._threads:
            thread.start()
        _lanes.append(weakref.ref(self, _lanes.remove))
        try:
            for started in starts:
                started.wait()
        except BaseException:
            self.close()
            raise

    @property
    def threads(self) -> tuple[threading.Thread, ...]:
        """Its workers."""
        return tuple(self._threads)

    def submit(self, fn: Callable[[], T], *, priority: int = 0, label: str = "", nbytes: int = 0) -> Work[T]:
        """Queue ``fn``; ``label`` names it in errors and the timeline, ``nbytes`` is what it will have moved.

        Raises ``LohanError`` once the lane is closed.
        """
        work: Work[T] = Work(label=label, lane=self.name)
        with self._changed:
            if self._closed:
                raise LohanError(f"lane {self.name!r} is closed: cannot submit {label!r}; submit before close()")
            if self._asleep:
                # In this order, and before the job is there, which a worker looks for once the lock is free: an interrupt between
                # two of these lines makes it look in vain, and leaves neither a worker asleep nor a job that nobody serves.
                self._wake.put(None)
                self._asleep -= 1
            heapq.heappush(self._queue, (priority, next(self._sequence), _Job(fn, nbytes, work)))
        return work

    def drain(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Wait until nothing is queued or running; jobs submitted meanwhile are waited for too.

        Failed jobs count as done: their exceptions belong to those who wait for them.
        """
        self._refuse_own_worker("drain")
        with self._changed:
            if not wait_hearing(functools.partial(self._changed.wait_for, self._is_idle), timeout_s):
                raise LaneTimeout(
                    f"waited {timeout_s:g} s for lane {self.name!r} to drain: {self._running_labels()} still running and "
                    f"{len(self._queue)} queued; allow a longer timeout or look at the running jobs"
                )

    def close(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Let running jobs finish, fail queued ones with ``LohanError``, and join the workers. Idempotent."""
        self._refuse_own_worker("close")
        with self._changed:
            self._closed = True
            queued, self._queue = sorted(self._queue), []
            self._changed.notify_all()
            for _ in self._threads:
                self._wake.put(None)
        for _, _, job in queued:
            job.work._fail(LohanError(f"lane closed: {job.work.label!r} was still queued on lane {self.name!r}"))
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            raise LaneTimeout(
                f"waited {timeout_s:g} s for lane {self.name!r} to close: {self._running_labels()} still running; "
                "call close() again to keep waiting; the worker is a daemon and cannot block exit"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_own_worker(self, asked: str) -> None:
        if threading.current_thread() in self._threads:
            raise LohanError(f"{asked}() of lane {self.name!r} was called by one of its own jobs, which cannot end")

    def _is_idle(self) -> bool:
        return not self._queue and not self._running

    def _running_labels(self) -> list[str]:
        return [job.work.label for job in list(self._running.values())]

    def describe(self) -> Iterator[str]:
        """What each worker runs and what is queued, a line each. Takes no lock, so it is a look in passing."""
        now_s = time.perf_counter()
        for worker, job in list(self._running.items()):
            yield f"  {worker.name} has been running {job.work.label!r} for {now_s - job.started_s:.1f} s"
        queued = sorted(self._queue.copy())
        if queued:
            named = ", ".join(repr(job.work.label) for _, _, job in queued[:SHOWN_QUEUED])
            yield f"  {len(queued)} queued on {self.name!r}: {named}{', ...' if len(queued) > SHOWN_QUEUED else ''}"

    def _serve(self, started: Work[None]) -> None:
        try:
            if self._initializer is not None:
                self._initializer()
        except BaseException as error:
            started._fail(error)
            return
        started._finish(None)
        while (job := self._next_job()) is not None:
            self._run(job)
            # While this worker sleeps in _next_job, ``job`` would keep the closure's tensors alive.
            del job

    def _next_job(self) -> _Job | None:
        while True:
            with self._changed:
                if self._queue:
                    job = heapq.heappop(self._queue)[2]
                    job.started_s = time.perf_counter()
                    # Marked in the same critical section that takes it from the queue, so drain never sees neither.
                    self._running[threading.current_thread()] = job
                    job.work._started = True
                    return job
                if self._closed:
                    return None
                self._asleep += 1
            # No timeout: this is the idle state of a daemon, and close() always wakes it.
            self._wake.get()

    def _run(self, job: _Job) -> None:
        try:
            value = job.fn()
        except BaseException as error:  # also SystemExit: it belongs to the waiter, and a worker must survive it
            self._record(job, moved_bytes=0)
            error.add_note(f"raised by job {job.work.label!r} on lane {self.name!r}")
            job.work._fail(error)
        else:
            self._record(job, moved_bytes=job.nbytes)
            job.work._finish(value)
        finally:
            with self._changed:
                del self._running[threading.current_thread()]
                if not self._running and not self._queue:
                    self._changed.notify_all()

    def _record(self, job: _Job, *, moved_bytes: int) -> None:
        """Before the job is settled, so that whoever waited for it finds it counted."""
        if self._timeline is not None:
            self._timeline.record(self.name, job.work.label, job.started_s, time.perf_counter(), moved_bytes)


def _lanes_now() -> Iterator[str]:
    yield "what the lanes were doing:"
    for lane in [lane for reference in _lanes.copy() if (lane := reference()) is not None]:
        lines = list(lane.describe())
        yield from lines or ([] if lane._closed else [f"  lane {lane.name!r} is idle"])


describe_timeouts_with(_lanes_now)
