"""bars: what figures miss, on figures made up."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bars")


def row(kind: str, directories: int, chunk: int, ratio: float) -> dict[str, Any]:
    return {"kind": kind, "directories": directories, "chunk_elements": chunk, "ratio": ratio}


def test_the_store_is_judged_over_one_directory_and_over_two(bars: ModuleType) -> None:
    rows = [row("read", 1, 1 << 20, 0.95), row("read", 2, 1 << 20, 0.94), row("mixed", 1, 1 << 21, 0.9)]
    assert bars.io({"rows": rows}) == [
        "read, 2 directories, chunks of 1,048,576: 0.940 of fio, at least 0.95 wanted",
        "mixed, 1 directory, chunks of 2,097,152: 0.900 of fio, at least 0.95 wanted",
    ]


def test_the_ratios_that_are_asked_for_are_those_of_one_directory(bars: ModuleType) -> None:
    rows = [row(kind, count, chunk, 0.9 + count / 100 + chunk / 2**30) for kind in ("read", "write", "mixed")
            for count in (1, 2) for chunk in (1 << 21, 1 << 20)]  # fmt: skip
    usual, large = (dict.fromkeys(("read", "write", "mixed"), 0.91 + chunk / 2**30) for chunk in (1 << 20, 1 << 21))
    expected = {f"{kind}_ratio": ratio for kind, ratio in usual.items()}
    assert bars.io_ratios(rows) == pytest.approx(expected | {f"large_{k}_ratio": ratio for k, ratio in large.items()})
    saved = json.loads((BENCHMARKS / "results" / "io.json").read_text())
    assert bars.io_ratios(saved["rows"]).items() <= saved.items()


def test_checksums_are_judged_in_a_step_and_in_raw_io(bars: ModuleType) -> None:
    assert bars.checksums({"processor_share": 0.03, "step_ratio": 1.02, "raw_ratio": 1.02}) == []
    missed = bars.checksums({"processor_share": 0.031, "step_ratio": 1.106, "raw_ratio": 1.05})
    assert [bar.partition(":")[0] for bar in missed] == ["processor_share", "step_ratio", "raw_ratio"]
    assert missed[-1] == "raw_ratio: 5.0%, at most 3% allowed"


def case(ratio: float, segments: int = 1, *, losses_equal: bool = True) -> dict[str, Any]:
    prepared = {"compiled": {"segments": segments}}
    return {"case": "one", "ratio": ratio, "losses_equal": losses_equal, "prepared": prepared}


def test_the_default_is_the_faster_way(bars: ModuleType) -> None:
    """Boxed is: what takes longer when it is compiled misses nothing, and cases with nothing to compile do not count."""
    assert bars.segments({"cases": [case(0.99), case(1.02), case(0.5, segments=0)]}) == []
    (missed,) = bars.segments({"cases": [case(0.95), case(1.02)]})
    assert missed == "compiled takes 0.984x the time of boxed, and boxed is the default"
    assert bars.segments({"cases": [case(1.1, losses_equal=False)]}) == ["one: the losses differ"]
