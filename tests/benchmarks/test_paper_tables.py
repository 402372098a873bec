"""The papers' table: no row is made from its own claim, errors are what they say, pipelines take what they must."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("paper_evidence")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("paper_events")


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("paper_tables")


CLAIMS = {"A": {"values": {"s": 3.0}}, "B": {"values": {"deep": {"s": 4.0}}}}


def test_a_row_is_never_made_from_its_own_claim(evidence: ModuleType) -> None:
    e = evidence.Evidence(CLAIMS, "A")
    with pytest.raises(AssertionError, match="the row of A would be made from A"):
        e.of("A", "s")
    assert (e.paper("s"), e.of("B", "deep", "s"), list(e.sources)) == (3.0, 4.0, ["B"])


def test_a_constant_takes_its_first_source_that_is_independent(evidence: ModuleType) -> None:
    e = evidence.Evidence(CLAIMS, "A")
    assert e.first((("A",), lambda: 1.0), (("B",), lambda: 2.0)) == 2.0
    with pytest.raises(LookupError, match="independent of A"):
        e.first((("A",), lambda: 1.0))


def test_errors(evidence: ModuleType) -> None:
    assert evidence.equal("x", 4.0, 3.0).error == 0.25
    assert [evidence.inside("x", 2.0, 4.0, ours).error for ours in (1.0, 3.0, 5.0)] == [0.5, 0.0, 0.25]
    assert [evidence.holds("x", ours).error for ours in (True, False)] == [0.0, float("inf")]


def test_claims_that_cannot_be_read(evidence: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give the file with --claims"):
        evidence.read_claims(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text('[{"name": 1}]')
    with pytest.raises(ValueError, match="not a list of claims"):
        evidence.read_claims(tmp_path / "broken.json")


def test_a_pipeline_of_two_lanes_by_hand(events: ModuleType) -> None:
    """a 0-2, b 2-5 beside c 2-3 (another lane), d waits for both; e overtakes f in the queue behind a."""
    tasks = [
        events.Task("a", "x", 2.0),
        events.Task("b", "y", 3.0, ("a",)),
        events.Task("f", "x", 1.0, ("a",), 1),
        events.Task("e", "x", 1.0, ("a",)),
        events.Task("d", "x", 1.0, ("b", "e")),
    ]
    assert events.play(tasks) == {"a": 2.0, "e": 3.0, "f": 4.0, "b": 5.0, "d": 6.0}


def test_tasks_that_wait_for_each_other_are_named(events: ModuleType) -> None:
    with pytest.raises(AssertionError, match="these wait for each other: a, b"):
        events.play([events.Task("a", "x", 1.0, ("b",)), events.Task("b", "x", 1.0, ("a",))])


@pytest.mark.parametrize(("order", "seconds"), [("naive", 1 + 3 * 6.0), ("optimized", 15.0), ("delayed", 15.0)])
def test_handlers_by_hand(events: ModuleType, order: str, seconds: float) -> None:
    """Three blocks whose states take 2 s to read, 1 s to update, 3 s to write; computing is over in 3 s.

    Naive: one after the other from the first gradient on. Otherwise the drives never rest: 3 reads and 3 writes.
    """
    block = events.BlockSeconds(fetch=0.0, load=0.0, backward=1.0, gradient=0.0, read=2.0, update=1.0, write=3.0)
    ends = events.play(events.backward_tasks(block, 3, order))
    assert max(ends.values()) == pytest.approx(seconds)
    assert all(ends[f"update{i}"] >= max(ends[f"read{i}"], ends[f"gradient{i}"]) + 1.0 for i in range(3))


def test_updates_that_take_longest_hide_reads_and_writes(events: ModuleType) -> None:
    """One read, six updates of 5 s, one write; written later, the write of the last but one is in the way."""
    block = events.BlockSeconds(fetch=0.0, load=0.0, backward=1.0, gradient=0.0, read=2.0, update=5.0, write=2.0)
    ends = {
        order: max(events.play(events.backward_tasks(block, 6, order)).values()) for order in ("optimized", "delayed")
    }
    assert ends == {"optimized": 2.0 + 6 * 5.0 + 2.0, "delayed": 2.0 + 6 * 5.0 + 2 * 2.0}


def test_lsp_step_is_its_compute_where_nothing_else_binds(events: ModuleType) -> None:
    layer = events.LspLayer(forward=1.0, backward=2.0, down=0.1, update=0.1, up=0.1)
    ends = events.play(events.lsp_tasks(layer, 8, 4, 3))
    assert ends["backward2.0"] - ends["backward1.0"] == pytest.approx(8 * 3.0 + 0.3)


def row(claim: str, *errors: float | None, yes_or_no: bool = False) -> dict[str, Any]:
    numbers = [{"error": error, "yes_or_no": yes_or_no} for error in errors]
    return {"claim": claim, "within_10_percent": all(e is not None and e <= 0.1 for e in errors), "numbers": numbers}


def test_every_bar_can_be_missed(tables: ModuleType) -> None:
    met = [row("F-ME-01", 0.05, 0.0), row("A", 0.0, yes_or_no=True), *(row(f"B{n}", 0.1) for n in range(2))]
    assert tables.missed_bars(tables.summary(met), 5) == []  # of the fifth there is no row
    for more, missed in (
        (row("F-ME-03", 0.051), "2 of 3 numbers of throughput are within 5 %: expected all"),
        (row("C", 0.0, None, yes_or_no=True), "1 of 3 yes or no are wrong (C): expected none"),
        (row("D", 0.11), "66.7% of the claims are within 10 %: expected 80%"),
    ):
        figures = tables.summary([*met, more])
        assert missed in tables.missed_bars(figures, 6)
        assert tables.missed_bars(figures, None) == [bar for bar in [missed] if "of the claims" not in bar]
