"""bars: what the figures of a benchmark miss: told by the benchmark when it ends, and by the pages of docs/, which judge what
was saved by the bars of today."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import lohan_fx
from lohan_fx import inductor

Figures = Mapping[str, Any]

LEAST_OF_FIO = 0.95
MOST_FOR_CHECKSUMS = 0.03
SEGMENTS_DEFAULT = inspect.signature(lohan_fx.compile).parameters["segments"].default


def io(found: Figures) -> list[str]:
    """Of ``io.py``: every kind, over one directory and over two, with both sizes of chunks."""
    return [
        f"{row['kind']}, {directories(row)}, chunks of {row['chunk_elements']:,}: {row['ratio']:.3f} of fio, at least "
        f"{LEAST_OF_FIO} wanted"
        for row in found["rows"]
        if row["ratio"] < LEAST_OF_FIO
    ]


def io_ratios(rows: Sequence[Figures]) -> dict[str, float]:
    """Ours over fio's by name, over one directory: ``read_ratio`` and so on with the usual chunks, ``large_...`` with others."""
    usual = min(row["chunk_elements"] for row in rows)
    return {
        f"{'' if row['chunk_elements'] == usual else 'large_'}{row['kind']}_ratio": row["ratio"]
        for row in rows
        if row["directories"] == 1
    }


def directories(row: Figures) -> str:
    """``1 directory``, ``2 directories``."""
    return f"{row['directories']} director{'y' if row['directories'] == 1 else 'ies'}"


def checksums(found: Figures) -> list[str]:
    """Of ``checkpoint_cost.py``: of a step's processor time and of its seconds, and of raw I/O."""
    costs = {
        "processor_share": found["processor_share"],
        "step_ratio": found["step_ratio"] - 1,
        "raw_ratio": found["raw_ratio"] - 1,
    }
    return [
        f"{name}: {cost:.1%}, at most {MOST_FOR_CHECKSUMS:.0%} allowed"
        for name, cost in costs.items()
        if cost > MOST_FOR_CHECKSUMS
    ]


def segments(found: Figures) -> list[str]:
    """Of ``segments.py``: equal losses, and the default is the faster way in the mean of all cases with something to compile."""
    cases = found["cases"]
    missed = [f"{case['case']}: the losses differ" for case in cases if not case["losses_equal"]]
    ratios = [case["ratio"] for case in cases if case["prepared"]["compiled"]["segments"]]
    mean = statistics.geometric_mean(ratios) if ratios else 1.0
    if (mean < 1.0) == (SEGMENTS_DEFAULT == inductor.BOXED) and mean != 1.0:
        missed.append(f"compiled takes {mean:.3f}x the time of boxed, and {SEGMENTS_DEFAULT} is the default")
    return missed
