"""eviction: everything stays on the device until it no longer fits; then the system's order says what goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lohan_fx.passes.search import read, useful
from lohan_fx.plan import Decision, Keep, Plan, Recompute
from lohan_fx.planning.memory_model import check, missing
from lohan_fx.planning.plan_builder import saving
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.layout import Layout

ROUNDS = 16
"""At least this share of all candidates goes in each round: each is measured on graphs rewritten by it."""


def all_kept(problem: Problem) -> dict[str, Decision]:
    """Keep whatever the backward reads."""
    return saving(problem, useful(problem.activations), Keep())


def evict(
    problem: Problem, layout: Layout, start: Mapping[str, Decision], order: Iterable[tuple[str, Decision]]
) -> Plan:
    """``start``, changed in ``order`` as far as the device's memory demands; where that recomputes something, with what must be
    saved for it, which is read by nothing else.

    Raises ``InfeasiblePlan`` where all of it does not suffice, or host memory is short: beside a GPU, nothing that leaves the
    device frees any.
    """
    decisions, waiting = dict(start), list(order)
    least = max(1, len(waiting) // ROUNDS)
    while True:
        plan = layout.plan(problem, decisions | _begun_from(problem, decisions))
        peak = problem.device_peak(plan)
        over = missing(problem, plan, peak)
        short = [nbytes for tier, nbytes in over.items() if tier == "device" or problem.budgets.shared]
        if not short or not waiting:
            check(problem, plan, peak)
            return plan
        needed, freed, count = max(short), 0, 0
        while waiting and (freed < needed or count < least):
            name, decision = waiting.pop(0)
            decisions[name] = decision
            freed += problem.activations.activations[name].bytes
            count += 1


def _begun_from(problem: Problem, decisions: Mapping[str, Decision]) -> dict[str, Decision]:
    """Keep what recomputation by ``decisions`` begins with, where they drop it: that must be saved."""
    mandatory = problem.activations.mandatory
    saved = {name for name, decision in decisions.items() if not isinstance(decision, Recompute)}
    return dict.fromkeys((read(problem.activations, saved | mandatory) & mandatory) - saved, Keep())
