"""Clipping by the global norm: plain PyTorch's numbers, with updates that run beside the next forward."""

from __future__ import annotations

import dataclasses
import math
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from benchmarks.forced_holding import leave_no_memory_to_hold
from lohan_fx import meta, ops
from lohan_fx.compile import compiled
from lohan_fx.errors import OffloadedParameterError, StepError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import ParameterPlan, Tier
from lohan_fx.planning import problem
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer
from lohan_fx.runtime.turns import FIRST
from lohan_fx.simulation.simulated_optimizer import SimulatedOptimizer
from tests.end_to_end.models import GPT2, LLAMA, PERCEPTRON, Case, Output, vectors
from tests.end_to_end.recipes import LR, MasterAdamW, Run, assert_same, assert_same_weights, weights_of

pytestmark = pytest.mark.usefixtures("leak_check", "little_is_small")

MAX_NORM = 0.5
"""All steps of these models are clipped by it."""

Clip = Callable[..., torch.Tensor]


def clipped(
    model: Any,
    optimizer: Any,
    case: Case,
    steps: int | Iterable[int],
    *,
    clip: Clip = lohan_fx.clip_grad_norm_,
    parameters: Any = None,
    max_norm: float = MAX_NORM,
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and norms of ``steps`` steps of one backward, or of as many as ``steps`` says."""
    torch.manual_seed(1)
    losses, norms = [], []
    for count in [1] * steps if isinstance(steps, int) else steps:
        for _ in range(count):
            loss = model(**case.batch()).loss
            loss.backward()
            losses.append(loss.item())
        norms.append(clip(parameters or list(model.parameters()), max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def plain(case: Case, steps: int | Iterable[int]) -> tuple[Run, list[torch.Tensor]]:
    model = case.build()
    adam = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = clipped(model, adam, case, steps, clip=torch.nn.utils.clip_grad_norm_)
    assert all(norm > MAX_NORM for norm in norms)
    return Run(losses, weights_of(model)), norms


# --- numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "clip"), [(GPT2, lohan_fx.clip_grad_norm_), (LLAMA, torch.nn.utils.clip_grad_norm_)], ids=["gpt2", "llama"]
)
def test_twenty_steps_are_bit_equal_to_plain(case: Case, clip: Clip, on_nvme: Any) -> None:
    expected, expected_norms = plain(case, 20)
    model = case.build()
    with on_nvme(model):
        losses, norms = clipped(model, lohan_fx.AdamW(model.parameters(), lr=LR), case, 20, clip=clip)
        assert compiled(model).engine.updates.holds
    assert norms == expected_norms
    assert_same(Run(losses, weights_of(model)), expected)


def test_lanes_begin_before_what_is_updated_in_memory(on_nvme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the runtime, and in the same order in the simulator: matrices, whose states the drives bring, then norms."""
    applied: dict[str, list[str]] = {"runtime": [], "simulator": []}
    begin, simulate = OutOfCoreOptimizer.apply_held, SimulatedOptimizer._apply

    def begun(self: OutOfCoreOptimizer, slot: int, *more: Any, **options: Any) -> Any:
        applied["runtime"].append(self._slots[slot].name)
        return begin(self, slot, *more, **options)

    def simulated(self: SimulatedOptimizer, parameter: ParameterPlan) -> Any:
        applied["simulator"].append(parameter.name)
        return simulate(self, parameter)

    monkeypatch.setattr(OutOfCoreOptimizer, "apply_held", begun)
    monkeypatch.setattr(SimulatedOptimizer, "_apply", simulated)
    model = LLAMA.build()
    with on_nvme(model, hold_gradients=True):
        clipped(model, lohan_fx.AdamW(model.parameters(), lr=LR), LLAMA, 3)
        plan = compiled(model).plans[-1]
        applied["simulator"].clear()  # those of the planner
        lohan_fx.simulate(model)
    count = len(plan.parameters)
    near = {p.name for p in plan.parameters if p.stays_in_memory_of("cpu")}
    order = applied["runtime"][-count:]
    assert 0 < len(near) < count
    assert [name in near for name in order] == [False] * (count - len(near)) + [True] * len(near)
    assert applied["simulator"][-count:] == order


def test_bf16_is_bit_equal_to_its_recipe(on_nvme: Any) -> None:
    """Gradients of up to a million elements; of larger ones the norms may differ by 1e-4 (``gradient_norm``)."""
    reference, model = LLAMA.build(), LLAMA.build()
    master = MasterAdamW(reference, lr=LR)
    call = torch.compile(reference, backend="aot_eager", dynamic=False)
    expected = clipped(
        call, master, LLAMA, 6, clip=torch.nn.utils.clip_grad_norm_, parameters=list(master.masters.values())
    )
    torch._dynamo.reset()
    with on_nvme(model, torch.bfloat16):
        found = clipped(model, lohan_fx.AdamW(model.parameters(), lr=LR), LLAMA, 6)
    assert found == expected
    assert_same_weights(weights_of(model), {name: m.detach() for name, m in master.masters.items()})


@pytest.mark.parametrize("on_disk", [False, True], ids=["sums in memory", "sums on NVMe"])
def test_accumulated_gradients_are_clipped_by_the_norm_of_their_sum(on_disk: bool, on_nvme: Any) -> None:
    """Bit-equal from memory; on NVMe chunks are measured one by one, which rounds differently for more than one chunk."""
    counts = (3, 3, 2, 3)
    expected, expected_norms = plain(GPT2, counts)
    model = GPT2.build()
    with on_nvme(model):
        lohan_fx.prepare(model, **GPT2.batch())
        if on_disk:
            leave_no_memory_to_hold(model)
        losses, norms = clipped(model, lohan_fx.AdamW(model.parameters(), lr=LR), GPT2, counts)
    assert norms == expected_norms
    assert_same(Run(losses, weights_of(model)), expected)


class Parted(nn.Module):
    """``unused`` never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.unused = nn.Linear(24, 40), nn.Linear(40, 8), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        prediction = self.down(torch.tanh(self.up(x)))
        return Output((prediction - y).square().mean(), prediction)


PARTED = Case("parted", Parted, vectors)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_groups_schedules_and_other_norms(norm_type: float, on_nvme: Any) -> None:
    """Each part clipped by its own norm, and then all once more; the learning rate changes between step and forward."""

    def loop(model: Any, adam: type[Any], clip: Clip) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(1)
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1, "maximize": True},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 10 * LR},
        ]
        optimizer = adam(groups, lr=LR)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        losses, norms = [], []
        for _ in range(4):
            loss = model(**vectors()).loss
            loss.backward()
            norms += [clip(group["params"], 0.1, norm_type) for group in groups]
            optimizer.step()
            scheduler.step()
            groups[0]["weight_decay"] = optimizer.param_groups[0]["weight_decay"] = 0.3
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, norms

    expected, model = PARTED.build(), PARTED.build()
    expected_results = loop(expected, torch.optim.AdamW, torch.nn.utils.clip_grad_norm_)
    with on_nvme(model):
        results = loop(model, lohan_fx.AdamW, lohan_fx.clip_grad_norm_)
    assert results == expected_results
    assert_same_weights(weights_of(model), weights_of(expected))


# --- when -----------------------------------------------------------------------------------------------------


def step(model: Any, optimizer: Any, case: Case = PERCEPTRON) -> None:
    model(**case.batch()).loss.backward()
    lohan_fx.clip_grad_norm_(model, MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_returns_before_its_updates_and_a_fetch_waits_for_them(
    on_nvme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No update may end before the next forward has begun; then all may, and the forward sees their results."""
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    with on_nvme(model, hold_gradients=True):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        torch.manual_seed(1)
        step(model, optimizer)
        model.state_dict()  # waits for the updates of this step
        engine = compiled(model).engine
        begun = hold_writes(engine.store, monkeypatch)
        model(**vectors()).loss.backward()
        lohan_fx.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        pending = [
            engine.slots[slot].name for slot in engine.slots if engine.updates._optimizer.pending(slot) is not None
        ]
        assert pending == ["up.weight", "down.weight"]
        forward = engine._stream.fetch

        def fetch(slot: int) -> torch.Tensor:
            begun()
            return forward(slot)

        monkeypatch.setattr(engine._stream, "fetch", fetch)
        step(model, optimizer)
    torch.manual_seed(1)
    adam = torch.optim.AdamW(expected.parameters(), lr=LR)
    for _ in range(3):
        step(expected, adam)
    assert_same_weights(weights_of(model), weights_of(expected))


def test_updates_come_in_the_order_in_which_the_forward_wants_them(
    on_nvme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the drives bring is fetched early, before what is in memory and used before it; simulated as it runs."""
    monkeypatch.setattr(problem, "SMALL_PARAMETER_ELEMENTS", 0)
    model = PERCEPTRON.build()
    with on_nvme(model, hold_gradients=True):
        plan = lohan_fx.prepare(model, **vectors())
    homes = {p.name: Tier.DEVICE if p.name == "up.weight" else Tier.NVME for p in plan.parameters}
    parameters = tuple(dataclasses.replace(p, home=homes[p.name], states_home=Tier.NVME) for p in plan.parameters)
    with on_nvme(model, hold_gradients=True, plan=dataclasses.replace(plan, parameters=parameters)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        monitor = lohan_fx.Monitor(model)
        step(model, optimizer)
        model.state_dict()  # waits for the updates of this step
        with monitor.record() as events:
            step(model, optimizer)
            model.state_dict()
        forward = compiled(model).halves[-1].forward
        fetched = [meta.origin(node) for node in forward.graph.find_nodes(op="call_function", target=ops.FETCH)]
        waits = forward.graph.find_nodes(op="call_function", target=ops.WAIT)
        wanted = [f"update of {meta.origin(node.args[0])}" for node in waits]
        assert fetched[-1] == "up.weight" and wanted[0] == "update of up.weight"
        for step_events in (events, lohan_fx.simulate(model).events):
            updates = sorted((e for e in step_events if e.lane == "cpu"), key=lambda e: e.start_s)
            assert [e.label for e in updates] == wanted


def test_drives_serve_first_what_the_forward_wants_first(on_nvme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fetch of what is used last and waits for no update goes behind the updates of what is used before it, and so it is
    simulated."""
    monkeypatch.setattr(problem, "SMALL_PARAMETER_ELEMENTS", 0)
    model = PERCEPTRON.build()
    model.down.weight.requires_grad_(False)
    with on_nvme(model, hold_gradients=True):
        plan = lohan_fx.prepare(model, **vectors())
    parameters = tuple(dataclasses.replace(p, home=Tier.NVME, states_home=Tier.NVME) for p in plan.parameters)
    with on_nvme(model, hold_gradients=True, plan=dataclasses.replace(plan, parameters=parameters)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        step(model, optimizer)
        model(**vectors()).loss.backward()
        lohan_fx.clip_grad_norm_(model, MAX_NORM)
        lane, submitted = compiled(model).engine._machine.ssd, list[tuple[str, int]]()
        submit = lane.submit

        def noted(fn: Any, *, priority: int, label: str) -> Any:
            submitted.append((label, priority))
            return submit(fn, priority=priority, label=label)

        with monkeypatch.context() as patched:
            patched.setattr(lane, "submit", noted)
            optimizer.step()
            model(**vectors())
        forward = compiled(model).halves[-1].forward
        waits = forward.graph.find_nodes(op="call_function", target=ops.WAIT)
        wanted = [meta.origin(node.args[0]) for node in waits]
        turn = {name: FIRST + place for place, name in enumerate(wanted)}
        assert "down.weight" in wanted[-2:] and len(submitted) > 2 * len(wanted)
        for label, priority in submitted:
            assert priority == next(turn[name] for name in wanted if name in label), label
        events = lohan_fx.simulate(model).events
        reads = {name: [e.start_s for e in events if e.label.startswith(f"read {name}:")] for name in wanted}
        first = sorted(wanted[1:], key=lambda name: min(reads[name]))  # of the first two, the drives begin at once
        assert first == wanted[1:]


def hold_writes(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No write of a master ends until what is returned is called."""
    write, may_end = store.write, threading.Event()

    def late(extent: str, *args: Any) -> None:
        if extent.endswith(":master"):
            assert may_end.wait(60.0), "nobody let the write end"
        write(extent, *args)

    monkeypatch.setattr(store, "write", late)
    return may_end.set


def looked_at_by_state_dict(model: Any, optimizer: Any) -> object:
    del optimizer
    return {name: value.clone() for name, value in model.state_dict().items()}


def looked_at_by_optimizer_state_dict(model: Any, optimizer: Any) -> object:
    del model
    return [entry["exp_avg"].clone() for _, entry in sorted(optimizer.state_dict()["state"].items())]


def looked_at_by_an_evaluation(model: Any, optimizer: Any) -> object:
    del optimizer
    model.eval()
    with torch.no_grad():
        found = model(x=torch.ones(3, 24), y=torch.ones(3, 8)).prediction
    model.train()
    return found


def loaded(model: Any, optimizer: Any) -> object:
    del optimizer
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
    return None


def another_shape(model: Any, optimizer: Any) -> object:
    optimizer.zero_grad()
    return model(**vectors(3)).loss


@pytest.mark.parametrize(
    "look",
    [
        looked_at_by_state_dict,
        looked_at_by_optimizer_state_dict,
        looked_at_by_an_evaluation,
        loaded,
        another_shape,
    ],
)
def test_whoever_looks_sees_finished_updates(look: Callable[[Any, Any], Any], on_nvme: Any) -> None:
    def run(model: Any, optimizer: Any) -> object:
        torch.manual_seed(1)
        for _ in range(3):
            step(model, optimizer)
        found = look(model, optimizer)
        step(model, optimizer)
        return found

    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    expected_look = run(expected, torch.optim.AdamW(expected.parameters(), lr=LR))
    with on_nvme(model, hold_gradients=True):
        look_found = run(model, lohan_fx.AdamW(model.parameters(), lr=LR))
        assert looked_at_by_state_dict(model, None)
    # An inference graph rounds elsewhere than eager; an update that is missing moves far more.
    torch.testing.assert_close(look_found, expected_look, rtol=1e-5, atol=1e-6)
    assert_same_weights(weights_of(model), weights_of(expected))


def test_without_clipping_updates_run_inside_the_backward(on_nvme: Any) -> None:
    with on_nvme(PERCEPTRON.build()) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        for applied in (False, True):
            model(**vectors()).loss.backward()
            assert compiled(model).engine.micro_batches.applied is applied
            optimizer.step()
        assert not compiled(model).engine.updates.holds


# --- broken off -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after_the_step", [True, False])
def test_an_update_that_fails_surfaces_in_step_or_forward_and_tears_the_step(
    after_the_step: bool, on_nvme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    adam = torch.optim.AdamW(expected.parameters(), lr=LR)
    with on_nvme(model, hold_gradients=True):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        torch.manual_seed(1)
        step(model, optimizer)
        saved = model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        store = compiled(model).engine.store
        write = store.write
        may_fail = threading.Event()

        def failing(extent: str, *args: Any) -> None:
            if extent == "down.weight:moments":
                assert may_fail.wait(60)
                raise ZeroDivisionError
            write(extent, *args)

        monkeypatch.setattr(store, "write", failing)
        if after_the_step:
            step(model, optimizer)
            may_fail.set()
            with pytest.raises(ZeroDivisionError):
                model(**vectors())
        else:  # the step hands over its other updates, or has done so: which of the two, the threads decide
            may_fail.set()
            with pytest.raises(ZeroDivisionError):
                step(model, optimizer)
                model(**vectors())
        monkeypatch.undo()
        for refused in (lambda: model(**vectors()), model.state_dict, optimizer.step):
            with pytest.raises(
                StepError, match=r"a step failed after some parameters had been updated.*ZeroDivisionError"
            ):
                refused()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        torch.set_rng_state(saved[2])
        step(model, optimizer)
        step(model, optimizer)
    torch.manual_seed(1)
    for _ in range(3):
        step(expected, adam)
    assert_same_weights(weights_of(model), weights_of(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_before_the_next_forward_resumes_bit_by_bit(
    dtype: torch.dtype, hw: HardwareProfile, tmp_path: Path
) -> None:
    nvme = tmp_path / "nvme"
    nvme.mkdir()

    def begin(**options: Any) -> tuple[Any, Any]:
        model = PERCEPTRON.build()
        lohan_fx.compile(model, hw, nvme=nvme, compute_dtype=dtype, policy="lohan-ds", host_memory="2GiB", **options)
        return model, lohan_fx.AdamW(model.parameters(), lr=LR)

    def steps(model: Any, optimizer: Any) -> list[float]:
        norms = []
        for _ in range(3):
            model(**vectors()).loss.backward()
            norms.append(lohan_fx.clip_grad_norm_(model, MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    model, optimizer = begin()
    torch.manual_seed(1)
    steps(model, optimizer)
    lohan_fx.checkpoint(model, optimizer)
    expected = steps(model, optimizer), {name: value.clone() for name, value in model.state_dict().items()}
    compiled(model).engine.close(remove=False)
    compiled(model).detach()
    model, optimizer = begin(resume_from_checkpoint=True)
    assert lohan_fx.resume(model, optimizer) is not None
    assert steps(model, optimizer) == expected[0]
    assert_same_weights(dict(model.state_dict()), expected[1])
    lohan_fx.release(model)
    shutil.rmtree(nvme)


# --- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [lohan_fx.clip_grad_norm_, torch.nn.utils.clip_grad_norm_], ids=["ours", "torch's"])
def test_too_late_to_clip(clip: Clip, on_nvme: Any) -> None:
    with on_nvme(PERCEPTRON.build()) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=1)
        model(**vectors()).loss.backward()
        with pytest.raises(StepError, match=r"inside the backward.*hold_gradients=True"):
            clip(model.parameters(), 1.0)
        with pytest.raises(StepError, match=r"inside the backward.*hold_gradients=True"):
            lohan_fx.grad(model, "up.weight")
        optimizer.step()


@pytest.mark.parametrize("holds", [True, False])
def test_what_moves_nothing_asks_for_no_gradient(holds: bool, on_nvme: Any) -> None:
    """As Lightning does after an error, which another one of ours would hide."""
    expected = PERCEPTRON.build()
    expected(**vectors()).loss.backward()
    torch.optim.AdamW(expected.parameters(), lr=LR).step()
    with on_nvme(model := PERCEPTRON.build(), hold_gradients=holds):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=1)
        model(**vectors()).loss.backward()
        assert model.cpu().to("cpu").float() is model
        with pytest.raises(OffloadedParameterError, match=r"lohan_fx\.release"):
            model.double()
        optimizer.step()
    assert_same_weights(weights_of(model), weights_of(expected))


def test_a_norm_that_is_not_finite(on_nvme: Any) -> None:
    with on_nvme(PERCEPTRON.build()) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        (model(**vectors()).loss * math.inf).backward()
        with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
            lohan_fx.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        assert not torch.isfinite(lohan_fx.clip_grad_norm_(model, 1.0))
        optimizer.zero_grad()
        step(model, optimizer)


def test_a_backward_after_clipping(on_nvme: Any) -> None:
    with on_nvme(PERCEPTRON.build()) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        model(**vectors()).loss.backward()
        lohan_fx.clip_grad_norm_(model, 1e-3)
        loss = model(**vectors()).loss
        with pytest.raises(
            StepError, match=r"after the gradients of this step were clipped.*clip after the last backward"
        ):
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    "use", [lambda g: g + 1, lambda g: g.clamp_(0, 1), lambda g: g.mul_(torch.ones(64, 24)), lambda g: g.sum()]
)
def test_what_a_held_gradient_cannot_do(use: Callable[[torch.Tensor], object], on_nvme: Any) -> None:
    with on_nvme(PERCEPTRON.build(), hold_gradients=True) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        model(**vectors()).loss.backward()
        gradient = model.up.weight.grad
        said = "HeldGradient(up.weight, shape=(64, 24), dtype=torch.float32, held)"
        assert {repr(gradient), str(gradient), f"{gradient}"} == {said}
        with pytest.raises(OffloadedParameterError, match=r"gradient of up\.weight, which is held"):
            use(gradient)
        optimizer.step()


# --- reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_can_be_read(dtype: torch.dtype, on_nvme: Any) -> None:
    expected, model = PARTED.build(), PARTED.build()
    call = torch.compile(expected.to(dtype), backend="aot_eager", dynamic=False)
    with on_nvme(model, dtype, hold_gradients=True):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        for _ in range(2):
            with pytest.raises(StepError, match=r"none is held: ask between backward and optimizer\.step"):
                lohan_fx.grad(model, "up.weight")
            batch = {name: value.to(dtype) for name, value in vectors().items()}
            if _ == 0:
                call(**batch).loss.backward()
                model(**batch).loss.backward()
                for name, parameter in expected.named_parameters():
                    found = lohan_fx.grad(model, name)
                    if parameter.grad is None:
                        assert found is None
                    else:
                        assert found is not None and found.dtype == torch.float32
                        assert torch.equal(found, parameter.grad.float())
                lohan_fx.clip_grad_norm_(model, 1e-3)
                clipped_one = lohan_fx.grad(model, "up.weight")
                assert clipped_one is not None and clipped_one.norm() < 1.1e-3
                optimizer.step()
        with pytest.raises(ValueError, match=r"no parameter 'up\.weigth': did you mean up\.weight"):
            lohan_fx.grad(model, "up.weigth")
