"""lohan-cpuact: LoHan whose activations never reach the drives (LoHan Fig. 8 "+CpuAct"; mechanisms a2).

All states are on NVMe, as in the paper's variants; the room that main memory has left holds activations, by LoHan's
corrected Algorithm 1. The last produced stay on the device while they fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection

from lohan_fx import cost
from lohan_fx.hardware import HardwareProfile
from lohan_fx.passes.search import search, useful
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Tier
from lohan_fx.planning.memory_model import check, missing
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.estimate import Room, room, work
from lohan_fx.policies.layout import STREAMED, Layout, between_blocks, swap
from lohan_fx.policies.lohan import LOHAN

ATTEMPTS = 6
"""How often a plan whose graphs turn out to need more is made again with less room."""


def _decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
    least = layout.plan(problem, between_blocks(problem, Tier.HOST))
    base, space = work(problem, least), room(problem, layout)
    for _ in range(ATTEMPTS):
        saved = search(problem.activations, _step_s(hw, base, space)).saved
        plan = layout.plan(problem, _placed(problem, saved, space))
        over = missing(problem, plan, problem.device_peak(plan))
        if not over:
            return plan
        space = space.less(over)
    check(problem, least, problem.device_peak(least))
    return least


def _step_s(hw: HardwareProfile, base: cost.Work, space: Room) -> Callable[[int, float], float]:
    """Seconds of a step that saves so many bytes; for ever where there is no room for them."""

    def step_s(saved_bytes: int, recompute_s: float) -> float:
        swapped = max(0, saved_bytes - space.kept)
        if swapped > space.swapped or saved_bytes > space.together:
            return math.inf
        return cost.step_seconds(dataclasses.replace(base, recompute_s=recompute_s, swapped_bytes=swapped), hw)

    return step_s


def _placed(problem: Problem, saved: Collection[str], space: Room) -> dict[str, Decision]:
    decisions: dict[str, Decision] = {}
    kept = 0
    for name in reversed(useful(problem.activations)):
        nbytes = problem.activations.activations[name].bytes
        if name not in saved:
            decisions[name] = Recompute()
        elif kept + nbytes <= space.kept:
            decisions[name] = Keep()
            kept += nbytes
        else:
            decisions[name] = swap(problem, name, Tier.HOST)
    return decisions


LOHAN_CPUACT = STREAMED.policy(
    "lohan-cpuact", "LoHan", "kept, swapped to host RAM or recomputed, by benefit", _decide, formulas=LOHAN.formulas
)
