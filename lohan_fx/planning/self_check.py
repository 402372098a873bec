"""self_check: what each step was predicted to take and what it took, per stage and lane, and what to correct.

The rates of a profile were measured one at a time; in training the lanes disturb each other, and other processes take
their share. So the first steps are a measurement too (LoHan IV-B; mechanisms B1): each lane's rate is corrected by
how much longer it was busy than predicted, and if the plan made with corrected rates is faster by more than
``REVISION_GAIN``, it replaces the first one between two steps. No number changes by that: every plan computes the same.

A stage's lanes count from its beginning to that of the next one; "optimizer" is what ``step()`` still waits for.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lohan_fx.hardware import FrozenMapping, HardwareProfile, NvmeProfile, RequestRate
from lohan_fx.plan import Prediction, Stage
from lohan_fx.runtime.timeline import LaneTotals, Timeline

STAGES = ("forward", "backward", "optimizer")
END = "end"
WARM_UP_STEPS = 1
LEARNING_STEPS = 3
"""So many steps after the warm-up correct the profile."""
REVISION_GAIN = 0.05
"""A new plan must promise to be faster by this share: making it costs a capture."""
NEGLIGIBLE = 0.02
"""A lane predicted to be busy for less than this share of the step is not corrected: it binds nowhere."""
MOST_CORRECTION = 20.0
MOST_STEPS = 1000
"""The first, which is warm-up, and the last ones are kept."""

Rates = TypeVar("Rates", NvmeProfile, RequestRate)


@dataclass(frozen=True)
class StepCheck:
    """One step: stage -> lane -> seconds busy, and stage -> seconds from its begin to that of the next one."""

    lanes_s: Mapping[str, Mapping[str, float]]
    stages_s: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.stages_s.values())

    def lane_s(self, lane: str) -> float:
        """Seconds for which ``lane`` was busy in all stages."""
        return sum(lanes.get(lane, 0.0) for lanes in self.lanes_s.values())


class SelfCheck:
    """Watches the steps of one compiled model. Called by one thread, the one that trains."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._marks: list[tuple[str, float, LaneTotals]] = []
        self.steps: list[StepCheck] = []

    def begins(self, stage: str) -> None:
        """``stage`` begins, or the step ends. Micro-batches are not checked: their stages have no prediction of their own."""
        if stage != END and len(self._marks) > len(STAGES):
            return  # more than one micro-batch, or forwards without a step
        self._marks.append((stage, time.perf_counter(), self._timeline.snapshot()))
        if stage != END:
            return
        marks, self._marks = self._marks, []
        if [name for name, *_ in marks] != [*STAGES, END]:
            return
        lanes_s, stages_s = {}, {}
        for (name, begin_s, before), (_, end_s, after) in itertools.pairwise(marks):
            lanes_s[name] = dict(after.since(before).wall_s)
            stages_s[name] = end_s - begin_s
        self.steps.append(StepCheck(lanes_s, stages_s))
        del self.steps[WARM_UP_STEPS : 1 - MOST_STEPS]

    def forget(self) -> None:
        """Begin anew, after a revision or a failure."""
        self._marks.clear()
        self.steps.clear()

    @property
    def has_learned(self) -> bool:
        """Whether the steps that correct the profile are there."""
        return len(self.steps) >= WARM_UP_STEPS + LEARNING_STEPS


def typical(steps: Sequence[StepCheck]) -> StepCheck:
    """The median of each figure over ``steps``, the warm-up left out where there is more."""
    steady = steps[WARM_UP_STEPS:] or steps
    lanes = sorted({lane for step in steady for stage in step.lanes_s.values() for lane in stage})
    return StepCheck(
        {
            stage: {lane: statistics.median(s.lanes_s[stage].get(lane, 0.0) for s in steady) for lane in lanes}
            for stage in STAGES
        },
        {stage: statistics.median(s.stages_s[stage] for s in steady) for stage in STAGES},
    )


def foretold(predicted: Prediction) -> StepCheck:
    """``predicted`` in the form in which steps are measured."""
    stages: dict[str, Stage] = {name: getattr(predicted, name) for name in STAGES}
    return StepCheck(
        {name: stage.lanes_s for name, stage in stages.items()}, {name: stage.seconds for name, stage in stages.items()}
    )


def corrections(predicted: Prediction, measured: StepCheck) -> dict[str, float]:
    """Lane -> how many times longer than predicted it was busy in a step; 1 where it hardly matters."""
    found = {}
    for lane, expected_s in predicted.lanes_s.items():
        took_s = measured.lane_s(lane)
        heard_of = expected_s >= NEGLIGIBLE * predicted.step_s and took_s > 0
        found[lane] = bounded(took_s / expected_s if heard_of else 1.0)
    return found


def bounded(ratio: float) -> float:
    """``ratio``, or the most that a lane is corrected by."""
    return min(max(ratio, 1 / MOST_CORRECTION), MOST_CORRECTION)


def corrected(hw: HardwareProfile, ratios: Mapping[str, float]) -> HardwareProfile:
    """``hw`` with each lane's rates divided by its ratio (see ``corrections``)."""
    compute, ssd, cpu = (ratios.get(lane, 1.0) for lane in ("compute", "ssd", "cpu"))
    drives = tuple(
        replace(_slower(drive, ssd), by_request=tuple(_slower(rate, ssd) for rate in drive.by_request))
        for drive in hw.nvme
    )
    return replace(
        hw,
        matmul_flops_per_s=FrozenMapping({k: rate / compute for k, rate in hw.matmul_flops_per_s.items()}),
        memory_bytes_per_s=hw.memory_bytes_per_s / compute,
        op_overhead_s=hw.op_overhead_s * compute,
        handover_s=hw.handover_s * compute,
        h2d_bytes_per_s=hw.h2d_bytes_per_s / ratios.get("h2d", 1.0),
        d2h_bytes_per_s=hw.d2h_bytes_per_s / ratios.get("d2h", 1.0),
        adam_parameters_per_s=hw.adam_parameters_per_s / cpu,
        host_memory_bytes_per_s=hw.host_memory_bytes_per_s / cpu,
        nvme=drives,
    )


def _slower(rates: Rates, ratio: float) -> Rates:
    return replace(
        rates,
        read_bytes_per_s=rates.read_bytes_per_s / ratio,
        write_bytes_per_s=rates.write_bytes_per_s / ratio,
        mixed_bytes_per_s=rates.mixed_bytes_per_s / ratio,
    )


def may_be_beaten(found_s: float, ratios: Mapping[str, float], now_s: float) -> bool:
    """Whether any plan may be worth revising to, where the best one took ``found_s`` at the rates before the correction, and
    takes ``now_s``: each lane then takes at least the least of ``ratios`` as long, and so does every plan. Cheap; a search may
    take many seconds."""
    return worth_revising(now_s, min(ratios.values(), default=1.0) * found_s)


def worth_revising(now_s: float, then_s: float) -> bool:
    """Whether a plan predicted to take ``then_s`` should replace the one that takes ``now_s``."""
    return then_s < now_s * (1 - REVISION_GAIN)
