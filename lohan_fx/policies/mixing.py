"""mixing: the fastest mix of keeping, swapping to main memory and recomputing, as a mixed-integer program.

    minimise    T_f + T_b
    T_f >= what it takes without swaps,      swapped / link out
    T_b >= what it takes without swaps,      compute + recomputed seconds,      (parameters + swapped) / link in
    again_i + kept_i + swapped_i >= again_j for each reader j of value i, and >= 1 where the backward reads it
    kept bytes, swapped bytes and both together within their room

``again`` is 0 or 1 by itself once ``kept`` and ``swapped`` are. Solved by HiGHS within ``TIME_LIMIT_S``: the best found
by then is taken, and within ``GAP`` of the optimum where it ends before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult
from scipy.sparse import coo_array

from lohan_fx import cost
from lohan_fx.hardware import HardwareProfile
from lohan_fx.meta import Lane
from lohan_fx.passes.activation_graph import closure
from lohan_fx.passes.search import read
from lohan_fx.passes.solver import milp
from lohan_fx.plan import Decision, Keep, Plan, Recompute, Swap, Tier
from lohan_fx.planning.memory_model import missing
from lohan_fx.planning.problem import Problem
from lohan_fx.policies.estimate import Room, room, work
from lohan_fx.policies.eviction import all_kept
from lohan_fx.policies.layout import DecideIn, Layout, between_blocks

TIME_LIMIT_S = 20.0
GAP = 1e-4
ATTEMPTS = 6
"""How often a mix whose graphs turn out to need more is made again with less room."""
TIE = 1e-3
"""Weight of work that hides behind a busier lane: of mixes that are equally fast, the one that does least."""


def mixing(*ways: Decision) -> DecideIn:
    """Decides by the fastest mix of ``ways`` (of ``Keep()`` and ``Swap(Tier.HOST)``) and recomputation. All is kept where
    it may be and fits.

    Raises ``InfeasiblePlan`` where not even what must be saved fits.
    """

    def decide(layout: Layout, problem: Problem, hw: HardwareProfile) -> Plan:
        if Keep() in ways:
            kept = layout.plan(problem, all_kept(problem))
            if not missing(problem, kept, problem.device_peak(kept)):
                return kept
        for tried in (layout, layout.just_in_time()):
            found = _mixed(tried, problem, hw, ways)
            if found is not None:
                return found
        tier = Tier.HOST if Swap(Tier.HOST) in ways else Tier.DEVICE
        least = layout.fitting(problem, between_blocks(problem, tier))
        return _noted(least, "the solver found no mix that fits: only what must be saved is saved")

    return decide


def _mixed(layout: Layout, problem: Problem, hw: HardwareProfile, ways: Collection[Decision]) -> Plan | None:
    least = layout.plan(problem, between_blocks(problem, Tier.DEVICE))
    base, space = work(problem, least), room(problem, layout)
    base = dataclasses.replace(base, recompute_s=0.0)
    for _ in range(ATTEMPTS):
        decisions, note = _Program(problem, ways).solve(hw, base, space)
        if decisions is None:
            return None
        plan = layout.plan(problem, decisions)
        over = missing(problem, plan, problem.device_peak(plan))
        if not over:
            return _noted(plan, note)
        space = space.less(over)
    return None


def _noted(plan: Plan, note: str) -> Plan:
    return dataclasses.replace(plan, notes=(note,)) if note else plan


@dataclass
class _Rows:
    """Constraints ``row >= at_least``, gathered as a sparse matrix."""

    entries: list[tuple[int, int, float]] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)

    def add(self, entries: Mapping[int, float], at_least: float) -> None:
        self.entries += [(len(self.lower), column, value) for column, value in entries.items()]
        self.lower.append(at_least)

    def constraint(self, columns: int) -> LinearConstraint:
        rows, places, values = zip(*self.entries, strict=True)
        matrix = coo_array((values, (rows, places)), (len(self.lower), columns))
        return LinearConstraint(matrix.tocsr(), self.lower)


class _Program:
    """Columns: ``again`` per value, then ``kept`` and ``swapped`` per savable one, then T_f and T_b."""

    def __init__(self, problem: Problem, ways: Collection[Decision]) -> None:
        found = problem.activations
        everything = closure(found, found.mandatory) | found.mandatory
        self._problem = problem
        self._names = [name for name in found.graph if name in everything]
        self._savable = [name for name in self._names if name in found.activations]
        self._again = _columns(self._names, 0)
        self._kept = _columns(self._savable, len(self._names))
        self._swapped = _columns(self._savable, len(self._names) + len(self._savable))
        self._forward = len(self._names) + 2 * len(self._savable)
        self._backward = self._forward + 1
        self._bytes = {name: found.activations[name].bytes for name in self._savable}
        self._ways = ways
        self._rows = _Rows()

    def solve(self, hw: HardwareProfile, base: cost.Work, space: Room) -> tuple[dict[str, Decision] | None, str]:
        """The decisions, None where none were found; and what there is to say of them."""
        self._add_recomputation()
        self._add_room(space)
        lower = self._add_seconds(hw, base)
        columns = self._backward + 1
        integral = np.zeros(columns)
        integral[len(self._names) : self._forward] = 1
        result = milp(
            self._objective(hw) / max(self._problem.forward_s + self._problem.backward_s, 1e-9),
            integrality=integral,
            bounds=Bounds(lower, self._upper()),
            constraints=self._rows.constraint(columns),
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
        )
        stopped = f"the solver stopped after {TIME_LIMIT_S:g} s: this is the best mix that it had found"
        return self._decisions(result), "" if result.status == 0 else stopped

    def _add_recomputation(self) -> None:
        found = self._problem.activations
        for name in self._names:
            there = {self._again[name]: 1.0}
            there.update({part[name]: 1.0 for part in (self._kept, self._swapped) if name in part})
            for reader in found.graph.successors(name):
                if reader in self._again:
                    self._rows.add({**there, self._again[reader]: -1.0}, 0.0)
            if name in found.needed or name in found.mandatory:
                self._rows.add(there, 1.0)

    def _add_room(self, space: Room) -> None:
        unit = max(self._bytes.values(), default=1)
        limits = ((space.kept, (self._kept,)), (space.swapped, (self._swapped,)))
        for nbytes, parts in (*limits, (space.together, (self._kept, self._swapped))):
            used = {part[name]: -self._bytes[name] / unit for part in parts for name in self._savable}
            self._rows.add(used, -nbytes / unit)

    def _add_seconds(self, hw: HardwareProfile, base: cost.Work) -> np.ndarray:
        """Rows that tie the stages' seconds to what they do; the least that any column may be."""
        forward, backward = cost.forward_stage(base, hw), cost.backward_stage(base, hw)
        found = self._problem.activations
        out = {self._swapped[name]: -nbytes / hw.d2h_bytes_per_s for name, nbytes in self._bytes.items()}
        back = {self._swapped[name]: -nbytes / hw.h2d_bytes_per_s for name, nbytes in self._bytes.items()}
        again = {self._again[name]: -found.seconds[name] for name in self._names}
        self._rows.add({self._forward: 1.0, **out}, forward.lanes_s[Lane.D2H])
        self._rows.add({self._backward: 1.0, **back}, backward.lanes_s[Lane.H2D])
        self._rows.add({self._backward: 1.0, **again}, backward.lanes_s[Lane.COMPUTE])
        lower = np.zeros(self._backward + 1)
        lower[self._forward], lower[self._backward] = forward.seconds, backward.seconds
        return lower

    def _upper(self) -> np.ndarray:
        """The most that any column may be: 0 for what is not among the ways."""
        upper = np.ones(self._backward + 1)
        upper[[self._forward, self._backward]] = np.inf
        upper[[self._again[name] for name in self._names if name in self._problem.activations.mandatory]] = 0.0
        for way, part in ((Keep(), self._kept), (Swap(Tier.HOST), self._swapped)):
            for name in self._savable:
                small = self._bytes[name] < self._problem.small_activation_bytes
                if isinstance(way, Swap) if small else way not in self._ways:
                    upper[part[name]] = 0.0
        return upper

    def _objective(self, hw: HardwareProfile) -> np.ndarray:
        costs = np.zeros(self._backward + 1)
        costs[[self._forward, self._backward]] = 1.0
        for name in self._names:
            costs[self._again[name]] = TIE * self._problem.activations.seconds[name]
        for name, nbytes in self._bytes.items():
            costs[self._swapped[name]] = TIE * nbytes / hw.d2h_bytes_per_s
        return costs

    def _decisions(self, result: OptimizeResult) -> dict[str, Decision] | None:
        if result.x is None:
            return None
        saved: dict[str, Decision] = {}
        for way, part in ((Keep(), self._kept), (Swap(Tier.HOST), self._swapped)):
            saved.update({name: way for name in self._savable if result.x[part[name]] > 0.5})
        wanted = read(self._problem.activations, saved)
        return {name: saved[name] if name in wanted else Recompute() for name in self._savable}


def _columns(names: Iterable[str], first: int) -> dict[str, int]:
    return {name: first + place for place, name in enumerate(names)}
