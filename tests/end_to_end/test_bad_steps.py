"""Forward, backward and step in a wrong order, or interrupted: as plain PyTorch does, or refused before it is wrong."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import LohanError, OffloadedParameterError, StepError, StoreError
from lohan_fx.runtime.chunk_pipeline import ChunkPipeline
from lohan_fx.runtime.chunk_update import ChunkUpdate
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer
from tests.runtime.test_in_time import interrupted_at, lines_of
from tests.tiny import Plain, Tiny, batch, profile, same_weights

pytestmark = pytest.mark.usefixtures("leak_check")

POLICIES = ("keep", "swap-nvme", "recompute", "in-memory")


class Pair:
    """A model that lohan_fx trains, and its copy that plain PyTorch trains."""

    def __init__(self, nvme: Path, policy: str, **options: Any) -> None:
        self.model: nn.Module = Tiny()
        self.plain = Plain(self.model)
        lohan_fx.compile(
            self.model, profile(), nvme=nvme, host_memory="2GiB", compute_dtype=torch.float32, policy=policy
        )
        self.optimizer = lohan_fx.AdamW(self.model.parameters(), lr=0.01, **options)

    @property
    def engine(self) -> Engine:
        return compiled(self.model).engine

    def step(self, *seeds: int) -> None:
        """One step of both; every loss is the same."""
        losses = [self.model(batch(seed)) for seed in seeds]
        for loss in losses:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert [loss.item() for loss in losses] == self.plain.step(*map(batch, seeds))

    def checkpoint(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.model.state_dict(), self.optimizer.state_dict()

    def load(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(saved[1])

    def goes_on(self) -> None:
        """Three more steps equal plain PyTorch's, updated inside the backward again at the end."""
        for seed in (7, 8, 9):
            self.step(seed)
        self.model(batch()).backward()
        assert self.engine.micro_batches.applied
        self.optimizer.step()
        self.plain.step(batch())
        same_weights(self.model, self.plain.model)
        assert self.engine.swapped_out() == 0


@pytest.fixture(params=POLICIES)
def any_pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    """At the first step, whose gradients are held."""
    yield from paired(tmp_path, request.param)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    yield from paired(tmp_path, "swap-nvme")


@pytest.fixture
def eager_pair(tmp_path: Path) -> Iterator[Pair]:
    """Updates run inside every backward."""
    yield from paired(tmp_path, "swap-nvme", accumulation_steps=1)


def paired(nvme: Path, policy: str, **options: Any) -> Iterator[Pair]:
    made = Pair(nvme, policy, **options)
    try:
        yield made
    finally:
        lohan_fx.release(made.model)
        torch._dynamo.reset()
    assert not list(nvme.iterdir())


# --- optimizers that are not ours, or not of this model -------------------------------------------------------


def test_backward_without_an_optimizer(tmp_path: Path) -> None:
    model = Tiny()
    lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="2GiB")
    torch.optim.AdamW(model.parameters())
    loss = model(batch().bfloat16())
    with pytest.raises(StepError, match=r"lohan_fx\.AdamW\(model\.parameters\(\).*torch\.optim cannot update them"):
        loss.backward()
    lohan_fx.release(model)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_step_of_an_optimizer_of_torch(kind: type[torch.optim.Optimizer], pair: Pair) -> None:
    if kind is torch.optim.Adagrad:  # keeps a state of the size of each parameter, made at once
        theirs: Any = kind(pair.model.parameters(), lr=0.1)
    else:
        theirs = kind([{"params": [nn.Parameter(torch.ones(2))]}, {"params": pair.model.parameters()}], lr=0.1)
    for backward in (False, True):
        if backward:
            pair.model(batch()).backward()
        with pytest.raises(OffloadedParameterError, match=r"layers\.0\.weight, which is offloaded.*lohan_fx\.AdamW"):
            theirs.step()
    pair.optimizer.step()
    pair.plain.step(batch())
    pair.goes_on()


def test_an_optimizer_of_torch_is_left_alone_after_release(tmp_path: Path) -> None:
    model = lohan_fx.compile(Tiny(), profile(), nvme=tmp_path, host_memory="2GiB")
    lohan_fx.release(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch()).backward()
    optimizer.step()
    assert not _global_optimizer_pre_hooks


def test_parameters_that_are_not_of_a_compiled_model(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"AdamW was given a parameter of shape \(16, 16\).*after lohan_fx\.compile"):
        lohan_fx.AdamW(Tiny().parameters())
    model = Tiny()
    early = list(model.parameters())
    lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="2GiB")
    with pytest.raises(TypeError, match="not of a compiled model"):
        lohan_fx.AdamW(early)
    with pytest.raises(TypeError, match="not of a compiled model"):
        lohan_fx.AdamW([*model.parameters(), nn.Parameter(torch.ones(3))])
    shells = list(model.parameters())
    optimizer = lohan_fx.AdamW(shells)  # what was refused left no optimizer behind
    lohan_fx.release(model)
    with pytest.raises(TypeError, match="not of a compiled model"):
        lohan_fx.AdamW(shells)
    with pytest.raises(StepError, match="released"):
        optimizer.step()


def test_parameters_of_two_models(tmp_path: Path) -> None:
    models = [Tiny(), Tiny()]
    for number, model in enumerate(models):
        (tmp_path / str(number)).mkdir()
        lohan_fx.compile(model, profile(), nvme=tmp_path / str(number), host_memory="1GiB")
    with pytest.raises(ValueError, match=r"is of another compiled model.*one optimizer per model"):
        lohan_fx.AdamW([*models[0].parameters(), *models[1].parameters()])
    lohan_fx.AdamW(models[0].parameters())
    with pytest.raises(ValueError, match="has an optimizer already"):
        lohan_fx.AdamW(models[0].parameters())
    for model in models:
        lohan_fx.release(model)


def test_some_of_the_parameters_train_only_those(tmp_path: Path) -> None:
    """As in torch: the gradients of the others change nothing."""
    model = Tiny()
    plain = Plain(model)
    plain.optimizer = torch.optim.AdamW(plain.model.layers[1:].parameters(), lr=0.01, foreach=False)
    lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="2GiB", compute_dtype=torch.float32, policy="keep")
    optimizer = lohan_fx.AdamW(model.layers[1:].parameters(), lr=0.01)
    for seed in range(3):
        model(batch(seed)).backward()
        optimizer.step()
        plain.step(batch(seed))
    lohan_fx.release(model)
    same_weights(model, plain.model)


def test_no_norm_leaves_out_parameters_in_silence(tmp_path: Path) -> None:
    """Which torch would count; of those that the optimizer was not given no gradient is kept."""
    model = lohan_fx.compile(Tiny(), profile(), nvme=tmp_path, host_memory="2GiB", compute_dtype=torch.float32)
    optimizer = lohan_fx.AdamW(model.layers[1:].parameters(), lr=0.01)
    model(batch()).backward()
    with pytest.raises(
        ValueError, match=r"leave out layers\.0\.weight, layers\.0\.bias, which the optimizer was not given"
    ):
        lohan_fx.clip_grad_norm_(model, 1.0)
    lohan_fx.clip_grad_norm_(model.layers[1:].parameters(), 1.0)
    optimizer.step()
    lohan_fx.release(model)


def test_nor_does_torchs_own(tmp_path: Path) -> None:
    model = lohan_fx.compile(Tiny(), profile(), nvme=tmp_path, host_memory="2GiB", compute_dtype=torch.float32)
    optimizer = lohan_fx.AdamW(model.layers[1:].parameters(), lr=0.01)
    model(batch()).backward()
    with pytest.raises(ValueError, match=r"gradient of layers\.0\.weight was asked for.*the optimizer was not given"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(model.layers[1:].parameters(), 1.0)
    optimizer.step()
    assert model.layers[0].weight.grad is None
    lohan_fx.release(model)


# --- gradients ------------------------------------------------------------------------------------------------


def norm_of_gradients(model: nn.Module) -> None:
    torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)


def clip_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def unscale(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("reads", [clip_norm, clip_values, norm_of_gradients, unscale])
def test_gradients_that_went_to_the_optimizer_cannot_be_read(
    reads: Callable[[nn.Module], None], eager_pair: Pair
) -> None:
    pair = eager_pair
    pair.model(batch(0)).backward()
    assert pair.engine.micro_batches.applied
    with pytest.raises(StepError, match=r"gradient of layers\.0\.weight.*inside the backward.*hold_gradients=True"):
        reads(pair.model)
    pair.optimizer.step()
    pair.plain.step(batch(0))
    same_weights(pair.model, pair.plain.model)


def test_values_of_held_gradients_cannot_be_clipped(pair: Pair) -> None:
    pair.model(batch(0)).backward()
    with pytest.raises(
        OffloadedParameterError, match=r"gradient of layers\.0\.weight, which is held.*lohan_fx\.grad\("
    ):
        clip_values(pair.model)
    pair.optimizer.step()
    pair.plain.step(batch(0))
    pair.goes_on()


def test_there_are_no_gradients_before_backward_and_after_step(pair: Pair) -> None:
    for _ in range(2):
        assert torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1.0) == 0
        assert all(p.grad is None for p in pair.model.parameters())
        pair.step(0)


def test_a_gradient_of_a_step_that_is_over(pair: Pair) -> None:
    pair.model(batch(0)).backward()
    gradients = [p.grad for p in pair.model.parameters() if p.grad is not None]
    pair.optimizer.step()
    pair.plain.step(batch(0))
    with pytest.raises(StepError, match="applied or dropped by now: ask between backward and"):
        torch.nn.utils.get_total_norm(gradients)
    pair.model(batch(1)).backward()
    with pytest.raises(StepError, match="applied or dropped by now"):
        torch.nn.utils.get_total_norm(gradients)
    assert not pair.engine.updates.holds
    pair.optimizer.step()
    pair.plain.step(batch(1))
    pair.goes_on()


def test_gradients_cannot_be_set(pair: Pair) -> None:
    weight = next(pair.model.parameters())
    with pytest.raises(OffloadedParameterError, match=r"gradient of layers\.0\.weight cannot be set"):
        weight.grad = torch.ones(16, 16)
    weight.grad = None
    with pytest.raises(OffloadedParameterError, match=r"grad was called on layers\.0\.weight"):
        torch.autograd.grad(pair.model(batch()), [weight])


def test_a_nan_goes_through_as_in_pytorch(any_pair: Pair) -> None:
    pair = any_pair
    pair.step(0)
    bad = batch(1)
    bad[0, 0] = float("nan")
    for x in (bad, batch(2)):
        loss = pair.model(x)
        loss.backward()
        pair.optimizer.step()
        assert loss.isnan()
        assert all(torch.tensor(value).isnan() for value in pair.plain.step(x))
    for name, value in pair.model.state_dict().items():
        torch.testing.assert_close(value, pair.plain.model.state_dict()[name], rtol=0, atol=0, equal_nan=True)


# --- the order of calls ---------------------------------------------------------------------------------------


def test_the_same_backward_twice(any_pair: Pair) -> None:
    pair = any_pair
    loss = pair.model(batch(0))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    pair.optimizer.step()
    pair.plain.step(batch(0))
    pair.goes_on()


def test_the_same_backward_twice_with_retained_graph(tmp_path: Path) -> None:
    for made in paired(tmp_path, "recompute"):
        for graph in (made.model(batch(0)), made.plain.model(batch(0))):
            graph.backward(retain_graph=True)
            graph.backward()
        made.optimizer.step()
        made.plain.optimizer.step()
        made.plain.optimizer.zero_grad()
        same_weights(made.model, made.plain.model)
        made.step(1, 2)
        made.step(3)
        made.goes_on()


def test_a_swapped_activation_is_good_for_one_backward(pair: Pair) -> None:
    saved = pair.checkpoint()
    loss = pair.model(batch(0))
    loss.backward(retain_graph=True)
    with pytest.raises(StepError, match=r"second time.*retain_graph=True.*run the forward again for each backward"):
        loss.backward()
    del loss
    pair.optimizer.zero_grad()
    pair.load(saved)
    pair.goes_on()


def test_a_second_backward_after_the_update(eager_pair: Pair) -> None:
    pair = eager_pair
    loss = pair.model(batch(0))
    loss.backward(retain_graph=True)
    for again in (loss.backward, lambda: pair.model(batch(1))):
        with pytest.raises(StepError, match=r"optimizer\.step\(\).*accumulation_steps=n"):
            again()
    pair.optimizer.step()
    pair.plain.step(batch(0))
    pair.goes_on()


def test_a_backward_whose_parameters_have_moved_on(any_pair: Pair) -> None:
    pair = any_pair
    old, plain_old = pair.model(batch(0)), pair.plain.model(batch(0))
    pair.step(1)
    for loss in (old, plain_old):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    del old, loss
    pair.plain.optimizer.zero_grad()
    pair.goes_on()


def test_a_forward_whose_backward_never_comes(any_pair: Pair) -> None:
    pair = any_pair
    pair.step(0)
    for _ in range(3):
        pair.model(batch(5))
    pair.step(1)
    pair.step(2)
    pair.goes_on()


def test_a_backward_before_any_forward(pair: Pair) -> None:
    torch.ones(3, requires_grad=True).sum().backward()
    pair.optimizer.step()
    pair.optimizer.step()
    pair.goes_on()


def test_a_look_at_the_parameters_between_backward_and_step(eager_pair: Pair) -> None:
    pair = eager_pair
    saved = pair.checkpoint()
    pair.model(batch(0)).backward()
    looks: dict[str, Callable[[], object]] = {
        "read": pair.model.state_dict,
        "loaded": lambda: pair.load(saved),
        "read between": pair.optimizer.state_dict,
        "loaded between": lambda: pair.optimizer.load_state_dict(saved[1]),
        "forward": lambda: pair.model.eval()(batch(1)),
    }
    for word, look in looks.items():
        with pytest.raises((StepError, RuntimeError), match=rf"(?s){word}.*call optimizer\.step\(\)"):
            look()
    pair.model.train()
    pair.optimizer.step()
    pair.plain.step(batch(0))
    pair.goes_on()


def test_a_look_while_gradients_are_only_held(pair: Pair) -> None:
    pair.model(batch(0)).backward()
    same_weights(pair.model, pair.plain.model)
    assert pair.optimizer.state_dict()["state"] == {}
    with torch.no_grad():
        assert pair.model(batch(1)).item() == pair.plain.model(batch(1)).item()
    loaded = {name: value + 1 for name, value in pair.model.state_dict().items()}
    pair.model.load_state_dict(loaded)
    pair.plain.model(batch(0)).backward()
    pair.plain.model.load_state_dict(loaded)
    pair.optimizer.step()  # the gradient stays, as in PyTorch
    pair.plain.optimizer.step()
    pair.plain.optimizer.zero_grad()
    same_weights(pair.model, pair.plain.model)


# --- between backward and step --------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_grad", ["optimizer", "model"])
def test_zero_grad_after_the_update(zero_grad: str, eager_pair: Pair) -> None:
    pair = eager_pair
    pair.model(batch(0)).backward()
    with pytest.raises(StepError, match=r"zero_grad\(\).*cannot be taken back: call optimizer\.step\(\) first"):
        getattr(pair, zero_grad).zero_grad()
    pair.optimizer.step()
    pair.plain.step(batch(0))
    pair.goes_on()


@pytest.mark.parametrize("zero_grad", ["optimizer", "model"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_is_held(zero_grad: str, set_to_none: bool, pair: Pair) -> None:
    pair.model(batch(0)).backward()
    getattr(pair, zero_grad).zero_grad(set_to_none=set_to_none)
    assert all(p.grad is None for p in pair.model.parameters())
    pair.goes_on()


def test_zero_grad_between_forward_and_backward(any_pair: Pair) -> None:
    for seed in range(3):
        loss = any_pair.model(batch(seed))
        any_pair.optimizer.zero_grad()
        loss.backward()
        any_pair.optimizer.step()
        assert [loss.item()] == any_pair.plain.step(batch(seed))
    any_pair.goes_on()


def test_another_learning_rate_between_backward_and_step(pair: Pair) -> None:
    pair.model(batch(0)).backward()
    pair.plain.model(batch(0)).backward()
    for optimizer in (pair.optimizer, pair.plain.optimizer):
        optimizer.param_groups[0]["lr"] = 0.5  # in time: the gradients are held
        optimizer.step()
    pair.plain.optimizer.zero_grad()
    same_weights(pair.model, pair.plain.model)
    pair.model(batch(1)).backward()
    pair.optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(StepError, match=r"param group 0 changed.*lr=0\.5.*lr=0\.1.*after step\(\)"):
        pair.optimizer.step()
    pair.optimizer.param_groups[0]["lr"] = 0.5
    pair.optimizer.step()
    pair.plain.step(batch(1))
    pair.goes_on()


def test_a_closure_that_fails(pair: Pair) -> None:
    pair.step(0)
    with pytest.raises(ZeroDivisionError):
        pair.optimizer.step(lambda: 1 // 0)
    pair.goes_on()


def test_a_closure_after_a_backward(pair: Pair) -> None:
    """Its ``zero_grad`` comes too late."""
    pair.step(0)
    pair.model(batch(1)).backward()

    def closure() -> torch.Tensor:
        pair.optimizer.zero_grad()
        raise AssertionError("not reached")

    with pytest.raises(StepError, match="zero_grad"):
        pair.optimizer.step(closure)
    pair.optimizer.step()
    pair.plain.step(batch(1))
    pair.goes_on()


# --- exceptions in the middle ---------------------------------------------------------------------------------


def test_an_exception_between_forward_and_backward(any_pair: Pair) -> None:
    any_pair.step(0)
    with pytest.raises(ZeroDivisionError):
        _ = any_pair.model(batch(1)) / (1 // 0)
    any_pair.goes_on()


def test_an_exception_in_the_backward_before_ours(any_pair: Pair) -> None:
    pair = any_pair
    for seed in range(2):
        loss = pair.model(batch(seed))
        loss.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
        pair.optimizer.zero_grad()
        pair.step(seed)
    pair.goes_on()


def test_an_exception_in_the_backward_after_ours(eager_pair: Pair) -> None:
    """The updates ran: what PyTorch would have in ``.grad`` is applied, and only ``step`` is missing."""
    pair = eager_pair
    x = batch(0).requires_grad_()
    x.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        pair.model(x).backward()
    with pytest.raises(StepError, match="cannot be taken back"):
        pair.optimizer.zero_grad()
    pair.optimizer.step()
    pair.plain.step(batch(0))
    pair.goes_on()


def fails(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_an_exception_among_the_updates(eager_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = eager_pair
    pair.step(0)
    saved = pair.checkpoint()
    fail_at(pair.engine, monkeypatch, "layers.1.weight")
    with pytest.raises(ZeroDivisionError):
        pair.model(batch(1)).backward()
    refusals: list[Callable[[], object]] = [
        lambda: pair.model(batch(1)),
        pair.optimizer.step,
        pair.model.state_dict,
        pair.optimizer.state_dict,
    ]
    for refused in refusals:
        with pytest.raises(StepError, match=r"of two different steps.*load_state_dict"):
            refused()
    pair.optimizer.zero_grad()
    pair.model.zero_grad()
    pair.model.load_state_dict(saved[0])
    with pytest.raises(StepError, match="not loaded yet: optimizer states"):
        pair.model(batch(1))
    pair.optimizer.load_state_dict(saved[1])
    pair.goes_on()


def test_the_optimizer_may_be_loaded_first(eager_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = eager_pair
    saved = pair.checkpoint()
    fail_at(pair.engine, monkeypatch, "layers.1.bias")
    with pytest.raises(ZeroDivisionError):
        pair.model(batch(0)).backward()
    pair.optimizer.load_state_dict(saved[1])
    pair.model.load_state_dict({"layers.0.weight": saved[0]["layers.0.weight"]}, strict=False)
    with pytest.raises(StepError, match=r"not loaded yet: layers\.0\.bias:master, layers\.1"):
        pair.model(batch(1))
    pair.model.load_state_dict(saved[0])
    pair.goes_on()


def test_a_model_that_is_torn_can_be_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(tmp_path, "keep", accumulation_steps=1)
    fail_at(pair.engine, monkeypatch, "layers.0.weight")
    with pytest.raises(ZeroDivisionError):
        pair.model(batch(0)).backward()
    with pytest.warns(UserWarning, match="the last step failed half-way") as warned:
        lohan_fx.release(pair.model)
    assert warned[0].filename == __file__
    assert torch.isfinite(pair.model(batch(0)))


def fail_at(engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The next gradient of parameter ``name`` meets an exception where it is handed over."""
    offer = OutOfCoreOptimizer.offer

    def failing(optimizer: OutOfCoreOptimizer, slot: int, *args: Any) -> None:
        if engine.slots[slot].name == name:
            monkeypatch.undo()
            raise ZeroDivisionError
        offer(optimizer, slot, *args)

    monkeypatch.setattr(OutOfCoreOptimizer, "offer", failing)


def test_an_exception_while_gradients_are_held(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(pair.engine, monkeypatch, "layers.1.weight")
    with pytest.raises(ZeroDivisionError):
        pair.model(batch(0)).backward()
    there = [parameter.grad is not None for parameter in pair.model.parameters()]
    assert any(there) and not all(there)  # as in PyTorch
    pair.optimizer.zero_grad()
    pair.goes_on()


def test_what_a_failed_backward_held_is_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without zero_grad the gradients that arrived stay, in PyTorch as here."""
    pair = Pair(tmp_path, "keep")
    fail_at(pair.engine, monkeypatch, "layers.1.weight")
    with pytest.raises(ZeroDivisionError):
        pair.model(batch(0)).backward()
    held = {
        engine_slot.name for slot, engine_slot in pair.engine.slots.items() if pair.engine.residency[slot].contributions
    }
    assert held and "layers.0.weight" not in held
    pair.plain.model(batch(0)).backward()
    for name, parameter in pair.plain.model.named_parameters():
        if name not in held:
            parameter.grad = None
    pair.step(1)
    same_weights(pair.model, pair.plain.model)
    lohan_fx.release(pair.model)


def test_an_interrupted_step_may_be_called_again(any_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = any_pair
    for seed in range(2):
        pair.model(batch(seed)).backward()
        optimizer, barrier = pair.engine.updates._optimizer, pair.engine.updates._optimizer.barrier
        calls = iter([seed == 0, False])  # after gradients are handed over: at the second barrier, or the first

        def interrupted(*args: Any, calls: Any = calls, barrier: Any = barrier) -> None:
            if not next(calls, True):
                monkeypatch.undo()
                raise KeyboardInterrupt
            barrier()

        monkeypatch.setattr(optimizer, "barrier", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.step()
        pair.optimizer.step()
        pair.plain.step(batch(seed))
        same_weights(pair.model, pair.plain.model)
    pair.goes_on()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_update_that_is_interrupted_tears_the_step(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread that calls ``step``: how far it came nobody could tell the next call, which must not end well."""
    pair = Pair(tmp_path, "in-memory")
    pair.engine.updates.holds = True
    pair.step(0)
    before = {name: value.clone() for name, value in pair.model.state_dict().items()}
    moments = copy.deepcopy(pair.optimizer.state_dict())
    pair.model(batch(1)).backward()
    calls, compute = itertools.count(), ChunkUpdate.compute

    def interrupted(self: ChunkUpdate, *args: Any) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        compute(self, *args)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(ChunkUpdate, "compute", interrupted)
        pair.optimizer.step()
    for again in (pair.optimizer.step, lambda: pair.model(batch(1)), pair.model.state_dict):
        with pytest.raises(StepError, match="a step failed after some parameters had been updated"):
            again()
    pair.model.load_state_dict(before)
    pair.optimizer.load_state_dict(moments)
    for seed in (1, 2):
        pair.step(seed)
    lohan_fx.release(pair.model)
    same_weights(pair.model, pair.plain.model)


@pytest.mark.parametrize("work", [OutOfCoreOptimizer.apply_held, OutOfCoreOptimizer.repeat, ChunkPipeline.arrive])
def test_an_interrupt_while_updates_are_handed_to_lanes_leaves_the_rest_to_the_next_call(
    work: Callable[..., object], pair: Pair
) -> None:
    pair.engine.updates.holds = True
    for seed, line in enumerate(lines_of(work.__code__)):
        pair.model(batch(seed)).backward()
        with interrupted_at(work.__code__, line), contextlib.suppress(KeyboardInterrupt):
            pair.optimizer.step()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.plain.step(batch(seed))
        assert all(pair.engine.residency[slot].updates == seed + 1 for slot in pair.engine.slots)
    same_weights(pair.model, pair.plain.model)


@pytest.mark.parametrize("kind", [StoreError, KeyboardInterrupt])
def test_whatever_ends_the_wait_for_an_update_that_has_failed_tears_the_step(
    pair: Pair, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.engine.updates.holds = True
    pair.step(0)
    optimizer = pair.engine.updates._optimizer
    with monkeypatch.context() as patched, pytest.raises(kind):
        patched.setattr(optimizer, "finish_updates", fails_with(kind("no more")))
        patched.setattr(optimizer, "update_failed", lambda: True)
        pair.engine.updates.finish_updates()
    with pytest.raises(StepError, match="a step failed after some parameters had been updated"):
        pair.optimizer.step()


def fails_with(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


# --- parameters frozen and thawed -----------------------------------------------------------------------------


def test_a_parameter_frozen_after_compile(any_pair: Pair) -> None:
    pair = any_pair
    pair.step(0)
    for model in (pair.model, pair.plain.model):
        model.layers[0].weight.requires_grad = False
        model.layers[2].requires_grad_(False)
    pair.step(1)
    pair.step(2)
    for model in (pair.model, pair.plain.model):
        model.requires_grad_(True)
    pair.goes_on()


def test_a_parameter_frozen_before_compile_cannot_be_thawed(tmp_path: Path) -> None:
    model = Tiny()
    model.layers[0].requires_grad_(False)
    lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="2GiB")
    for thaw in (model.requires_grad_, lambda: setattr(model.layers[0].bias, "requires_grad", True)):
        with pytest.raises(ValueError, match=r"layers\.0\.\w+ was frozen when the model was compiled.*compile again"):
            thaw()
    lohan_fx.release(model)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True, True, True]


def test_a_parameter_replaced_after_compile_stays(tmp_path: Path) -> None:
    model = Tiny()
    lohan_fx.compile(model, profile(), nvme=tmp_path, host_memory="2GiB", compute_dtype=torch.float32)
    mine = nn.Parameter(torch.zeros(16))
    model.layers[1].bias = mine
    model(batch())
    lohan_fx.release(model)
    assert model.layers[1].bias is mine and mine.sum() == 0


def test_load_state_dict_cannot_assign(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"assign=True.*use assign=False"):
        pair.model.load_state_dict(pair.plain.model.state_dict(), assign=True)
    pair.goes_on()


def test_what_was_assigned_elsewhere_can_be_loaded(pair: Pair) -> None:
    """PyTorch notes in the dictionary that it was assigned."""
    values = {name: value + 1 for name, value in pair.plain.model.state_dict().items()}
    saved = pair.plain.model.state_dict()
    saved.update(values)
    copy.deepcopy(pair.plain.model).load_state_dict(saved, assign=True)
    for _ in range(2):
        pair.model.load_state_dict(saved)
        assert all(torch.equal(value, values[name]) for name, value in pair.model.state_dict().items())
        with pytest.raises(ValueError, match="use assign=False"):
            pair.model.load_state_dict(saved, assign=True)
        with pytest.raises(ValueError, match="use assign=False"):
            nn.ModuleList([pair.model]).load_state_dict({f"0.{k}": v for k, v in values.items()}, assign=True)


# --- other ways to run the model ------------------------------------------------------------------------------


def test_inside_another_torch_compile(pair: Pair) -> None:
    """A graph break at the call of the model, which runs in its own graph."""

    @torch.compile(backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = pair.model(x * 2) * 3
        return result

    for seed in range(3):
        loss = doubled(batch(seed))
        loss.backward()
        pair.optimizer.step()
        plain = pair.plain.model(batch(seed) * 2) * 3
        plain.backward()
        pair.plain.optimizer.step()
        pair.plain.optimizer.zero_grad()
        assert loss.item() == plain.item()
    same_weights(pair.model, pair.plain.model)


def test_what_goes_past_the_call_of_a_module_is_refused(pair: Pair) -> None:
    for call in (pair.model.layers[0].forward, pair.model.layers[0]._call_impl):
        with pytest.raises(
            OffloadedParameterError, match=r"linear was called on layers\.0\.weight.*Call the model, or"
        ):
            call(batch())
    pair.goes_on()


def test_forward_calls_the_parts_one_by_one(pair: Pair) -> None:
    found = pair.model.forward(batch(0))
    assert torch.equal(found, pair.plain.model(batch(0)))
    del found
    pair.goes_on()


# --- the end in the middle ------------------------------------------------------------------------------------


def test_release_between_forward_and_backward(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "swap-nvme")
    pair.step(0)
    loss = pair.model(batch(1))
    lohan_fx.release(pair.model)
    with pytest.raises(LohanError, match=r"its model was released; call lohan_fx\.compile"):
        loss.backward()
    same_weights(pair.model, pair.plain.model)
    assert [pair.model(batch(1)).item()] == pair.plain.step(batch(1))


@pytest.mark.parametrize("end", [lohan_fx.release, lohan_fx.reset])
def test_an_optimizer_whose_model_is_gone(end: Callable[[Any], object], tmp_path: Path) -> None:
    pair = Pair(tmp_path, "swap-nvme")
    pair.step(0)
    saved = pair.optimizer.state_dict()
    end(pair.model)
    for use in (pair.optimizer.step, pair.optimizer.state_dict, lambda: pair.optimizer.load_state_dict(saved)):
        with pytest.raises(StepError, match=r"after the model was released, or ended by lohan_fx\.reset"):
            use()


def test_release_between_backward_and_step(tmp_path: Path) -> None:
    """The update ran inside the backward: the parameters are those after it."""
    pair = Pair(tmp_path, "swap-nvme", accumulation_steps=1)
    pair.model(batch(0)).backward()
    lohan_fx.release(pair.model)
    pair.plain.step(batch(0))
    same_weights(pair.model, pair.plain.model)


def test_an_engine_closed_with_everything_under_way(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "swap-nvme", accumulation_steps=1)
    pair.step(0)
    model, engine = pair.model, pair.engine
    loss = model(batch(1))
    started_s = time.monotonic()
    engine.close()
    engine.close()
    assert time.monotonic() - started_s < 30
    assert not list(tmp_path.iterdir())
    del loss
    compiled(model).detach()
