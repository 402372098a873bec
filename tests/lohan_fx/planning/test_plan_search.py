"""plan_search: windows for activations on their way are as wide as they pay, and graphs are scheduled anew for them."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest
import torch

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.forecasting.forecast import Asked, make_request
from lohan_fx.forecasting.meta_capture import MetaCapture, meta_capture
from lohan_fx.hardware import HardwareProfile
from lohan_fx.models.model_families import Family, ModelDims, build
from lohan_fx.passes.halves import Halves
from lohan_fx.pipeline import plan_training, rewrites_of
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.planning import plan_search
from lohan_fx.planning.problem import Problem
from lohan_fx.simulation.simulator import simulate

GIB = 1 << 30
GPU = HardwareProfile.preset("rtx4090-12xP5510")
DIMS = ModelDims("wide", Family.GPT2, 5, 4096, 32, "test", vocab=512, positions=1024, tied=True)
ASKED = Asked(GPU, host_memory_bytes=16 * GIB, device_memory_bytes=7 * GIB, loss_only=True)


@pytest.fixture(scope="module")
def found() -> MetaCapture:
    tokens = {name: torch.zeros(16, 1024, dtype=torch.long) for name in ("input_ids", "labels")}
    return meta_capture(build(DIMS, None), tokens, compute_dtype=torch.bfloat16)


def planned(found: MetaCapture, asked: Asked = ASKED) -> tuple[Plan, float]:
    """The plan, with the buffers that the planner begins with, and the seconds of a simulated step by it."""
    request = replace(make_request(found, asked), chooses_staging=False)
    halves, plan = plan_training(found.joint, request, num_outputs=found.num_outputs, parameters=found.parameters)
    return plan, simulate(halves, plan, request.hw).step_s


@pytest.fixture(scope="module")
def wide(found: MetaCapture) -> tuple[Plan, float]:
    return planned(found)


def test_what_comes_back_has_room_where_compute_would_wait_for_it(
    found: MetaCapture, wide: tuple[Plan, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, step_s = wide
    largest = max(a.bytes for a in plan.activations if isinstance(a.decision, Swap))
    monkeypatch.setattr(plan_search, "TIMES_LARGEST", ())
    narrow, narrow_s = planned(found)
    assert plan.windows.swap_in_bytes >= largest > narrow.windows.swap_in_bytes
    assert step_s < 0.98 * narrow_s


@pytest.fixture(scope="module")
def words() -> MetaCapture:
    """Twelve layers and 1.6 GB of logits."""
    tokens = {name: torch.zeros(8, 1024, dtype=torch.long) for name in ("input_ids", "labels")}
    dims = ModelDims("words", Family.GPT2, 12, 1280, 20, "test", vocab=50257, positions=1024, tied=True)
    return meta_capture(build(dims, None), tokens, compute_dtype=torch.bfloat16, device="cuda")


def test_what_stays_and_what_goes_take_turns_where_compute_would_wait(
    words: MetaCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where jobs take nothing of the interpreter, which the formula sees as a lane by itself: with it they are 8.4% apart."""
    hw = replace(GPU, interpreter_s_per_job=1e-12)
    asked = replace(ASKED, hw=hw, host_memory_bytes=32 * GIB, device_memory_bytes=10 * GIB)
    turns, turns_s = planned(words, asked)
    assert turns.prediction is not None and turns_s == pytest.approx(turns.prediction.step_s, rel=0.08)
    monkeypatch.setattr(plan_search, "_taking_turns", lambda problem: problem)
    row, row_s = planned(words, asked)
    assert turns_s < 0.92 * row_s
    early = {f"transformer.h.{layer}" for layer in range(4)}
    shares = []
    for plan in (row, turns):
        away = [a for a in plan.activations if isinstance(a.decision, Swap)]
        shares.append(sum(a.bytes for a in away if a.layer in early) / sum(a.bytes for a in away))
    assert shares[0] > 0.5 and shares[1] < 0.4


def test_what_is_needed_back_at_once_is_known(words: MetaCapture) -> None:
    asked: list[Problem] = []

    def first(problem: Problem, hw: HardwareProfile) -> Plan:
        asked.append(problem)
        raise InfeasiblePlan("enough")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InfeasiblePlan, match="enough"):
        patch.setattr(plan_search, "make_plan", first)
        planned(words, ASKED)
    problem = asked[0]
    sizes = {name: a.bytes for name, a in problem.activations.activations.items()}
    logits = {name for name, nbytes in sizes.items() if nbytes == 8 * 1024 * 50257 * 4}
    (awaited,) = logits & {name for name, _ in problem.coming_back_s}
    there_and_back_s = sizes[awaited] * (1 / GPU.d2h_bytes_per_s + 1 / GPU.h2d_bytes_per_s)
    assert problem.coming_back_s[awaited, Tier.HOST] == pytest.approx(there_and_back_s, rel=0.1)
    late = {problem.activations.activations[name].layer for name in problem.soon_back}
    assert awaited in problem.soon_back and late == {""}


def names(halves: Halves) -> list[list[str]]:
    return [[node.name for node in gm.graph.nodes] for _, gm in halves.graphs()]


def test_graphs_scheduled_anew_are_those_of_their_plan(found: MetaCapture, wide: tuple[Plan, float]) -> None:
    plan, _ = wide
    narrow, wider = (
        dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, fetch_bytes=room, swap_in_bytes=room))
        for room in (0, 4 * GIB)
    )
    given = found.joint, found.num_outputs, found.parameters
    rewrites = rewrites_of(*given)
    for asked in (narrow, wider, plan, narrow):
        assert names(rewrites.halves(asked)) == names(rewrites_of(*given).halves(asked))
    assert names(rewrites.halves(narrow)) != names(rewrites.halves(wider))
