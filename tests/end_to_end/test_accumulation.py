"""Several backwards per step, in any order that PyTorch allows: exact, or refused before anything is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.held_gradients import HeldGradients
from lohan_fx.runtime.nvme_store import NvmeStore
from tests.end_to_end.models import GPT2_SHALLOW, PERCEPTRON, Case, Output, vectors
from tests.end_to_end.recipes import LR, MasterAdamW, assert_same_weights, weights_of

pytestmark = pytest.mark.usefixtures("leak_check")

Loop = Callable[[Any, Any], list[float]]
Streamed = Callable[..., AbstractContextManager[nn.Module]]


@pytest.fixture
def streamed(hw: HardwareProfile, tmp_path: Path) -> Streamed:
    """``with streamed(model) as model:`` trains it with states on NVMe, and releases it at the end."""

    def compile_it(model: nn.Module, dtype: torch.dtype = torch.float32) -> AbstractContextManager[nn.Module]:
        compiled_one = lohan_fx.compile(
            model, hw, nvme=tmp_path, compute_dtype=dtype, policy="keep", host_memory="2GiB"
        )
        return lohan_fx.releasing(compiled_one)

    return compile_it


def backwards(model: nn.Module, case: Case, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(**case.batch()).loss
        loss.backward()
        losses.append(loss.item())
    return losses


def steps_of(*counts: int, case: Case = PERCEPTRON) -> Loop:
    """A loop whose steps have that many backwards."""

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for count in counts:
            losses += backwards(model, case, count)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    return loop


class Shared(nn.Module):
    """Adds two parameters, which then have the same gradient: one tensor, handed over twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(24, 300)), nn.Parameter(torch.randn(24, 300))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        prediction = (x @ (self.one + self.other)).tanh()
        return Output((prediction.mean(dim=1) - y[:, 0]).square().mean(), prediction)


SHARED = Case("shared", Shared, vectors)


def assert_exact(loop: Loop, streamed: Streamed, *, case: Case = PERCEPTRON, **options: Any) -> None:
    """``loop`` gives the same losses and weights on lohan_fx as on plain PyTorch."""
    expected, model = case.build(), case.build()
    expected_losses = loop(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with streamed(model):
        losses = loop(model, lohan_fx.AdamW(model.parameters(), lr=LR, **options))
    assert losses == expected_losses
    assert_same_weights(weights_of(model), weights_of(expected))


# --- accumulation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [PERCEPTRON, GPT2_SHALLOW], ids=str)
def test_three_backwards_per_step_are_exact(case: Case, streamed: Streamed) -> None:
    assert_exact(steps_of(3, 3, 3, case=case), streamed, case=case)


def test_three_backwards_declared_are_exact(streamed: Streamed) -> None:
    assert_exact(steps_of(3, 3, 3), streamed, accumulation_steps=3)


def test_a_gradient_that_two_parameters_share_is_summed_for_each(streamed: Streamed) -> None:
    """Where it is held as it came, and another of the same step is added."""

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        if hasattr(model, "_lohan_fx"):
            compiled(model).engine.updates.holds = True
        return steps_of(1, 1, 3, 2, 1, case=SHARED)(model, optimizer)

    assert_exact(loop, streamed, case=SHARED)


def test_bf16_gradients_are_summed_in_fp32(streamed: Streamed) -> None:
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    master = MasterAdamW(expected, lr=LR)
    torch._dynamo.reset()
    expected_losses = steps_of(3, 3)(torch.compile(expected, backend="aot_eager", dynamic=False), master)
    with streamed(model, torch.bfloat16):
        losses = steps_of(3, 3)(model, lohan_fx.AdamW(model.parameters(), lr=LR))
    assert losses == expected_losses
    assert_same_weights(weights_of(model), {name: m.detach() for name, m in master.masters.items()})


def test_the_first_step_is_held_and_the_next_one_applied_in_its_last_backward(streamed: Streamed) -> None:
    with streamed(PERCEPTRON.build()) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        assert _applied_after_each_of_three(model) == [False, False, False]
        optimizer.step()
        assert _applied_after_each_of_three(model) == [False, False, True]
        optimizer.step()


def test_declared_accumulation_is_applied_in_the_first_steps_last_backward(streamed: Streamed) -> None:
    with streamed(PERCEPTRON.build()) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=3)
        assert _applied_after_each_of_three(model) == [False, False, True]
        optimizer.step()


def _applied_after_each_of_three(model: nn.Module) -> list[bool]:
    found = []
    for _ in range(3):
        backwards(model, PERCEPTRON, 1)
        found.append(compiled(model).engine.micro_batches.applied)
    return found


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 3}], ids=["learned", "declared"])
def test_a_step_with_fewer_backwards_is_exact_and_so_are_the_full_ones_after_it(
    options: dict[str, Any], streamed: Streamed
) -> None:
    """As at the end of an epoch whose batches do not fill the last step."""
    assert_exact(steps_of(3, 3, 1, 3, 3), streamed, **options)


def test_more_backwards_than_expected_are_refused_before_anything_is_computed(streamed: Streamed) -> None:
    expected, model, batch = PERCEPTRON.build(), PERCEPTRON.build(), vectors()
    steps_of(1, 1)(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with streamed(model):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        torch.manual_seed(1)
        backwards(model, PERCEPTRON, 1)
        optimizer.step()
        backwards(model, PERCEPTRON, 1)
        before = torch.get_rng_state()
        with pytest.raises(StepError, match="accumulation_steps"):
            model(**batch)
        assert torch.equal(torch.get_rng_state(), before), "the refused forward ran its dropout"
        optimizer.step()
    assert_same_weights(weights_of(model), weights_of(expected))


# --- other orders of calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"accumulation_steps": 2}], ids=["learned", "declared"])
def test_two_forwards_and_then_their_backwards_are_exact(options: dict[str, Any], streamed: Streamed) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps_of(2)(model, optimizer)
        for _ in range(2):
            pair = [model(**vectors()).loss for _ in range(2)]
            for loss in reversed(pair):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss.item() for loss in pair]
        return losses

    assert_exact(loop, streamed, **options)


def test_two_open_forwards_where_one_backward_was_the_rule_are_exact(streamed: Streamed) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps_of(1, 1)(model, optimizer)
        pair = [model(**vectors()).loss for _ in range(2)]
        sum(pair).backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses + [loss.item() for loss in pair]

    assert_exact(loop, streamed)


def test_two_forwards_before_a_step_that_changes_nothing_are_exact(streamed: Streamed) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps_of(1, 1)(model, optimizer)
        pair = [model(**vectors()).loss for _ in range(2)]
        optimizer.step()  # no gradient has come
        for loss in pair:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses + [loss.item() for loss in pair]

    assert_exact(loop, streamed)


def test_zero_grad_drops_gradients_that_are_held(streamed: Streamed) -> None:
    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        torch.manual_seed(1)
        losses = backwards(model, PERCEPTRON, 2)
        optimizer.zero_grad()
        losses += backwards(model, PERCEPTRON, 1)
        optimizer.step()
        optimizer.zero_grad()
        return losses

    assert_exact(loop, streamed)


def test_zero_grad_after_the_update_ran_is_refused(streamed: Streamed) -> None:
    with streamed(PERCEPTRON.build()) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=1)
        backwards(model, PERCEPTRON, 1)
        with pytest.raises(StepError, match=r"optimizer\.step\(\)"):
            optimizer.zero_grad()
        optimizer.step()


def test_a_forward_whose_graph_is_dropped_changes_nothing(streamed: Streamed) -> None:
    """A loss that is only looked at: that step is held, because its backward may yet come; the next ones are not."""
    applied: list[bool] = []

    def loop(model: nn.Module, optimizer: Any) -> list[float]:
        losses = steps_of(1, 1)(model, optimizer)
        losses.append(model(**vectors()).loss.item())
        for _ in range(2):
            losses += backwards(model, PERCEPTRON, 1)
            applied.append(hasattr(model, "_lohan_fx") and compiled(model).engine.micro_batches.applied)
            optimizer.step()
            optimizer.zero_grad()
        return losses

    assert_exact(loop, streamed)
    assert applied == [False, False, False, True]


def test_a_backward_through_parameters_that_a_step_has_changed_is_refused_as_in_plain(streamed: Streamed) -> None:
    def stale(model: nn.Module, optimizer: Any) -> None:
        old, new = (model(**vectors()).loss for _ in range(2))
        new.backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()

    expected = PERCEPTRON.build()
    stale(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with streamed(PERCEPTRON.build()) as model:
        stale(model, lohan_fx.AdamW(model.parameters(), lr=LR))


# --- parameters without updates -------------------------------------------------------------------------------


def test_frozen_parameters_stay_and_have_no_states(streamed: Streamed) -> None:
    def build() -> nn.Module:
        model = GPT2_SHALLOW.build()
        for index, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(index % 2 == 0)
        return model

    expected, model, start = build(), build(), weights_of(build())
    loop = steps_of(1, 1, 1, case=GPT2_SHALLOW)
    expected_losses = loop(expected, torch.optim.AdamW((p for p in expected.parameters() if p.requires_grad), lr=LR))
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    with streamed(model):
        losses = loop(model, lohan_fx.AdamW((p for p in model.parameters() if p.requires_grad), lr=LR))
        extents = {s.name: s.extents(4096) for s in compiled(model).engine.slots.values()}
        stored = {name: value.clone() for name, value in model.state_dict().items()}
    assert losses == expected_losses
    found = weights_of(model)
    assert_same_weights(found, weights_of(expected))
    assert_same_weights(stored, expected.state_dict())
    assert frozen and all(torch.equal(found[name], start[name]) for name in frozen)
    assert all(not p.requires_grad for name, p in model.named_parameters() if name in frozen)
    assert {name for name, of in extents.items() if not any("moments" in extent for extent in of)} == frozen


class HalfUsed(nn.Module):
    """``unused`` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(24, 8), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        prediction = self.used(x)
        return Output((prediction - y).square().mean(), prediction)


def test_a_parameter_without_a_gradient_is_left_alone(streamed: Streamed) -> None:
    case = Case("half used", HalfUsed, vectors)
    assert_exact(steps_of(1, 1, 1, case=case), streamed, case=case)


@pytest.mark.usefixtures("little_is_small")
def test_a_forward_waits_for_gradients_that_the_plan_leaves_no_room_for(
    on_nvme: Streamed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the backward before, which are on their way to a slow drive."""
    write, seen = NvmeStore.write, []

    def slow_write(store: NvmeStore, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.02)
        write(store, *args, **kwargs)

    monkeypatch.setattr(NvmeStore, "write", slow_write)
    monkeypatch.setattr(
        HeldGradients, "hold_bytes", property(lambda held: 0, lambda held, nbytes: held._forget_places())
    )
    with on_nvme(PERCEPTRON.build()) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        engine = compiled(model).engine
        on_the_clock = engine._on_the_clock

        def observed(label: str) -> AbstractContextManager[None]:
            if label == "forward":
                seen.append(engine.updates.window_used)
            return on_the_clock(label)

        monkeypatch.setattr(engine, "_on_the_clock", observed)
        steps_of(2, 2)(model, optimizer)
        monkeypatch.undo()
    assert seen == [0] * 4
