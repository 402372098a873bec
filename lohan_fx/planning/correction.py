"""correction: what a model is planned for from now on, by what the first steps of its plan took (``self_check``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from lohan_fx import cost
from lohan_fx.meta import Lane
from lohan_fx.passes.halves import Halves
from lohan_fx.plan import Plan, Prediction, Stage
from lohan_fx.planning.predict import work_of
from lohan_fx.planning.self_check import StepCheck, bounded, corrected, corrections
from lohan_fx.request import Request, settled


@dataclass(frozen=True)
class Correction:
    """``request`` with the rates of each lane divided by its ratio, and what the same plan is predicted to take at them."""

    request: Request
    ratios: Mapping[str, float]
    prediction: Prediction

    @property
    def step_s(self) -> float:
        return self.prediction.step_s


def correction(halves: Halves, plan: Plan, request: Request, measured: StepCheck) -> Correction:
    """What follows from ``measured`` steps of ``halves``, which are those of ``plan``.

    On a CPU compute loses to Adam and to the drives what their rates say: an error of theirs is not compute's own, and is
    corrected with them. At the corrected rates compute takes what was measured.
    """
    assert plan.prediction is not None
    ratios = corrections(plan.prediction, measured)
    took_s = measured.lane_s(Lane.COMPUTE)
    work = work_of(halves, plan, settled(request, plan.windows))
    own_s = work.forward_s + work.backward_s + work.recompute_s
    if request.hw.device == "cpu" and took_s and own_s:
        others = _stages(halves, plan, _with(request, {**ratios, Lane.COMPUTE: 1.0}))
        expected_s = sum(stage.lanes_s.get(Lane.COMPUTE, 0.0) for stage in others)
        ratios[Lane.COMPUTE] = bounded(1 + (took_s - expected_s) / own_s)
    found = _with(request, ratios)
    forward, backward, optimizer = _stages(halves, plan, found)
    prediction = dataclasses.replace(plan.prediction, forward=forward, backward=backward, optimizer=optimizer)
    return Correction(found, ratios, prediction)


def _with(request: Request, ratios: Mapping[str, float]) -> Request:
    compute = ratios[Lane.COMPUTE]
    return dataclasses.replace(
        request,
        hw=corrected(request.hw, ratios),
        matmul_rate=request.matmul_rate / compute,
        compute_scale=request.compute_scale * compute,
    )


def _stages(halves: Halves, plan: Plan, request: Request) -> tuple[Stage, Stage, Stage]:
    request = settled(request, plan.windows)
    work = work_of(halves, plan, request)
    return (
        cost.forward_stage(work, request.hw),
        cost.backward_stage(work, request.hw),
        cost.optimizer_stage(work, request.hw),
    )
