"""simulated_machine: lanes, buffers, memory and rates of the machine that a step is simulated on.

Mirrors what ``runtime/machine.py`` sets up from a plan's windows: the lanes and their threads, the priorities, and the
reservations of the host pool; the turns are the runtime's own. Where a step has more transfers than ``TRANSFERS``, several are
simulated as one, which takes as many buffers as they do: totals and order stay, and a step takes within 3 % as long (docs/0011).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lohan_fx.cost import ADAM_TOUCHED_BYTES
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import PYTHON_LANE, ParameterPlan, Plan, Tier
from lohan_fx.planning.budgets import fixed_bytes, staging_bytes
from lohan_fx.planning.memory_model import resident_bytes
from lohan_fx.runtime.nvme_store import SSD_THREADS
from lohan_fx.runtime.state_buffer import SMALL_ELEMENTS, buffer_bytes, small_buffers
from lohan_fx.runtime.timeline import COMPUTE_LANE, STALL
from lohan_fx.runtime.turns import Turns
from lohan_fx.simulation.contention import Contention
from lohan_fx.simulation.event_clock import ALL_CORES, Clock, Job, Signal, SimulatedLane, SimulatedShelf, Thread

UNFUSED_ADAM = 2.2
"""How much slower an update with torch's unfused Adam is than with the fused one, of which a profile has the rate: with
two casts, by one thread (measured)."""
TRANSFERS = 40_000
"""Pieces and chunks of a step that are simulated one by one. Each is a few events on several lanes."""
AT_A_TIME = 6
"""Of what is simulated as one, so many have room where there is room for as many: for the three that the drives serve at once,
one that is copied or updated, and those that wait. With fewer, lanes would wait that do not (measured: docs/0038)."""
LAUNCHING = "launching"
"""What compute waits for where the thread that launches kernels is late."""


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes in use from ``time_s`` on."""

    time_s: float
    device_bytes: int
    host_bytes: int


class SimulatedMachine:
    """What all parts of the simulated runtime share."""

    def __init__(self, plan: Plan, hw: HardwareProfile, *, fused_adam: bool, transfers: int | None = None) -> None:
        self.plan, self.hw = plan, hw
        self.parameters = {p.name: p for p in plan.parameters}
        self.clock = Clock(Contention.of(hw).speeds)
        self.on_cpu = plan.device == "cpu"
        # Each job at the rate of all drives together: for those of each drive, at its own (``nvme_store.ssd_threads``).
        self.ssd = SimulatedLane(self.clock, threads=SSD_THREADS)
        self.h2d, self.d2h, self.cpu = (SimulatedLane(self.clock) for _ in range(3))
        self._together = _together(plan, TRANSFERS if transfers is None else transfers)
        self.pool = {purpose: SimulatedShelf(self.clock, count) for purpose, count in self._buffers().items()}
        self.turns: Turns[str] = Turns()
        self.compute = ComputeStream(self.clock, synchronous=self.on_cpu)
        self.memory = SimulatedMemory(self)
        self._interpreter_free_s = 0.0
        self._adam_slowdown = 1.0 if fused_adam else UNFUSED_ADAM

    # --- how transfers are cut --------------------------------------------------------------------------------

    def _buffers(self) -> dict[str, int]:
        """Buffers by purpose."""
        windows = self.plan.windows
        counts = dict.fromkeys(("fetch", "swap_in", "swap_out"), windows.io_buffers)
        counts |= {"gradients": windows.gradient_buffers, "optimizer": windows.optimizer_buffers}
        return counts | {"small": small_buffers(windows), "compute": 1}

    def pieces(self, nbytes: int) -> list[int]:
        """Bytes of the transfers that ``nbytes`` are cut into."""
        return _cut(nbytes, self.plan.windows.io_bytes * self._together)

    def chunks(self, parameter: ParameterPlan) -> list[int]:
        """Elements of the pieces in which ``parameter`` is updated."""
        return _cut(parameter.numel, self.plan.windows.chunk_elements * self._together)

    def buffers(self, purpose: str, requests: int) -> int:
        """How many of ``purpose`` a piece takes that stands for so many ``requests``: one for each, but not all there are."""
        return min(requests, max(1, self.pool[purpose].count // AT_A_TIME))

    # --- the interpreter, beside a GPU ------------------------------------------------------------------------

    def in_python(self, jobs: int = 1) -> Thread:
        """What so many jobs of a lane take of the interpreter, which one thread has at a time."""
        return self._interpreting(jobs * self.hw.interpreter_s_per_job)

    def launching(self, launches: int) -> Thread:
        """The thread that runs the graph launches so many kernels."""
        if launches and not self.on_cpu:
            self.compute.launches_more()
            yield from self._interpreting(launches * self.hw.op_overhead_s)

    def _interpreting(self, seconds: float) -> Thread:
        if not self.on_cpu:
            begin_s = max(self.clock.now_s, self._interpreter_free_s)  # whoever asks first has it first
            self._interpreter_free_s = begin_s + seconds
            yield Job(PYTHON_LANE, "", self._interpreter_free_s - self.clock.now_s, recorded=False)

    # --- jobs -------------------------------------------------------------------------------------------------

    def computing(self, seconds: float, touched_bytes: int) -> Job:
        rate = touched_bytes / seconds if self.on_cpu and seconds else 0.0
        cores = ALL_CORES if self.on_cpu else 0.0
        return Job(COMPUTE_LANE, "", seconds, cores=cores, memory_bytes_per_s=rate, recorded=False)

    def copying(self, lane: str, label: str, nbytes: int) -> Job:
        """A copy over the link; on a CPU within memory, by one thread."""
        rate = self.hw.h2d_bytes_per_s if lane == "h2d" else self.hw.d2h_bytes_per_s
        crossings = 2 if self.on_cpu else 1
        return Job(lane, label, nbytes / rate, nbytes, cores=float(self.on_cpu), memory_bytes_per_s=crossings * rate)

    def reading(self, extent: str, nbytes: int, requests: int = 1) -> Job:
        """A read of the drives that stands for so many ``requests``."""
        rate = self._of_drives(self.hw.ssd_read_bytes_per_s, extent)
        return self._request(f"read {extent}", "read", nbytes, rate, requests)

    def writing(self, extent: str, nbytes: int, requests: int = 1) -> Job:
        """A write, as ``reading``."""
        rate = self._of_drives(self.hw.ssd_write_bytes_per_s, extent)
        return self._request(f"write {extent}", "write", nbytes, rate, requests)

    def of_io(self, nbytes: int) -> int:
        """Requests of ``io_bytes`` that a piece (``pieces``) stands for."""
        return -(-nbytes // self.plan.windows.io_bytes)

    def of_chunk(self, elements: int) -> int:
        """Chunks that a piece (``chunks``) stands for."""
        return -(-elements // self.plan.windows.chunk_elements)

    def _request(self, label: str, drive: str, nbytes: int, rate: float, requests: int) -> Job:
        hw = self.hw
        core_s = requests * hw.io_core_s_per_request + hw.io_core_s_per_byte * nbytes
        cores = core_s * rate / nbytes if self.on_cpu and nbytes else 0.0
        return Job("ssd", label, nbytes / rate, nbytes, drive=drive, cores=cores, memory_bytes_per_s=rate)

    def _of_drives(self, rate: float, extent: str) -> float:
        if not rate:
            raise ValueError(
                f"the plan keeps {extent} on NVMe, and the hardware profile {self.hw.name!r} has no drive: use a profile "
                "with one, or a plan that keeps everything in memory"
            )
        return rate

    def updating(
        self, parameter: ParameterPlan, elements: int, *, sums: bool, applies: bool, here: bool = False
    ) -> Job:
        """The arithmetic of one chunk (``chunk_update.compute``): summing what arrived, Adam, the compute-dtype copy.

        The lane's thread does it, or compute (``here``): with all cores on a CPU, and in its own memory on a GPU.
        """
        hw, each = self.hw, parameter.bytes // parameter.numel
        if here and not self.on_cpu:
            moved = ((each + 4) * sums + ADAM_TOUCHED_BYTES * applies) * elements
            return Job(COMPUTE_LANE, "", moved / hw.memory_bytes_per_s, recorded=False)
        # An update goes through the chunk part by part, so that what lies between its sum, Adam and copy stays in a cache.
        moved = (ADAM_TOUCHED_BYTES if applies else (each + 4) * sums) * elements
        seconds = moved / hw.host_memory_bytes_per_s
        if applies:
            # The profile's rate is that of all cores; beside compute on a CPU one thread has to do.
            alone = hw.cpu_cores if self.on_cpu and not here else 1
            adam_s = alone * elements * self._adam_slowdown / hw.adam_parameters_per_s
            seconds = max(adam_s, seconds)
            if not self.on_cpu and parameter.home is Tier.DEVICE:
                seconds += each * elements / hw.h2d_bytes_per_s
        return Job(
            "cpu",
            f"update of {parameter.name}",
            seconds,
            4 * elements,
            cores=(ALL_CORES if here else 1.0) if self.on_cpu else 0.0,
            memory_bytes_per_s=moved / seconds if seconds else 0.0,
        )


class ComputeStream:
    """Executes what is submitted, in order. ``synchronous``: who submits waits for the end, as on a CPU.

    On CUDA the thread that runs the graph is ahead of the device: it stops only where it waits for a transfer.
    """

    def __init__(self, clock: Clock, *, synchronous: bool) -> None:
        self.waiting_for = ""
        self.idle_since_s = 0.0
        self._clock = clock
        self._synchronous = synchronous
        self._queue: deque[Job | Callable[[], None]] = deque()
        self._asleep: Signal | None = None
        self._left = 0  # jobs that are not done
        clock.start(self._serve())

    def run(self, job: Job) -> Thread:
        self._left += 1
        self._submit(job)
        if self._synchronous:
            yield self._reached()

    def launches_more(self) -> None:
        """If it runs out of work from now on, or has, that is what it waits for."""
        if not self._left:
            self._note_idle()
        self.waiting_for = LAUNCHING

    def stage(self, begin: bool, done: Callable[[], None]) -> Thread:
        """Call ``done`` where a stage begins or ends; idling before a stage begins is no stall."""

        def at() -> None:
            if begin:
                self._forget_idle()
            else:
                self._note_idle()
            done()

        self._submit(at)
        if self._synchronous:
            yield self._reached()

    def barrier_ends(self) -> None:
        """Idling until the barrier of a step is over is no stall either; compute may have updates to make after it."""
        self._submit(self._forget_idle)

    def mark(self) -> Signal | None:
        """Set when all submitted so far is done (``device_link.mark``)."""
        return None if self._synchronous else self._reached()

    def _reached(self) -> Signal:
        reached = self._clock.signal()
        self._submit(reached.set)
        return reached

    def _submit(self, item: Job | Callable[[], None]) -> None:
        self._queue.append(item)
        if self._asleep is not None:
            asleep, self._asleep = self._asleep, None
            asleep.set()

    def _serve(self) -> Thread:
        while True:
            while not self._queue:
                self._asleep = self._clock.signal()
                yield self._asleep
            item = self._queue.popleft()
            if isinstance(item, Job):
                self._note_idle()
                yield item
                self._left -= 1
                self._forget_idle()
            else:
                item()

    def _note_idle(self) -> None:
        now_s = self._clock.now_s
        if now_s > self.idle_since_s:
            self._clock.events.append((COMPUTE_LANE, f"{STALL}{self.waiting_for}", self.idle_since_s, now_s, 0))
        self.idle_since_s = now_s

    def _forget_idle(self) -> None:
        self.idle_since_s = self._clock.now_s


class SimulatedMemory:
    """Bytes in use per tier, and when they changed.

    Host memory has what is resident, what captured graphs take, swapped activations, and staging buffers: pinned ones
    from the start, others as far as they have been written.
    """

    def __init__(self, machine: SimulatedMachine) -> None:
        plan = machine.plan
        self._machine = machine
        self._resident, host = resident_bytes(plan)
        self._graph = self._leaving = self._swapped = 0
        staging = staging_bytes(plan.windows, shared=machine.on_cpu)
        fixed = fixed_bytes(plan.windows, len(plan.parameters), shared=machine.on_cpu)
        self._constant = host + fixed - (staging if machine.on_cpu else 0)
        io, chunk = plan.windows.io_bytes, plan.windows.chunk_elements
        sizes = dict.fromkeys(("fetch", "swap_in", "swap_out"), io)
        states = {"optimizer": buffer_bytes(chunk), "small": buffer_bytes(SMALL_ELEMENTS)}
        self._sizes = sizes | states | {"gradients": 4 * chunk, "compute": 4 * chunk}
        self._touched = {purpose: [0] * shelf.count for purpose, shelf in machine.pool.items()}
        self._touched_bytes = 0
        self.curve: list[MemoryPoint] = []

    def touch(self, purpose: str, nbytes: int, buffers: int = 1) -> None:
        """So much of the ``buffers`` that were acquired last is written. The pool hands out the one released last first.

        Beside a GPU it is pinned, and so there before.
        """
        if not self._machine.on_cpu:
            return
        touched, end = self._touched[purpose], self._machine.pool[purpose].in_use
        for at in range(end - buffers, end):
            more = min(nbytes // buffers, self._sizes[purpose]) - touched[at]
            if more > 0:
                touched[at] += more
                self._touched_bytes += more

    def stage_begins(self, graph_bytes: int) -> None:
        """From now on the graph of the next stage has its inputs; what still leaves the device stays until it has."""
        self._graph = graph_bytes
        self._note()

    def change(self, *, graph: int = 0, swapped: int = 0) -> None:
        """Of what the graph holds on the device, and of what is swapped or held in host memory."""
        self._graph += graph
        self._swapped += swapped
        self._note()

    def hand_over(self, nbytes: int) -> None:
        """A transfer holds these bytes of the graph from now on."""
        self._graph -= nbytes
        self._leaving += nbytes

    def has_left(self, nbytes: int) -> None:
        """A transfer gives up what it holds on the device."""
        self._leaving -= nbytes
        self._note()

    def reach(self, above: int) -> None:
        """Device memory was higher by ``above`` for a moment."""
        if above > 0:
            self._note(above)
            self._note()

    def _note(self, above: int = 0) -> None:
        machine = self._machine
        device = self._resident + self._graph + self._leaving + above
        host = self._constant + self._swapped
        if machine.on_cpu:
            host += self._touched_bytes + device
        self.curve.append(MemoryPoint(machine.clock.now_s, device, host))


def _cut(total: int, size: int) -> list[int]:
    """``total`` in pieces of ``size``; none of a parameter without elements."""
    return [min(size, total - start) for start in range(0, total, size)]


def _together(plan: Plan, transfers: int) -> int:
    """How many are simulated as one so that a step has no more than ``transfers``, if that can be."""
    windows = plan.windows
    counts = [-(-p.numel // windows.chunk_elements) for p in plan.parameters]
    counts += 2 * [-(-p.bytes // windows.io_bytes) for p in plan.parameters]
    counts += [-(-a.bytes // windows.io_bytes) for a in plan.activations]
    most = max(counts, default=1)
    together = 1
    while together < most and sum(-(-count // together) for count in counts) > transfers:
        together += max(1, together // 4)
    return together
