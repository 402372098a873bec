"""How large requests are is decided with the rest, and shows in no number: training, moments, checkpoints, resume."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.hardware import HardwareProfile, RequestRate
from lohan_fx.passes.lane_jobs import update_requests
from lohan_fx.passes.traffic import ends_of
from lohan_fx.plan import OptimizerTiming
from lohan_fx.planning import plan_search
from lohan_fx.planning.budgets import choose_windows, parse_bytes
from lohan_fx.planning.planner import make_plan
from lohan_fx.planning.predict import work_of
from lohan_fx.planning.problem import Problem
from lohan_fx.request import node_seconds
from lohan_fx.runtime.generation_files import read_generations
from lohan_fx.simulation.simulated_step import simulated_step_s
from tests.end_to_end.models import Case, Output
from tests.end_to_end.recipes import assert_same_weights, train, weights_of
from tests.exhaustive import combinations

pytestmark = pytest.mark.usefixtures("leak_check")

PROMISE = "136MiB"
RULE = choose_windows(parse_bytes(PROMISE, "host_memory"), [], shared=True)
STEPS = 3


class Wide(nn.Module):
    """A matrix of several chunks of each size, none of which divides it; its states do not fit the promise."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3000, 1301), nn.Linear(1301, 3)

    def forward(self, x: torch.Tensor) -> Output:
        prediction = self.down(self.up(x).tanh())
        return Output(prediction.square().mean(), prediction)


WIDE = Case("wide", Wide, lambda: {"x": torch.randn(4, 3000)})


def liking(hw: HardwareProfile, factor: float) -> HardwareProfile:
    """``hw`` with drives that are ten times as fast by requests ``factor`` times as large as the planner begins with."""
    sizes = {RULE.io_bytes * f: 1e8 * (10 if f == factor else 1) for f in (0.5, 1, 2)}
    rates = tuple(RequestRate(int(nbytes), rate, rate, rate) for nbytes, rate in sizes.items())
    return dataclasses.replace(hw, nvme=tuple(dataclasses.replace(drive, by_request=rates) for drive in hw.nvme[:1]))


def streamed(hw: HardwareProfile, nvme: Path, **options: Any) -> nn.Module:
    return lohan_fx.compile(WIDE.build(), hw, nvme=nvme, compute_dtype=torch.float32, host_memory=PROMISE, **options)


def moments_of(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [{k: v.clone() for k, v in state.items()} for state in optimizer.state_dict()["state"].values()]


def assert_same_moments(found: torch.optim.Optimizer, expected: torch.optim.Optimizer) -> None:
    for one, other in zip(moments_of(found), moments_of(expected), strict=True):
        assert all(torch.equal(one[name].view(-1), other[name].view(-1)) for name in ("exp_avg", "exp_avg_sq"))


@pytest.fixture
def plain() -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    model = WIDE.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, train(model, optimizer, WIDE, STEPS)


@pytest.mark.parametrize("checkpoints", [0, 1])
@pytest.mark.parametrize("factor", [0.5, 1, 2])
def test_the_sizes_that_drives_like_change_no_number(
    factor: float, checkpoints: int, hw: HardwareProfile, directory: Path, plain: Any
) -> None:
    expected, torchs, expected_losses = plain
    with lohan_fx.releasing(streamed(liking(hw, factor), directory, checkpoints=checkpoints)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2)
        assert train(model, optimizer, WIDE, STEPS) == expected_losses
        windows = compiled(model).plans[-1].windows
        assert windows.chunk_elements == compiled(model).engine.states.chunk_elements == factor * RULE.chunk_elements
        assert windows.io_bytes == factor * RULE.io_bytes
        assert_same_moments(optimizer, torchs)
    assert_same_weights(weights_of(model), weights_of(expected))


def test_a_resumed_run_goes_on_in_the_sizes_on_disk(hw: HardwareProfile, directory: Path, plain: Any) -> None:
    expected, torchs, expected_losses = plain
    begin = functools.partial(streamed, nvme=directory)
    with lohan_fx.releasing(begin(liking(hw, 2), checkpoints=1)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2)
        losses = train(model, optimizer, WIDE, 1)
        lohan_fx.checkpoint(model, optimizer)
        train(model, optimizer, WIDE, 1)
    (manifest,) = read_generations([directory])
    assert manifest.state["chunk_elements"] == 2 * RULE.chunk_elements
    with lohan_fx.releasing(begin(liking(hw, 0.5), resume_from_checkpoint=True)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2)
        lohan_fx.resume(model, optimizer)
        losses += train(model, optimizer, WIDE, STEPS - 1, seed=None)
        assert compiled(model).plans[-1].windows.chunk_elements == 2 * RULE.chunk_elements
        assert_same_moments(optimizer, torchs)
    assert losses == expected_losses
    assert_same_weights(weights_of(model), weights_of(expected))


@pytest.mark.parametrize("prepared", [False, True])
def test_moments_loaded_before_the_first_step_are_found_again(
    prepared: bool, hw: HardwareProfile, directory: Path, plain: Any
) -> None:
    """Once they are in the store, in pieces of some size, no plan chooses another."""
    expected, torchs, _ = plain
    with lohan_fx.releasing(streamed(liking(hw, 2), directory)) as model:
        model.load_state_dict(expected.state_dict())
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2)
        if prepared:
            lohan_fx.prepare(model, **WIDE.batch())
        optimizer.load_state_dict(torchs.state_dict())
        losses = train(model, optimizer, WIDE, STEPS)
        sizes = compiled(model).plans[-1].windows.chunk_elements
        assert sizes == (2 if prepared else 1) * RULE.chunk_elements
        assert losses == train(expected, torchs, WIDE, STEPS)
        assert_same_moments(optimizer, torchs)
    assert_same_weights(weights_of(model), weights_of(expected))


def test_a_checkpoint_from_before_the_first_step_is_of_no_size(
    hw: HardwareProfile, directory: Path, plain: Any
) -> None:
    """All its moments are zeros, whatever the pieces that the plan then chooses."""
    expected, _, expected_losses = plain
    with lohan_fx.releasing(streamed(liking(hw, 2), directory, checkpoints=2)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2)
        lohan_fx.checkpoint(model, optimizer)
        losses = train(model, optimizer, WIDE, STEPS)
        assert compiled(model).plans[-1].windows.chunk_elements == 2 * RULE.chunk_elements
    assert losses == expected_losses
    with lohan_fx.releasing(streamed(hw, directory, resume_from_checkpoint=True)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2)
        lohan_fx.resume(model, optimizer)
        assert train(model, optimizer, WIDE, STEPS) == expected_losses
    assert_same_weights(weights_of(model), weights_of(expected))


def test_where_no_plan_fits_smaller_requests_are_tried(
    hw: HardwareProfile, directory: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take less memory: a promise at which requests become larger must not be the end of a model that fitted."""
    expected, _, expected_losses = plain

    def plan_made(problem: Problem, hw: HardwareProfile) -> lohan_fx.Plan:
        if problem.windows.io_bytes == RULE.io_bytes:
            raise lohan_fx.InfeasiblePlan("no memory is left")
        return make_plan(problem, hw)

    monkeypatch.setattr(plan_search, "make_plan", plan_made)
    with lohan_fx.releasing(streamed(hw, directory)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2)
        assert train(model, optimizer, WIDE, STEPS) == expected_losses
        windows = compiled(model).plans[-1].windows
        assert (2 * windows.io_bytes, 2 * windows.chunk_elements) == (RULE.io_bytes, RULE.chunk_elements)
    assert_same_weights(weights_of(model), weights_of(expected))


@pytest.mark.parametrize("why", ["it does not fit", "it is slower"])
def test_a_plan_for_other_sizes_that_comes_to_nothing_leaves_the_planners_own(
    why: str, hw: HardwareProfile, directory: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _, expected_losses = plain
    made: list[int] = []

    def plan_made(problem: Problem, hw: HardwareProfile) -> lohan_fx.Plan:
        made.append(problem.windows.io_bytes)
        if why == "it does not fit" and made[-1] != RULE.io_bytes:
            raise lohan_fx.InfeasiblePlan("no memory is left for requests of that size")
        return make_plan(problem, hw)

    def step_s(*args: Any, **options: Any) -> float:
        """From the second plan on, which is the one to be compared, steps take ten times as long."""
        return simulated_step_s(*args, **options) * (1 if len(made) == 1 else 10)

    monkeypatch.setattr(plan_search, "make_plan", plan_made)
    monkeypatch.setattr(plan_search, "simulated_step_s", step_s)
    with lohan_fx.releasing(streamed(liking(hw, 2), directory)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=1e-2)
        assert train(model, optimizer, WIDE, STEPS) == expected_losses
        windows = compiled(model).plans[-1].windows
        assert made == [RULE.io_bytes, 2 * RULE.io_bytes]
        assert (windows.io_bytes, windows.chunk_elements) == (RULE.io_bytes, RULE.chunk_elements)
    assert_same_weights(weights_of(model), weights_of(expected))


@pytest.mark.parametrize(
    ("policy", "dtype", "clips"),
    combinations(["lohan-ds", "swap-nvme", "zero-infinity", "fuyou"], [torch.float32, torch.bfloat16], [False, True]),
)
def test_the_drives_get_as_many_requests_as_were_foretold(
    hw: HardwareProfile, tmp_path: Path, policy: str, dtype: torch.dtype, clips: bool
) -> None:
    options: dict[str, Any] = {
        "compute_dtype": dtype,
        "host_memory": PROMISE,
        "policy": policy,
        "hold_gradients": clips,
    }
    with lohan_fx.releasing(lohan_fx.compile(WIDE.build(), hw, nvme=tmp_path, **options)) as model:
        optimizer = lohan_fx.AdamW(model.parameters())
        owner = compiled(model)
        for step in range(3):
            owner.engine.before_reading()  # what is under way belongs to the step before
            if step == 2:
                owner.engine.timeline.start_recording()
            model(WIDE.batch()["x"].to(dtype)).loss.backward()
            if clips:
                lohan_fx.clip_grad_norm_(model, 1.0)
            optimizer.step()
        owner.engine.before_reading()
        made = [event for event in owner.engine.timeline.stop_recording() if event.lane == "ssd"]
        (halves,), (plan,) = owner.halves, owner.plans
        request = owner.request()
    work, ends = work_of(halves, plan, request), ends_of(halves, plan, node_seconds(request))
    # Beside what is updated when the backward has ended nothing computes, so that no requests are counted there.
    late = [p for p in plan.parameters if p.runs_beside(ends, "cpu") is OptimizerTiming.AFTER_BACKWARD]
    of_late = sum(update_requests(p, plan.windows) for p in late)
    assert len(made) == work.forward_requests + work.backward_requests + of_late
    assert len(made) > 4 * len(plan.parameters), "matrices are cut into several"
