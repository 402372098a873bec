"""event_clock: simulated threads, what they wait for, and a clock that moves from event to event.

A thread is a generator. It yields a ``Job`` to be busy for a while, or a ``Signal`` to block until that is set; what
it shares with others (lanes, pools of buffers) is built from these two in the way the runtime builds it from threads,
queues and conditions. Jobs under way at the same time slow each other down: ``speeds`` says how fast each advances.

Guarantees: threads that can go on at the same moment do so in the order in which they became able to; the same
threads give the same events, always.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

_DONE = 1e-9
"""A job is done when less than this share of it is left: its share of rounding errors, and of no one's patience."""


ALL_CORES = math.inf
"""What a job uses that has a thread on every core, however few there are."""


class Signal:
    """Set once; threads block on it before, and pass after."""

    __slots__ = ("_clock", "_waiting", "done")

    def __init__(self, clock: Clock) -> None:
        self.done = False
        self._clock = clock
        self._waiting: list[Thread] = []

    def set(self) -> None:
        self.done = True
        waiting, self._waiting = self._waiting, []
        self._clock.ready.extend(waiting)

    def block(self, thread: Thread) -> None:
        self._waiting.append(thread)


Uses = tuple[str, float, float]
"""Drive, cores and bytes/s of memory."""
Recorded = tuple[str, str, float, float, int]
"""An ``Event`` to be: lane, label, start and end in seconds, bytes. A search makes very many, and looks at none."""


@dataclass(eq=False, slots=True)
class Job:
    """Work on ``lane`` that takes ``seconds`` at full speed; ``bytes`` is what it moves.

    What it uses at full speed: ``drive`` ("read", "write" or ""), ``cores`` of the processor, ``memory_bytes_per_s``
    of the host's memory. ``recorded``: whether it is an event of its own.
    """

    lane: str
    label: str
    seconds: float
    bytes: int = 0
    drive: str = ""
    cores: float = 0.0
    memory_bytes_per_s: float = 0.0
    recorded: bool = True
    uses: Uses = field(init=False)
    left_s: float = field(init=False, default=0.0)
    start_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.uses = self.drive, self.cores, self.memory_bytes_per_s


Thread = Generator[Job | Signal, None, None]
Speeds = Callable[[Sequence[Job]], Sequence[float]]
"""By ``drive``, ``cores`` and ``memory_bytes_per_s`` of the jobs alone: the clock asks once for each company of them."""


class Clock:
    """Runs threads. ``events`` are the jobs done so far, in the order in which they ended."""

    def __init__(self, speeds: Speeds) -> None:
        self.now_s = 0.0
        self.events: list[Recorded] = []
        self.ready: deque[Thread] = deque()
        self._speeds = speeds
        self._running: list[tuple[Job, Thread]] = []
        self._known: dict[tuple[Uses, ...], Sequence[float]] = {}

    def signal(self) -> Signal:
        return Signal(self)

    def start(self, thread: Thread) -> None:
        self.ready.append(thread)

    def run(self) -> None:
        """Until nothing is under way: all threads have ended, or those left wait for each other."""
        while True:
            while self.ready:
                self._go_on(self.ready.popleft())
            if not self._running:
                return
            self._advance()

    def _go_on(self, thread: Thread) -> None:
        for wanted in thread:
            if isinstance(wanted, Job):
                wanted.left_s, wanted.start_s = wanted.seconds, self.now_s
                self._running.append((wanted, thread))
                return
            if not wanted.done:
                wanted.block(thread)
                return

    def _advance(self) -> None:
        """To the next moment at which a job is done."""
        running = self._running
        company = tuple([job.uses for job, _ in running])
        speeds = self._known.get(company)
        if speeds is None:
            speeds = self._known[company] = self._speeds([job for job, _ in running])
        step_s = min([one[0].left_s / speed for one, speed in zip(running, speeds, strict=True)])
        now_s = self.now_s = self.now_s + step_s
        left: list[tuple[Job, Thread]] = []
        for one, speed in zip(running, speeds, strict=True):
            job, thread = one
            left_s = job.left_s = job.left_s - step_s * speed
            if left_s > _DONE * job.seconds:
                left.append(one)
                continue
            if job.recorded:
                self.events.append((job.lane, job.label, job.start_s, now_s, job.bytes))
            self.ready.append(thread)
        self._running = left


class SimulatedLane:
    """``threads`` workers over one queue: lowest priority number first, then in order of submission (``lanes.Lane``)."""

    def __init__(self, clock: Clock, *, threads: int = 1) -> None:
        self._clock = clock
        self._free = threads
        self._queue: list[tuple[int, int, Thread]] = []
        self._sequence = itertools.count()

    def submit(self, job: Thread, *, priority: int = 0) -> None:
        heapq.heappush(self._queue, (priority, next(self._sequence), job))
        if self._free:
            self._free -= 1
            self._clock.start(self._serve())

    def _serve(self) -> Thread:
        while self._queue:
            yield from heapq.heappop(self._queue)[2]
        self._free += 1


class SimulatedShelf:
    """``count`` buffers of one purpose (``host_pool``); waiters are served in order."""

    def __init__(self, clock: Clock, count: int) -> None:
        self.count = count
        self._clock = clock
        self._free = count
        self._waiting: deque[tuple[int, Signal]] = deque()

    @property
    def in_use(self) -> int:
        return self.count - self._free

    def try_acquire(self, buffers: int = 1) -> bool:
        if self._free < buffers or self._waiting:
            return False
        self._free -= buffers
        return True

    def acquire(self, buffers: int = 1) -> Thread:
        if not self.try_acquire(buffers):
            handed_over = self._clock.signal()
            self._waiting.append((buffers, handed_over))
            yield handed_over

    def release(self, buffers: int = 1) -> None:
        self._free += buffers
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, handed_over = self._waiting.popleft()
            self._free -= wanted
            handed_over.set()


class Countdown:
    """Calls ``at_zero`` when ``one_less`` has been called ``count`` times; at once where ``count`` is 0."""

    def __init__(self, count: int, at_zero: Callable[[], None]) -> None:
        self._left = count
        self._at_zero = at_zero
        if not count:
            at_zero()

    def one_less(self) -> None:
        self._left -= 1
        if not self._left:
            self._at_zero()
