"""Graphs for several shapes: what captures leave in memory beside them, and what one more plan may keep at home."""

from __future__ import annotations

import dataclasses

import pytest

from lohan_fx.captured_graphs import CapturedGraphs
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.passes.halves import Halves
from lohan_fx.pipeline import compile_training
from lohan_fx.plan import Plan
from lohan_fx.planning import problem
from lohan_fx.planning.budgets import captured_again_bytes, staging_bytes
from lohan_fx.planning.memory_model import at_home_bytes, resident_bytes
from lohan_fx.request import Request
from tests.lohan_fx.test_pipeline import request
from tests.passes.graphs import FIRST_ACTIVATION_SLOT, Captured, captured

CAPTURED_BYTES = 100 << 20
"""What the first capture is promised to leave."""


@pytest.fixture
def found() -> Captured:
    return captured("transformer")


@pytest.fixture
def asked(found: Captured, monkeypatch: pytest.MonkeyPatch) -> Request:
    monkeypatch.setattr(problem, "SMALL_PARAMETER_ELEMENTS", 0)
    asked = request(found)
    fixed = staging_bytes(asked.windows, shared=True) + CAPTURED_BYTES
    return dataclasses.replace(
        asked, chooses_staging=False, budgets=dataclasses.replace(asked.budgets, fixed_bytes=fixed)
    )


def compiled(found: Captured, asked: Request) -> tuple[Halves, Plan]:
    return compile_training(
        found.joint,
        asked,
        num_outputs=found.num_outputs,
        parameters=found.parameters,
        activation_slots=lambda count: range(FIRST_ACTIVATION_SLOT, FIRST_ACTIVATION_SLOT + count),
    )


def test_each_capture_counts_for_the_plans_after_it(found: Captured, asked: Request) -> None:
    graphs = CapturedGraphs()
    again = captured_again_bytes(len(found.parameters), symbolic=False)
    for count in range(3):
        assert graphs.others_bytes(asked) == count * again
        graphs.add(*compiled(found, asked))
    assert [graphs.others_bytes(asked, before=index) for index in range(3)] == [0, again, 2 * again]
    graphs.forget_training()
    assert not graphs.plans and graphs.others_bytes(asked) == 0


def test_what_forgotten_graphs_have_left_is_there_for_the_next(found: Captured, asked: Request) -> None:
    graphs = CapturedGraphs()
    again = captured_again_bytes(len(found.parameters), symbolic=False)

    def forget(now_bytes: int) -> None:
        most_bytes = graphs.captured_bytes(asked)
        graphs.forget_training()
        graphs.have_left(now_bytes, most_bytes)

    for _ in range(3):
        graphs.add(*compiled(found, asked))
    forget(CAPTURED_BYTES + 2 * again + 1)
    for _ in range(3):
        assert graphs.others_bytes(asked) == 2 * again + 1
        graphs.add(*compiled(found, asked))
    assert graphs.others_bytes(asked) == 3 * again
    forget(1 << 40)  # what the caller has come to hold is none of ours
    assert graphs.others_bytes(asked) == 3 * again
    graphs.add(*compiled(found, asked))
    forget(CAPTURED_BYTES + 2 * again)  # and more of it may be free by now
    assert graphs.others_bytes(asked) == 2 * again
    forget(CAPTURED_BYTES - 1)
    assert graphs.others_bytes(asked) == 0


def test_a_plan_leaves_an_earlier_one_what_it_needs_at_work(found: Captured, asked: Request) -> None:
    """The first, of a larger batch say, needs all of the promise; so a second one has to make room for its own capture."""
    graphs = CapturedGraphs()
    assert graphs.most_at_home_bytes(asked) is None
    halves, plan = compiled(found, asked)
    assert plan.prediction is not None
    at_home = sum(resident_bytes(plan))
    again = captured_again_bytes(len(found.parameters), symbolic=False)
    peaks = plan.prediction.peak_bytes
    for unused in (0, again - 1, again, again + 7):
        graphs = CapturedGraphs()
        narrow = dataclasses.replace(plan, host_memory_bytes=peaks["host"] + unused)
        graphs.add(halves, narrow)
        assert graphs.most_at_home_bytes(asked) == at_home + unused - again


def test_a_plan_keeps_no_more_than_it_may(found: Captured, asked: Request) -> None:
    _, free = compiled(found, asked)
    (at_home,) = at_home_bytes(free)
    assert at_home > 0
    _, less = compiled(found, dataclasses.replace(asked, most_at_home_bytes=at_home // 2))
    assert at_home_bytes(less)[0] <= at_home // 2 and "earlier shape" in less.notes[-1]
    assert less.prediction is not None and less.prediction.peak_bytes["host"] < free.host_memory_bytes
    _, same = compiled(found, dataclasses.replace(asked, most_at_home_bytes=at_home))
    assert same.parameters == free.parameters and same.notes == free.notes
    with pytest.raises(InfeasiblePlan, match="earlier shapes may run again"):
        compiled(found, dataclasses.replace(asked, most_at_home_bytes=-1))
