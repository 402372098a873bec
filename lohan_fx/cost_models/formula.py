"""formula: a step's seconds as sympy expressions, from which the numbers, the printed formula and the slopes come.

Stages follow each other, so their seconds add. Within a stage each term is what one lane needs; a stage in which the
lanes overlap takes as long as its longest term, a stage in which they wait for each other takes their sum.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.printing.str import StrPrinter

Expression = Any
"""A sympy expression; sympy has no types that mypy could check."""


class Combine(enum.StrEnum):
    """How the terms of a stage make its seconds: lanes that overlap, or lanes that wait for each other."""

    MAX = "max"
    SUM = "sum"


@dataclass(frozen=True)
class Term:
    """Seconds of one lane. ``lane`` is unique in its stage."""

    lane: str
    expression: Expression


@dataclass(frozen=True)
class StageFormula:
    """One stage; ``symbol`` is what the paper calls its seconds, ``citation`` where the terms come from."""

    name: str
    symbol: str
    terms: tuple[Term, ...]
    citation: str
    combine: Combine = Combine.MAX

    def __post_init__(self) -> None:
        lanes = [term.lane for term in self.terms]
        if len(set(lanes)) < len(lanes):
            raise ValueError(f"stage {self.name} has two terms of one lane: {', '.join(lanes)}")

    @property
    def expression(self) -> Expression:
        """Seconds of the stage."""
        expressions = [term.expression for term in self.terms]
        return sympy.Max(*expressions) if self.combine is Combine.MAX else sympy.Add(*expressions)


def symbols(names: str) -> Any:
    """Symbols that stand for numbers that are not negative: bytes, seconds, rates."""
    return sympy.symbols(names, nonnegative=True)


@dataclass(frozen=True)
class CostModel:
    """The stages of one system's training step."""

    name: str
    stages: tuple[StageFormula, ...]

    def evaluate(self, values: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Stage -> lane -> seconds. ``values``: symbol -> number in SI units; more than needed may be given.

        Raises ``ValueError`` that names the symbols without a value.
        """
        try:
            numbers = self._numbers(*[values[name] for name in self.names])
        except KeyError:
            missing = ", ".join(name for name in self.names if name not in values)
            raise ValueError(f"the cost model {self.name!r} needs a value for {missing}") from None
        found = iter(numbers)
        return {stage: {lane: next(found) for lane in lanes} for stage, lanes in self._layout}

    def stage_seconds(self, values: Mapping[str, float]) -> dict[str, float]:
        """Stage -> seconds."""
        evaluated = self.evaluate(values)
        return {stage.name: self._combined(stage, evaluated[stage.name]) for stage in self.stages}

    def seconds(self, values: Mapping[str, float]) -> float:
        """Seconds of the step."""
        return sum(self.stage_seconds(values).values())

    def binding(self, values: Mapping[str, float]) -> dict[str, str]:
        """Stage -> the lane whose term is the largest: of overlapping lanes the one that binds. Without empty stages."""
        evaluated = self.evaluate(values)
        return {
            stage: max(lanes, key=lambda lane: lanes[lane]) for stage, lanes in evaluated.items() if any(lanes.values())
        }

    def derivative(self, symbol: str, values: Mapping[str, float] | None = None) -> Any:
        """Seconds of the step per unit of ``symbol``: as an expression, or as a number at ``values``.

        Where two terms bind equally the slope is the mean of both sides.
        """
        if symbol not in self.names:
            raise ValueError(f"the cost model {self.name!r} has no {symbol}: it has {', '.join(self.names)}")
        slope = self._slopes(symbol)
        if values is None:
            return slope
        return float(slope.subs({s: values[s.name] for s in slope.free_symbols}))

    def slopes(self, values: Mapping[str, float]) -> dict[str, Expression]:
        """Symbol -> slope of the step's seconds along what holds at ``values``: as an expression, without those that
        are zero. Of terms of which the largest counts, the slope is that of the one that binds; where two bind equally,
        of the first."""
        holds = sympy.Add(*[self._holding(stage, values) for stage in self.stages])
        found = {name: sympy.diff(holds, symbols(name)) for name in self.names}
        return {name: slope for name, slope in found.items() if slope != 0}

    def _holding(self, stage: StageFormula, values: Mapping[str, float]) -> Expression:
        """What the stage's seconds are at ``values``, without what does not bind there."""
        numbers = {symbols(name): values[name] for name in self.names}
        terms = [_without_choices(term.expression, numbers) for term in stage.terms]
        if stage.combine is Combine.SUM:
            return sympy.Add(*terms)
        return max(terms, key=lambda term: _at(term, numbers))

    def formula(self, values: Mapping[str, float] | None = None) -> str:
        """The formula as text, a line per term: with names, or with numbers and the seconds they make."""
        total = f" = {self.seconds(values):.4g} s" if values is not None else ""
        lines = [f"{self.name}: T = {' + '.join(stage.symbol for stage in self.stages)}{total}"]
        evaluated = self.evaluate(values) if values is not None else {}
        for stage in self.stages:
            total = f" = {self._combined(stage, evaluated[stage.name]):.4g} s" if evaluated else ""
            lines.append(f"{stage.symbol}{total}: the {stage.combine.value} of  [{stage.citation}]")
            width = max(len(term.lane) for term in stage.terms)
            for term in stage.terms:
                text = str(term.expression) if values is None else _with_numbers(term.expression, values)
                result = f" = {evaluated[stage.name][term.lane]:.4g} s" if evaluated else ""
                lines.append(f"    {term.lane:<{width}}  {text}{result}")
        return "\n".join(lines)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The symbols that ``evaluate`` needs values for."""
        return tuple(sorted({symbol.name for term in self._terms for symbol in term.expression.free_symbols}))

    @functools.cached_property
    def _terms(self) -> tuple[Term, ...]:
        return tuple(term for stage in self.stages for term in stage.terms)

    @functools.cached_property
    def _layout(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((stage.name, tuple(term.lane for term in stage.terms)) for stage in self.stages)

    @functools.cached_property
    def _numbers(self) -> Callable[..., Iterable[float]]:
        expressions = [term.expression for term in self._terms]
        function: Callable[..., Iterable[float]] = sympy.lambdify(
            [symbols(name) for name in self.names], expressions, modules="math"
        )
        return function

    @functools.cached_property
    def _slopes(self) -> Callable[[str], Expression]:
        total = sympy.Add(*[stage.expression for stage in self.stages])
        return functools.cache(lambda symbol: sympy.diff(total, symbols(symbol)))

    @staticmethod
    def _combined(stage: StageFormula, lanes: Mapping[str, float]) -> float:
        return max(lanes.values()) if stage.combine is Combine.MAX else sum(lanes.values())


def _at(expression: Expression, numbers: Mapping[Expression, float]) -> float:
    return float(expression.subs(numbers))


def _without_choices(expression: Expression, numbers: Mapping[Expression, float]) -> Expression:
    """``expression`` with each ``Max`` and ``Min`` replaced by what it is at ``numbers``."""
    if not expression.has(sympy.Max, sympy.Min):
        return expression
    parts = [_without_choices(part, numbers) for part in expression.args]
    if isinstance(expression, sympy.Max | sympy.Min):
        pick = max if isinstance(expression, sympy.Max) else min
        return pick(parts, key=lambda part: _at(part, numbers))
    return expression.func(*parts)


class _Numbers(StrPrinter):  # type: ignore[misc]
    """Prints four digits of a symbol's value in place of its name."""

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__()
        self._values = values

    def _print_Symbol(self, symbol: Expression) -> str:
        return f"{self._values[symbol.name]:.4g}"


def _with_numbers(expression: Expression, values: Mapping[str, float]) -> str:
    """The expression with numbers for names, without what is zero."""
    zeros = {symbol: sympy.Integer(0) for symbol in expression.free_symbols if not values[symbol.name]}
    text: str = _Numbers(values).doprint(expression.xreplace(zeros))
    return text
