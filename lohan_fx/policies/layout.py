"""layout: where a system keeps parameters, optimizer states and gradients, and the plans that follow from it.

What differs between the systems beside this is their decision for each activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lohan_fx.cost_models.formula import CostModel
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Decision, Keep, OptimizerTiming, Plan, Swap, Tier
from lohan_fx.planning import problem as problems
from lohan_fx.planning.memory_model import check
from lohan_fx.planning.plan_builder import build_plan, default_homes, saving
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.policy import Policy

PLACES = {Tier.DEVICE: "device", Tier.HOST: "host RAM", Tier.NVME: "NVMe"}


@dataclass(frozen=True)
class Layout:
    """``gradients``: where they wait for an optimizer that runs after the backward; None: it runs inside the backward,
    as each arrives. ``prefetches``: whether transfers start before they are needed; where what is under way does not fit
    on the device, they do not.

    Small parameters stay in memory everywhere, with their states and gradients, as ZeRO's persistence threshold does.
    """

    parameters: Tier
    states: Tier
    gradients: Tier | None = None
    prefetches: bool = True

    def plan(self, problem: Problem, decisions: Mapping[str, Decision]) -> Plan:
        """The plan of these decisions, whether it fits or not."""
        late = self.gradients is not None
        homes = default_homes(problem, self.parameters)
        runs = OptimizerTiming.AFTER_BACKWARD if late else OptimizerTiming.IN_BACKWARD
        plan = build_plan(problem, dict(decisions), homes, self.states, optimizer_runs=runs)
        # Activations leave one at a time where memory is short; what the plan leaves free is theirs (``pipeline``).
        windows = dataclasses.replace(plan.windows, swap_out_bytes=0)
        if not self.prefetches:
            windows = dataclasses.replace(windows, fetch_bytes=0, swap_in_bytes=0, gradient_bytes=0)
        plan = dataclasses.replace(plan, windows=windows)
        return waiting(plan, self.gradients) if self.gradients is not None else plan

    def fitting(self, problem: Problem, decisions: Mapping[str, Decision]) -> Plan:
        """The plan of these decisions. Raises ``InfeasiblePlan`` where it does not fit."""
        plan = self.plan(problem, decisions)
        check(problem, plan, problem.device_peak(plan))
        return plan

    def just_in_time(self) -> Layout:
        """The same without prefetching."""
        return dataclasses.replace(self, prefetches=False)

    def policy(
        self,
        name: str,
        source: str,
        activations: str,
        decide: DecideIn,
        *,
        optimizer: str = "",
        why_not: str = "",
        formulas: tuple[CostModel, ...] = (),
    ) -> Policy:
        """The policy that decides by ``decide`` and says of itself what this layout is; with ``why_not`` it never runs."""

        def decided(problem: Problem, hw: HardwareProfile) -> Plan:
            try:
                return decide(self, problem, hw)
            except InfeasiblePlan:
                if not self.prefetches:
                    raise
                return decide(self.just_in_time(), problem, hw)

        where = "device" if self.states is Tier.DEVICE else "CPU"
        return Policy(
            name=name,
            source=source,
            parameters=PLACES[self.parameters],
            states=PLACES[self.states],
            gradients=PLACES[self.gradients] if self.gradients is not None else "consumed on arrival",
            activations=activations,
            optimizer=optimizer or f"{where}, {'after' if self.gradients is not None else 'in'} the backward",
            decide=decided,
            runs=not why_not,
            why_not=why_not,
            formulas=formulas,
        )


DecideIn = Callable[[Layout, Problem, HardwareProfile], Plan]
"""A decision procedure that works in any layout."""

STREAMED: Layout = Layout(Tier.NVME, Tier.NVME)
"""LoHan's and Fuyou's: all states on NVMe, gradients consumed on arrival (mechanisms a2)."""
IN_CORE: Layout = Layout(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
"""Systems that only move activations: 16 bytes per parameter stay on the device, and its optimizer runs there."""
IN_HOST: Layout = Layout(Tier.HOST, Tier.HOST, Tier.HOST)
"""All states in main memory, the optimizer on the CPU after the backward."""


def waiting(plan: Plan, home: Tier) -> Plan:
    """``plan`` with every update after the backward and gradients waiting at ``home``, small ones beside their states:
    on NVMe they would cost a request each for a few bytes."""
    parameters = []
    for p in plan.parameters:
        if p.trainable:
            small = p.numel <= problems.SMALL_PARAMETER_ELEMENTS
            beside = p.states_home if small else home
            p = dataclasses.replace(p, optimizer_runs=OptimizerTiming.AFTER_BACKWARD, gradient_home=beside)
        parameters.append(p)
    return dataclasses.replace(plan, parameters=tuple(parameters))


def swap(problem: Problem, name: str, tier: Tier) -> Decision:
    """``Swap(tier)``, or ``Keep()`` for what is not worth a transfer."""
    small = problem.activations.activations[name].bytes < problem.small_activation_bytes
    return Keep() if small else Swap(tier)


def between_blocks(problem: Problem, tier: Tier) -> dict[str, Decision]:
    """The tensors between blocks (and what must be saved beside them) at ``tier``, everything else recomputed."""
    decisions = saving(problem, problem.activations.mandatory, Keep())
    if tier is not Tier.DEVICE:
        decisions.update({name: swap(problem, name, tier) for name, d in decisions.items() if isinstance(d, Keep)})
    return decisions


def checkpointing(tier: Tier) -> DecideIn:
    """Decides as systems do that save the tensors between blocks at ``tier`` and recompute everything else."""

    def decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
        del hw
        return layout.fitting(problem, between_blocks(problem, tier))

    return decide
