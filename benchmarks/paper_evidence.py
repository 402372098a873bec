"""paper_evidence: the papers' claims, what a row may know of them, and how a number of ours is judged.

A row never sees the numbers that it predicts: asking for a constant from the claim under judgement is an error, and a
constant that has several sources takes the first that is not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JUDGED_BY = ("arithmetic", "cost_model", "memory_model", "simulator")
MOST_ERROR = 0.10


@dataclass(frozen=True)
class Number:
    """One number of a claim, or one yes or no. ``error``: relative; 0 or infinite for a yes or no."""

    what: str
    paper: str
    ours: str
    error: float
    yes_or_no: bool = False


def equal(what: str, paper: float, ours: float) -> Number:
    return Number(what, f"{paper:.4g}", f"{ours:.4g}", abs(ours - paper) / abs(paper))


def inside(what: str, least: float, most: float, ours: float) -> Number:
    """The paper gives a range over settings that it does not name; an error is the distance to the range."""
    nearest = min(max(ours, least), most)
    return Number(what, f"{least:g} to {most:g}", f"{ours:.4g}", abs(ours - nearest) / nearest)


def holds(what: str, ours: bool) -> Number:
    """A statement that is true in the paper."""
    return Number(what, "yes", "yes" if ours else "no", 0.0 if ours else float("inf"), yes_or_no=True)


class Evidence:
    """What the row of claim ``judged`` may use. ``sources``: what it has used."""

    def __init__(self, claims: dict[str, dict[str, Any]], judged: str) -> None:
        self._claims = claims
        self.judged = judged
        self.sources: dict[str, None] = {}

    def paper(self, *path: str) -> Any:
        """The judged claim's own value, to compare with."""
        return self._value(self.judged, path)

    def of(self, claim: str, *path: str) -> Any:
        """A value of another claim, to compute with."""
        assert claim != self.judged, f"the row of {claim} would be made from {claim}"
        self.sources[claim] = None
        return self._value(claim, path)

    def first(self, *sources: tuple[tuple[str, ...], Callable[[], float]]) -> float:
        """The first constant none of whose claims is the judged one."""
        for claims, derive in sources:
            if self.judged not in claims:
                return derive()
        raise LookupError(f"no source of a constant is independent of {self.judged}")

    def given(self, source: str) -> None:
        """Note a source that is no claim: a data sheet, a hardware preset, a section of mechanisms.md."""
        self.sources[source] = None

    def _value(self, claim: str, path: tuple[str, ...]) -> Any:
        found: Any = self._claims[claim]["values"]
        for key in path:
            found = found[key]
        return found


@dataclass(frozen=True)
class Row:
    """A claim that can be judged: how, and why it is missed where it is known to be.

    ``left_out``: numbers of the claim that nothing here can judge, and why.
    """

    judge: Callable[[Evidence], list[Number]]
    reason: str = ""
    left_out: str = ""


def read_claims(path: Path) -> dict[str, dict[str, Any]]:
    """Claim id -> claim. Raises ``ValueError`` that says what is wrong with the file."""
    try:
        raw = json.loads(path.read_text())
        return {claim["id"]: claim for claim in raw}
    except OSError as error:
        raise ValueError(f"cannot read the papers' claims: {error}; give the file with --claims") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of claims: {error}") from error
