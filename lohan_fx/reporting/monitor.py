"""monitor: what a training step of a compiled model took: seconds per lane, bytes on NVMe, memory and its promise."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from lohan_fx import process_memory
from lohan_fx.compile import compiled
from lohan_fx.plan import Plan, Prediction
from lohan_fx.planning.self_check import StepCheck, typical
from lohan_fx.reporting.memory_report import MemoryReport
from lohan_fx.runtime.timeline import Event


@dataclass(frozen=True)
class StepReport:
    """What happened between two calls of ``Monitor.step``.

    ``lanes_s``: seconds in which a lane (compute, h2d, d2h, ssd, cpu) was busy, however many threads it has.
    ``stall_s``: seconds for which compute waited for the other lanes. ``rss_bytes``: what the process has in RAM now;
    ``peak_rss_bytes``: the most of it since the monitor was made; ``promised_rss_bytes``: what it had before
    ``lohan_fx.compile``, and the ``host_memory`` promised there. ``predicted``: what the plan that was in force says;
    ``corrected``: the same at the rates that the first steps have corrected, None where they have not, or where the plan was made
    with them. ``stages``: what the last training step took, per stage and lane; None without one, and with micro-batches.
    ``nvme_total_written_bytes``: since the training began, also before a resume; ``max_nvme_written_bytes``: the
    ``max_bytes_written`` of ``compile``, None without.
    """

    seconds: float
    lanes_s: Mapping[str, float]
    stall_s: float
    nvme_read_bytes: int
    nvme_written_bytes: int
    rss_bytes: int
    peak_rss_bytes: int
    promised_rss_bytes: int
    predicted: Prediction | None = None
    corrected: Prediction | None = None
    stages: StepCheck | None = None
    nvme_total_written_bytes: int = 0
    max_nvme_written_bytes: int | None = None

    @property
    def predicted_s(self) -> float:
        """The seconds of ``predicted``, 0 where there is none."""
        return self.predicted.step_s if self.predicted is not None else 0.0

    def busy(self, lane: str) -> float:
        """The share of the step in which ``lane`` was busy, 0 to 1."""
        return self.lanes_s.get(lane, 0.0) / self.seconds if self.seconds else 0.0


class Monitor:
    """Watches the training of one compiled model.

        monitor = lohan_fx.Monitor(model)
        for batch in loader:
            ...
            optimizer.step()
            report = monitor.step()

    Making one lets the process's peak memory begin anew (``process_memory.forget_peak_rss``), and has a thread watch it until
    the model is released.

    ``other_rss_bytes``: what the process had before ``compile`` beside the model's parameters, which are the runtime's
    from then on. The peak that a plan predicts (``plan.prediction.peak_bytes["host"]``) comes on top of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._compiled = compiled(model)
        self.other_rss_bytes = self._compiled.rss_before_bytes - self._compiled.original_bytes
        process_memory.forget_peak_rss()
        self._compiled.memory.watch()
        self._begin()

    def _begin(self) -> None:
        engine = self._compiled.engine
        self._time_s = time.perf_counter()
        self._totals = engine.timeline.snapshot()
        self._read_bytes, self._written_bytes = engine.store.bytes_read, engine.store.bytes_written
        self._checked = self._last_check()

    def _last_check(self) -> StepCheck | None:
        steps = self._compiled.checks.steps
        return steps[-1] if steps else None

    def step(self) -> StepReport:
        """What happened since the last call, or since the monitor was made; to be called after ``optimizer.step()``."""
        time_s, totals = self._time_s, self._totals
        read_bytes, written_bytes = self._read_bytes, self._written_bytes
        checked, plan = self._checked, self.plan
        self._begin()
        between = self._totals.since(totals)
        return StepReport(
            seconds=self._time_s - time_s,
            lanes_s=between.wall_s,
            stall_s=between.stall_s,
            nvme_read_bytes=self._read_bytes - read_bytes,
            nvme_written_bytes=self._written_bytes - written_bytes,
            rss_bytes=process_memory.rss_bytes(),
            peak_rss_bytes=process_memory.peak_rss_bytes(),
            promised_rss_bytes=self._promised_rss_bytes(),
            predicted=plan.prediction if plan is not None else None,
            corrected=self._compiled.corrected(plan) if plan is not None else None,
            stages=self._checked if self._checked is not checked else None,
            nvme_total_written_bytes=self._compiled.engine.wear.written_bytes,
            max_nvme_written_bytes=self._compiled.engine.wear.max_bytes,
        )

    @property
    def plan(self) -> Plan | None:
        """The training plan in force (the first steps may revise it; see ``compile``): with graphs for several shapes that of the
        last training forward. None before there is one."""
        graph = self._compiled.training_graph()
        return self._compiled.plans[graph] if graph is not None else None

    def expected_peak_rss_bytes(self) -> int:
        """What the process will have in RAM at the peak of a training step under ``plan``, given what capture has left behind.
        The plan's own figure allows for more of that: it is made before, and holds ``host_memory``.

        Raises ``ValueError`` before there is a plan.
        """
        graph = self._compiled.training_graph()
        if graph is None:
            raise ValueError("no training graph is captured yet: call lohan_fx.prepare(model, ...) first")
        added_bytes = self._compiled.added_bytes()[graph]
        return min(self._compiled.memory.expected_peak_bytes(added_bytes), self._promised_rss_bytes())

    def memory(self) -> MemoryReport:
        """Where every byte of the process's peak since the monitor was made went, beside what was planned; it prints as a
        table. To be called before ``release``."""
        return self._compiled.memory.report(self.plan, self._promised_rss_bytes())

    def _promised_rss_bytes(self) -> int:
        return self._compiled.rss_before_bytes + self._compiled.request().budgets.host_memory_bytes

    def stages(self) -> StepCheck | None:
        """What a typical step under ``plan`` took, per stage and lane; None while there is none, or with micro-batches."""
        steps = self._compiled.checks.steps
        return typical(steps) if steps else None

    @contextmanager
    def record(self) -> Iterator[list[Event]]:
        """``with monitor.record() as events:`` around one step; afterwards the list holds what each lane did."""
        events: list[Event] = []
        timeline = self._compiled.engine.timeline
        timeline.start_recording()
        try:
            yield events
        finally:
            events.extend(timeline.stop_recording())
