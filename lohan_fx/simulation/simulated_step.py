"""simulated_step: one training step by events: a ``StepProgram`` on a ``SimulatedMachine``, and what came of it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from lohan_fx import cost
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Cost
from lohan_fx.passes.liveness import Transit
from lohan_fx.plan import OptimizerTiming, Plan
from lohan_fx.planning.budgets import mean_request_bytes
from lohan_fx.runtime.busy_seconds import busy_s
from lohan_fx.runtime.timeline import COMPUTE_LANE, Event
from lohan_fx.simulation.event_clock import Thread
from lohan_fx.simulation.simulated_machine import MemoryPoint, SimulatedMachine
from lohan_fx.simulation.simulated_optimizer import SimulatedOptimizer
from lohan_fx.simulation.simulated_transfers import SimulatedTransfers
from lohan_fx.simulation.step_program import (
    Compute,
    Fetch,
    Instruction,
    NodeSeconds,
    Offload,
    StepProgram,
    SwapIn,
    SwapOut,
    Wait,
)

LANES = ("compute", "h2d", "d2h", "ssd", "cpu")


@dataclass(frozen=True)
class Simulation:
    """One simulated step; several in a row are alike, because ``step`` is a barrier for all but ``NEXT_FORWARD`` updates, of
    which the step before has left as many.

    ``tail_s``: from the end of the backward to the end of ``optimizer.step()``. ``busy_s``: seconds in which a lane
    (compute, h2d, d2h, ssd, cpu) worked, however many threads it has; ``stall_s``: those in which compute waited for
    the others; ``bytes``: what each lane moved. ``memory``: bytes in use from moment to moment;
    ``peak_bytes``: the most of it per tier ("device", "host"; on a CPU the device's are in the host's too). ``events``:
    as ``Monitor.record`` gives them for a real step, for ``timeline_chart.draw``.
    """

    step_s: float
    forward_s: float
    backward_s: float
    tail_s: float
    busy_s: Mapping[str, float]
    stall_s: float
    bytes: Mapping[str, int]
    nvme_read_bytes: int
    nvme_write_bytes: int
    peak_bytes: Mapping[str, int]
    memory: tuple[MemoryPoint, ...]
    events: tuple[Event, ...]

    @property
    def bottleneck(self) -> str:
        """The lane that is busy longest."""
        return max(LANES, key=lambda lane: self.busy_s[lane])

    def busy(self, lane: str) -> float:
        """The share of the step in which ``lane`` was busy, 0 to 1."""
        return self.busy_s[lane] / self.step_s if self.step_s else 0.0

    @property
    def idle_s(self) -> Mapping[str, float]:
        """Seconds of the step in which each lane did nothing."""
        return {lane: self.step_s - self.busy_s[lane] for lane in LANES}


def by_rates(plan: Plan, hw: HardwareProfile) -> NodeSeconds:
    """Seconds of nodes from the rates of ``hw``."""
    rate = hw.matmul_rate(getattr(torch, plan.compute_dtype))

    def seconds(found: Cost) -> float:
        return cost.node_seconds(found, hw, rate)

    return seconds


def simulate_program(
    program: StepProgram,
    plan: Plan,
    hw: HardwareProfile,
    *,
    fused_adam: bool = True,
    steps: int = 1,
    transfers: int | None = None,
) -> Simulation:
    """Simulate steps whose instructions are known already; the last one.

    ``transfers``: about how many are simulated one by one (``simulated_machine.TRANSFERS``): fewer are faster and coarser.
    """
    return _simulated(program, plan, hw, fused_adam=fused_adam, steps=steps, transfers=transfers).result()


def simulated_step_s(program: StepProgram, plan: Plan, hw: HardwareProfile, *, transfers: int | None = None) -> float:
    """``simulate_program(...).step_s``, for whoever needs nothing else of it."""
    return _simulated(program, plan, hw, fused_adam=True, steps=1, transfers=transfers).step_s


def simulated_transit(
    program: StepProgram, plan: Plan, hw: HardwareProfile, *, transfers: int | None = None
) -> Transit:
    """What is on its way, as each transfer begins, in a simulated step."""
    return _simulated(program, plan, hw, fused_adam=True, steps=1, transfers=transfers).transit


def _simulated(
    program: StepProgram, plan: Plan, hw: HardwareProfile, *, fused_adam: bool, steps: int, transfers: int | None
) -> _Step:
    """The step, run to its end."""
    if steps < 1:
        raise ValueError(f"steps is {steps}: simulate at least one")
    if any(p.optimizer_runs is OptimizerTiming.NEXT_FORWARD for p in plan.parameters) and program.backward:
        steps += 1
    hw = hw.at_requests(mean_request_bytes(plan.parameters, plan.windows))
    machine = SimulatedMachine(plan, hw, fused_adam=fused_adam, transfers=transfers)
    step = _Step(machine, program)
    machine.clock.start(step.run(steps))
    machine.clock.run()
    if step.ended_s is None:
        raise AssertionError(f"the simulated step hangs: compute waits for {machine.compute.waiting_for!r}")
    return step


class _Step:
    """The thread that runs the training loop, and what came of it."""

    def __init__(self, machine: SimulatedMachine, program: StepProgram) -> None:
        self.ended_s: float | None = None
        self._machine = machine
        self._program = program
        self._optimizer = SimulatedOptimizer(machine)
        self._transfers = SimulatedTransfers(machine, self._optimizer.pending)
        instructions = (*program.forward, *program.backward)
        self._brings = {found.node: found.parameter for found in instructions if isinstance(found, Fetch)}
        self._begun_s = 0.0
        self._ends_s: dict[str, float] = {}
        self._coming: dict[tuple[str, str], int] = {}
        self._leaving: dict[str, Collection[str]] = {}

    def run(self, steps: int) -> Thread:
        clock, memory = self._machine.clock, self._machine.memory
        for _ in range(steps):
            clock.events.clear()
            memory.curve.clear()
            self._begun_s = clock.now_s
            yield from self._run_once()
        self.ended_s = clock.now_s

    def _run_once(self) -> Thread:
        program, memory = self._program, self._machine.memory
        self._machine.turns.forward_begins()
        yield from self._stage("forward", program.forward, program.forward_base_bytes)
        if program.backward:
            self._machine.turns.end()
            yield from self._stage("backward", program.backward, program.backward_base_bytes)
            yield from self._optimizer.step()
        done = self._machine.compute.mark()
        if done is not None:
            yield done
        memory.change()

    def _stage(self, name: str, instructions: Iterable[Instruction], base_bytes: int) -> Thread:
        machine = self._machine
        clock, begun_s = machine.clock, 0.0

        def begins() -> None:
            nonlocal begun_s
            begun_s = clock.now_s

        def ends() -> None:
            self._ends_s[name] = clock.now_s
            clock.events.append((COMPUTE_LANE, name, begun_s, clock.now_s, 0))

        machine.memory.stage_begins(base_bytes)
        yield from machine.compute.stage(True, begins)
        for found in instructions:
            if isinstance(found, Fetch | SwapIn):
                self._coming[name, found.node] = self._transfers.coming_bytes
            yield from self._execute(found)
        self._coming[name, ""] = self._transfers.coming_bytes
        yield from machine.compute.stage(False, ends)

    def _execute(self, found: Instruction) -> Thread:
        machine = self._machine
        match found:
            case Compute():
                machine.memory.reach(found.peak_bytes)
                yield from machine.launching(found.launches)
                if found.seconds:
                    yield from machine.compute.run(machine.computing(found.seconds, found.touched_bytes))
                machine.memory.change(graph=found.change_bytes)
            case Fetch():
                self._transfers.fetch(found)
            case SwapOut():
                yield from self._transfers.swap_out(found)
            case SwapIn():
                self._transfers.swap_in(found)
            case Wait():
                if (brought := self._brings.get(found.started)) is not None:
                    machine.turns.wanted(brought)
                yield from self._transfers.wait(found)
            case Offload():
                parameter = machine.parameters[found.parameter]
                yield from self._optimizer.offer(parameter, found.held_bytes)
                self._leaving[found.parameter] = tuple(self._optimizer.leaving)

    @property
    def step_s(self) -> float:
        assert self.ended_s is not None
        return self.ended_s - self._begun_s

    @property
    def transit(self) -> Transit:
        return Transit(self._coming, self._leaving)

    def result(self) -> Simulation:
        machine, clock = self._machine, self._machine.clock
        assert self.ended_s is not None
        begun_s, step_s = self._begun_s, self.step_s
        forward_s = self._ends_s["forward"] - begun_s
        backward_end_s = self._ends_s.get("backward", self._ends_s["forward"]) - begun_s
        events = tuple(
            # What the step before began is counted from here.
            Event(lane, label, max(0.0, start_s - begun_s), end_s - begun_s, nbytes)
            for lane, label, start_s, end_s, nbytes in sorted(clock.events, key=operator.itemgetter(2))
            if end_s <= self.ended_s  # what it began for the next step is the next step's
        )
        points = (point for point in machine.memory.curve if point.time_s <= self.ended_s)
        curve = tuple(dataclasses.replace(point, time_s=point.time_s - begun_s) for point in points)
        return Simulation(
            step_s=step_s,
            forward_s=forward_s,
            backward_s=backward_end_s - forward_s,
            tail_s=step_s - backward_end_s,
            busy_s={lane: busy_s(events, lane) for lane in LANES},
            stall_s=sum(e.end_s - e.start_s for e in events if e.is_stall),
            bytes={lane: sum(e.bytes for e in events if e.lane == lane) for lane in LANES},
            nvme_read_bytes=sum(e.bytes for e in events if e.lane == "ssd" and e.label.startswith("read")),
            nvme_write_bytes=sum(e.bytes for e in events if e.lane == "ssd" and e.label.startswith("write")),
            peak_bytes={
                "device": max(point.device_bytes for point in curve),
                "host": max(point.host_bytes for point in curve),
            },
            memory=curve,
            events=events,
        )
