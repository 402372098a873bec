"""optimum: the best decisions by integer programming, and a bound on how good any can be.

Numbers in, numbers out. Solved by HiGHS through scipy:

    minimise    sum over stages of T_stage
    T_stage  >= seconds of each of its lanes
    again_i + saved_i >= again_reader,   again_i + saved_i >= copies where the backward needs value i
    saved values of one size = those kept + those swapped to host + those swapped to NVMe
    quantity = what all decisions add to it;   device and host bytes within their limits

``again`` (copies recomputed) may be fractional: it is a difference of whole numbers wherever it costs anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog
from scipy.sparse import csr_array, vstack

from lohan_fx.passes.decision_model import (
    Adds,
    LaneTime,
    Model,
    Quantity,
    Solution,
    most,
    quantities_of,
    savable,
)
from lohan_fx.passes.independent_parts import Parts
from lohan_fx.passes.solver import milp

GAP = 1e-7
"""Relative distance between the plan found and the bound at which the search for a better one ends."""
WORK, LEAST_NODES = 600_000, 200
"""How far branch and bound goes: so many nodes times whole numbers, and never fewer nodes. HiGHS takes the same way each time, so
that a plan does not depend on how busy the machine is, as it would if a clock ended the search (docs/0045)."""
TIME_LIMIT_S = 20.0
"""For problems whose nodes take far longer than others'."""
TIDYING, TIDY_GAP = 0.2, 1e-3
"""Share of the nodes, and gap, of the second search, which among equally fast decisions looks for those that work least."""
WORTH_S = 1e-9
"""Less work than this is none."""
ROUNDINGS = 3
"""How often a solution that is too large by rounding is made again."""


def optimum(model: Model, *, gap: float = GAP) -> Solution | None:
    """The fastest decisions that HiGHS finds within ``WORK``, and the bound it has proven; None where nothing fits the limits or
    nothing was found."""
    program = _Program(model)
    cut: dict[Quantity, float] = {}
    for _ in range(ROUNDINGS):
        found = program.solve(cut, gap=gap)
        if found is None or not (over := _over(model, found.quantities)):
            return found
        # Whole numbers are only whole within HiGHS's tolerance: a byte too many is asked for again, with less room.
        cut = {quantity: cut.get(quantity, 0.0) + 2 * nbytes for quantity, nbytes in over.items()}
    return None


def relaxed(model: Model) -> Solution | None:
    """The same with fractions allowed: fast at any size, a bound on everything, and what a byte of memory is worth."""
    return _Program(model).relax()


def _over(model: Model, quantities: Adds) -> dict[Quantity, float]:
    over = {quantity: quantities[quantity] - limit for quantity, limit in model.limits.items()}
    return {quantity: nbytes for quantity, nbytes in over.items() if nbytes > 0}


def _without_needless_work(model: Model, found: Solution) -> Solution:
    """``found`` without what the gap left: of each group, as many as the limits allow take another option where that is less work
    and makes nothing slower. One gradient on NVMe, beside memory that is free, would need a drive for nothing."""
    costs = model.seconds_of_all.per
    placed, treated = ([list(counts) for counts in group] for group in (found.placed, found.treated))
    groups = [
        *zip(placed, (size.options for size in model.sizes), strict=True),
        *zip(treated, (thing.options for thing in model.things), strict=True),
    ]
    now: Adds = found.quantities
    for counts, options in groups:
        for one, other in itertools.permutations(range(len(options)), 2):
            moves = {q: options[other].get(q, 0.0) - options[one].get(q, 0.0) for q in {*options[one], *options[other]}}
            if not counts[one] or sum(costs[q] * move for q, move in moves.items()) > -WORTH_S:
                continue
            fit = [(limit - now[q]) // moves[q] for q, limit in model.limits.items() if moves.get(q, 0.0) > 0.0]
            many = max(0.0, min([counts[one], *fit]))
            then = {q: nbytes + many * moves.get(q, 0.0) for q, nbytes in now.items()}
            if many and model.seconds(then) <= model.seconds(now):
                counts[one], counts[other], now = counts[one] - many, counts[other] + many, then
    counted = tuple(map(tuple, placed)), tuple(map(tuple, treated))
    quantities = quantities_of(model, found.saved, *counted)
    seconds = model.seconds(quantities)
    return Solution(
        found.saved, *counted, quantities, seconds, min(found.bound_s, seconds), found.exact, found.per_byte_s
    )


class _Program:
    """``model`` as columns and rows. Quantities are counted in their largest possible value and seconds in those of the
    work that no decision changes, so that all numbers are about one."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self._scale = {quantity: value or 1.0 for quantity, value in most(model).items()}
        self._unit_s = model.seconds({}) or model.seconds(self._scale) or 1.0
        self._times = [self._column() for _ in model.stages]
        self._quantities = {quantity: self._column() for quantity in Quantity}
        adds: dict[Quantity, dict[int, float]] = {quantity: {} for quantity in Quantity}
        self._saved = [self._block(block, adds[Quantity.RECOMPUTE_S]) for block in model.blocks]
        self._placed = [self._options(size.options, savable(model, size), adds) for size in model.sizes]
        self._treated = [self._options(thing.options, thing.count, adds) for thing in model.things]
        for thing, columns in zip(model.things, self._treated, strict=True):
            self._rows.append((dict.fromkeys(columns, 1.0), thing.count, thing.count))
        self._place_all_saved()
        for quantity, terms in adds.items():
            scaled = {column: value / self._scale[quantity] for column, value in terms.items()}
            self._rows.append(({**scaled, self._quantities[quantity]: -1.0}, 0.0, 0.0))
        for time, stage in zip(self._times, model.stages, strict=True):
            for lane in stage:
                self._lane(time, lane)
        self._limits = {quantity: self._limit_row(quantity) for quantity in model.limits}

    # --- columns and rows -------------------------------------------------------------------------------------

    def _column(self, upper: float = np.inf, *, whole: bool = False) -> int:
        self._lower.append(0.0)
        self._upper.append(upper)
        self._whole.append(whole)
        return len(self._lower) - 1

    def _block(self, block: Parts, recompute_s: dict[int, float]) -> list[int | None]:
        again = [self._column(block.count) for _ in block.seconds]
        saved = [None if nbytes is None else self._column(block.count, whole=True) for nbytes in block.bytes]
        for place, (column, saved_column) in enumerate(zip(again, saved, strict=True)):
            recompute_s[column] = block.seconds[place]
            own = {column: 1.0} if saved_column is None else {column: 1.0, saved_column: 1.0}
            if block.needed[place]:
                self._rows.append((own, block.count, np.inf))
                continue
            for reader in block.readers[place]:
                self._rows.append(({**own, again[reader]: -1.0}, 0.0, np.inf))
        return saved

    def _options(self, options: Sequence[Adds], most: int, adds: dict[Quantity, dict[int, float]]) -> list[int]:
        columns = [self._column(most, whole=True) for _ in options]
        for column, option in zip(columns, options, strict=True):
            for quantity, added in option.items():
                adds[quantity][column] = added
        return columns

    def _place_all_saved(self) -> None:
        for size, columns in zip(self.model.sizes, self._placed, strict=True):
            row = dict.fromkeys(columns, 1.0)
            for block, saved in zip(self.model.blocks, self._saved, strict=True):
                for nbytes, column in zip(block.bytes, saved, strict=True):
                    if column is not None and nbytes == size.bytes:
                        row[column] = -1.0
            self._rows.append((row, size.mandatory, size.mandatory))

    def _lane(self, time: int, lane: LaneTime) -> None:
        """T >= the least of the lines: with a 0-1 column per line more than one, that says which need not hold."""
        waived = [self._column(1.0, whole=True) for _ in lane.lines] if len(lane.lines) > 1 else []
        if waived:
            self._rows.append((dict.fromkeys(waived, 1.0), -np.inf, len(waived) - 1))
        for place, line in enumerate(lane.lines):
            row = {time: 1.0}
            for quantity, rate in line.per.items():
                row[self._quantities[quantity]] = -rate * self._scale[quantity] / self._unit_s
            if waived:
                most = line.seconds + sum(max(rate, 0.0) * self._scale[quantity] for quantity, rate in line.per.items())
                row[waived[place]] = most / self._unit_s
            self._rows.append((row, line.seconds / self._unit_s, np.inf))

    def _limit_row(self, quantity: Quantity) -> int:
        limit = self.model.limits[quantity] / self._scale[quantity]
        self._rows.append(({self._quantities[quantity]: 1.0}, -np.inf, limit))
        return len(self._rows) - 1

    # --- solving ----------------------------------------------------------------------------------------------

    def solve(self, cut: Adds, *, gap: float) -> Solution | None:
        """Whole numbers, with each limit ``cut`` by so many bytes: first the fastest, then of those the least work."""
        matrix, low, high = self._matrix()
        for quantity, nbytes in cut.items():
            high[self._limits[quantity]] -= nbytes / self._scale[quantity]
        nodes = max(LEAST_NODES, WORK // max(1, self.model.integers))
        times, options = self._costs(), {"node_limit": nodes, "time_limit": TIME_LIMIT_S, "mip_rel_gap": gap}
        whole, bounds = np.array(self._whole, dtype=int), Bounds(self._lower, self._upper)
        rows = [LinearConstraint(matrix, low, high)]
        result = milp(times, integrality=whole, bounds=bounds, constraints=rows, options=options)
        if result.x is None:
            return None
        bound_s = self._unit_s * (result.fun if result.mip_dual_bound is None else result.mip_dual_bound)
        fastest = self._solution(np.round(result.x), bound_s, exact=result.status == 0)
        rows.append(LinearConstraint(times, -np.inf, fastest.seconds / self._unit_s))
        options = {"node_limit": int(nodes * TIDYING), "time_limit": TIME_LIMIT_S, "mip_rel_gap": TIDY_GAP}
        result = milp(self._work(), integrality=whole, bounds=bounds, constraints=rows, options=options)
        found = fastest
        if result.x is not None:
            tidy = self._solution(np.round(result.x), bound_s, exact=fastest.exact)
            slower, more = tidy.seconds > fastest.seconds * (1 + gap), _over(self.model, tidy.quantities)
            found = fastest if slower or more else tidy
        return _without_needless_work(self.model, found)

    def relax(self) -> Solution | None:
        matrix, low, high = self._matrix()
        equal = low == high
        above, below = ~equal & np.isfinite(high), ~equal & np.isfinite(low)
        result = linprog(
            self._costs(),
            A_ub=vstack([matrix[above], -matrix[below]]),
            b_ub=np.concatenate([high[above], -low[below]]),
            A_eq=matrix[equal],
            b_eq=high[equal],
            bounds=np.column_stack([self._lower, self._upper]),
            method="highs",
        )
        if result.x is None:
            return None
        places = {int(row): place for place, row in enumerate(np.flatnonzero(above))}
        worth = {
            quantity: -float(result.ineqlin.marginals[places[row]]) * self._unit_s / self._scale[quantity]
            for quantity, row in self._limits.items()
        }
        return self._solution(result.x, self._unit_s * result.fun, exact=False, per_byte_s=worth)

    def _solution(self, x: np.ndarray, bound_s: float, *, exact: bool, per_byte_s: Adds | None = None) -> Solution:
        def counts(columns: Sequence[int | None]) -> tuple[float, ...]:
            return tuple(0.0 if column is None else float(x[column]) for column in columns)

        saved, placed, treated = (tuple(map(counts, found)) for found in (self._saved, self._placed, self._treated))
        quantities = quantities_of(self.model, saved, placed, treated)
        seconds = self.model.seconds(quantities)
        return Solution(saved, placed, treated, quantities, seconds, min(bound_s, seconds), exact, per_byte_s or {})

    def _matrix(self) -> tuple[csr_array, np.ndarray, np.ndarray]:
        """The rows' coefficients, and the least and largest value of each."""
        entries = [(r, c, v) for r, (row, _, _) in enumerate(self._rows) for c, v in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_array((values, (rows, columns)), shape=(len(self._rows), len(self._lower)))
        return matrix, np.array([row[1] for row in self._rows]), np.array([row[2] for row in self._rows])

    def _work(self) -> np.ndarray:
        """The seconds of all lanes together, as costs of the quantities."""
        costs = np.zeros(len(self._lower))
        for quantity, rate in self.model.seconds_of_all.per.items():
            costs[self._quantities[quantity]] = rate * self._scale[quantity] / self._unit_s
        return costs

    def _costs(self) -> np.ndarray:
        costs = np.zeros(len(self._lower))
        costs[self._times] = 1.0
        return costs
