"""How much is tried: by ``make test`` what a change can wait for on two slow cores, by ``make test-exhaustive`` all.

Usually each value of a parameter is tried with some of the others', and properties on a third of their examples, others in each
run; exhaustively, with all of them, and on all.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import hypothesis

T = TypeVar("T")

EXHAUSTIVE = os.environ.get("LOHAN_EXHAUSTIVE", "0") != "0"
USUAL_SHARE = 1 / 3
DEFAULT_EXAMPLES = 100
"""Of a property that says nothing of it, as hypothesis has it."""


def number_of_examples(number: int) -> int:
    return number if EXHAUSTIVE else max(1, round(number * USUAL_SHARE))


def examples(number: int, **options: Any) -> hypothesis.settings:
    """A decorator: of ``number`` examples where all are tried; ``options`` as hypothesis.settings takes them."""
    return hypothesis.settings(max_examples=number_of_examples(number), **options)


def some_of(every: Sequence[T], usual: Collection[T]) -> list[T]:
    """``every`` one where all are tried, else those of them that are in ``usual``."""
    unknown = [one for one in usual if one not in every]
    assert not unknown, f"{unknown} are none of {every}"
    return [one for one in every if EXHAUSTIVE or one in usual]


def combinations(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """All of ``axes``' values with all others' where all are tried, else as many as the longest axis has, each in one."""
    if EXHAUSTIVE:
        return list(itertools.product(*axes))
    longest = max(len(axis) for axis in axes)
    # Axes of one length would meet in step; the second is shifted by one each time round, the third by two.
    return [
        tuple(axis[(number + order * (number // len(axis))) % len(axis)] for order, axis in enumerate(axes))
        for number in range(longest)
    ]
