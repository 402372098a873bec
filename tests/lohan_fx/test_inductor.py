"""inductor: segments are compiled once, used only where no bit changes and memory suffices, and else run op by op."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

from lohan_fx import inductor, meta
from lohan_fx.inductor import AUTO, BOXED, INDUCTOR, compile_segments, mode_for
from lohan_fx.measuring import segment_trial
from lohan_fx.passes.cut_segments import Run, Segment, replace_segments, segments_of
from lohan_fx.passes.halves import Halves
from lohan_fx.passes.liveness import bytes_at, peaks
from lohan_fx.plan import Plan, Recompute
from tests.passes import graphs
from tests.passes.fake_runtime import eager, run
from tests.passes.graphs import Captured

WIDTH = 64


class Blocks(nn.Module):
    """Equal blocks, whose ops between the matmuls can be compiled, and dropout, which cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(torch.relu(layer(x)) * 0.5 + x, 0.1)
        return x.sum()


@pytest.fixture(scope="module")
def found() -> Captured:
    torch.manual_seed(0)
    return graphs.capture(Blocks(), torch.rand(32, WIDTH))


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(inductor, "_compiled", {})
    monkeypatch.setattr(inductor, "_said", set())
    yield


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Segment]:
    """The segments that the compiler was given."""
    given: list[Segment] = []
    original = inductor._compile

    def counting(segment: Segment) -> Any:
        given.append(segment)
        return original(segment)

    monkeypatch.setattr(inductor, "_compile", counting)
    return given


def rewritten(found: Captured) -> tuple[Halves, Plan]:
    plan = graphs.plan_for(found, Recompute())
    return graphs.rewrite(found, plan), plan


def with_segments(halves: Halves) -> Halves:
    assert halves.backward is not None
    return dataclasses.replace(
        halves,
        forward=replace_segments(halves.forward, halves.compiled.get("forward", {})),
        backward=replace_segments(halves.backward, halves.compiled.get("backward", {})),
    )


def seconds(cost: meta.Cost) -> float:
    return cost.measured_s if cost.measured_s is not None else 1e-3


def used(halves: Halves) -> int:
    return sum(map(len, halves.compiled.values()))


def stub(monkeypatch: pytest.MonkeyPatch, *, off: float = 0.0, waste: int = 0) -> None:
    """In place of a compiler: the ops themselves, off by so much, and with so many bytes wasted."""

    def compile(segment: Segment) -> tuple[Run, dict[str, Any]]:
        ops = segment_trial._op_by_op(segment)
        namespace: dict[str, Any] = {"empty_strided_cpu": torch.empty_strided}

        def call(args: list[Any]) -> Any:
            made = []
            wasted = namespace["empty_strided_cpu"]((waste,), (1,)) if waste else None
            for value in ops(args):
                copy = namespace["empty_strided_cpu"](value.shape, value.stride())
                made.append(copy.copy_(value + off))
            del wasted
            return made

        return call, namespace

    monkeypatch.setattr(inductor, "_compile", compile)


def test_compiled_segments_change_no_bit_and_equal_ones_are_compiled_once(
    found: Captured, compiles: list[Segment]
) -> None:
    halves, plan = rewritten(found)
    compile_segments(halves, plan, INDUCTOR, seconds)
    distinct = {s.key for _, gm in halves.graphs() for s in segments_of(gm)}
    assert used(halves) > len(distinct) == len(compiles) >= 2
    assert run(with_segments(halves), found).equals(eager(found))
    again, _ = rewritten(found)
    compile_segments(again, plan, INDUCTOR, seconds)
    assert used(again) == used(halves) and len(compiles) == len(distinct)


def test_what_is_not_equal_in_every_bit_is_not_used(found: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    halves, plan = rewritten(found)
    compile_segments(halves, plan, INDUCTOR, seconds)
    assert used(halves) > 0
    inductor._compiled.clear()
    stub(monkeypatch, off=1e-7)
    halves, plan = rewritten(found)
    compile_segments(halves, plan, INDUCTOR, seconds)
    assert used(halves) == 0
    assert {c.refused for c in inductor._compiled.values()} == {"rounds otherwise than its ops"}


def test_what_needs_more_memory_than_the_plan_has_is_not_used(found: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    halves, plan = rewritten(found)
    most = max(peak.bytes for peak in peaks(halves, plan).values())
    stub(monkeypatch, waste=most // 4 + 1)
    compile_segments(halves, plan, INDUCTOR, seconds)
    assert all(c.peak_bytes > most for c in inductor._compiled.values())
    assert used(halves) == 0


def test_the_bytes_at_each_op_are_those_that_make_the_peak(found: Captured) -> None:
    halves, plan = rewritten(found)
    for name, alive in bytes_at(halves, plan).items():
        peak = peaks(halves, plan)[name]
        assert alive[peak.node] == peak.bytes == max(alive.values())


def test_what_is_allocated_out_of_sight_is_not_used(found: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "_compile", lambda segment: (segment_trial._op_by_op(segment), {}))
    halves, plan = rewritten(found)
    compile_segments(halves, plan, INDUCTOR, seconds)
    assert {c.refused for c in inductor._compiled.values()} == {"allocates where it cannot be counted"}


def test_without_a_compiler_all_runs_op_by_op_and_one_line_says_so(
    found: Captured, caplog: pytest.LogCaptureFixture, compiles: list[Segment]
) -> None:
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        for _ in range(2):
            halves, plan = rewritten(found)
            compile_segments(halves, plan, INDUCTOR, seconds)
            assert used(halves) == 0
    assert not compiles
    assert [r.message for r in caplog.records if "no C++ compiler" in r.message and r.levelno == logging.WARNING]
    assert len(caplog.records) == 1


def test_a_compiler_that_fails_is_told_of_once(
    found: Captured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(segment: Segment) -> Any:
        raise OSError("no Python.h")

    monkeypatch.setattr(inductor, "_compile", broken)
    halves, plan = rewritten(found)
    compile_segments(halves, plan, INDUCTOR, seconds)
    assert used(halves) == 0
    assert [r.levelno for r in caplog.records if "no Python.h" in r.message] == [logging.WARNING]
    assert run(with_segments(halves), found).equals(eager(found))


def test_auto_compiles_only_what_takes_long(found: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    halves, plan = rewritten(found)
    compile_segments(halves, plan, AUTO, lambda cost: 1e-6)
    assert not inductor._compiled and not halves.compiled
    compile_segments(halves, plan, AUTO, lambda cost: 1.0)
    assert inductor._compiled


def test_the_seconds_of_a_segment_are_shared_among_its_ops(found: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    halves, plan = rewritten(found)
    for _, gm in halves.graphs():
        for node in gm.graph.nodes:
            meta.set_cost(node, dataclasses.replace(meta.cost(node), measured_s=1.0))
    compile_segments(halves, plan, INDUCTOR, seconds)
    segment = next(s for s in segments_of(halves.forward) if s.name in halves.compiled["forward"])
    (took_s,) = {c.seconds for k, c in inductor._compiled.items() if k[1:] == segment.key}
    assert sum(seconds(meta.cost(n)) for n in segment.computing) == pytest.approx(took_s)


def test_where_auto_does_not_compile_no_memory_is_set_aside() -> None:
    small, large = inductor.AUTO_MEMORY_BYTES - 1, inductor.AUTO_MEMORY_BYTES
    assert mode_for(AUTO, "cpu", small) == BOXED == mode_for(AUTO, "cuda", large)
    assert mode_for(AUTO, "cpu", large) == AUTO
    assert mode_for(INDUCTOR, "cpu", small) == INDUCTOR
    with pytest.raises(ValueError, match="segments is 'fast': expected one of 'auto', 'boxed', 'inductor'"):
        mode_for("fast", "cpu", large)
