"""Updates made twice: their copies beside the forward, their states beside the backward, and the numbers are the recipe's."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from benchmarks.forced_holding import leave_no_memory_to_hold
from lohan_fx.compile import compiled
from lohan_fx.errors import InfeasiblePlan, StepError
from lohan_fx.plan import Plan, Tier
from lohan_fx.planning import holding, joint_model
from tests.end_to_end.models import LLAMA, PERCEPTRON, vectors
from tests.end_to_end.recipes import LR, MasterAdamW, assert_same_weights, weights_of
from tests.end_to_end.test_clipping import MAX_NORM, clipped, step

pytestmark = pytest.mark.usefixtures("leak_check", "little_is_small", "all_twice")


@pytest.fixture
def all_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of these models' profile the formula asks for none."""
    monkeypatch.setattr(holding, "_some_updated_twice", lambda problem, hw, plan: holding.updated_twice(plan, 1.0))


def expected(counts: int | Iterable[int]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Losses and norms, and masters, by the recipe."""
    model = LLAMA.build()
    master = MasterAdamW(model, lr=LR)
    call = torch.compile(model, backend="aot_eager", dynamic=False)
    masters = list(master.masters.values())
    found = clipped(call, master, LLAMA, counts, clip=torch.nn.utils.clip_grad_norm_, parameters=masters)
    torch._dynamo.reset()
    return found, {name: value.detach() for name, value in master.masters.items()}


@pytest.mark.parametrize("on_disk", [False, True], ids=["gradients in memory", "gradients on NVMe"])
@pytest.mark.parametrize("counts", [6, (1, 3, 2, 1)], ids=["one backward", "several"])
def test_bit_equal_to_the_recipe(counts: int | Iterable[int], on_disk: bool, on_nvme: Any) -> None:
    wanted, masters = expected(counts)
    model = LLAMA.build()
    with on_nvme(model, torch.bfloat16, hold_gradients=True):
        if on_disk:
            leave_no_memory_to_hold(model)
        found = clipped(model, lohan_fx.AdamW(model.parameters(), lr=LR), LLAMA, counts)
        assert any(p.updated_twice for p in compiled(model).plans[-1].parameters)
    assert found == wanted
    assert_same_weights(weights_of(model), masters)


@pytest.mark.parametrize("gradients", [Tier.HOST, Tier.NVME])
def test_a_step_moves_what_is_predicted(gradients: Tier, on_nvme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if gradients is Tier.NVME:
        monkeypatch.setattr(holding, "_otherwise", lambda hw: Tier.NVME)
        monkeypatch.setattr(holding, "host_bytes", lambda fixed, plan: 1 << 60)
    with on_nvme(LLAMA.build(), torch.bfloat16, hold_gradients=True) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR, accumulation_steps=1)
        store = compiled(model).engine.store
        moved = []
        for _ in range(4):
            model(**LLAMA.batch()).loss.backward()
            lohan_fx.clip_grad_norm_(model, MAX_NORM)  # waits for the second time of the step before
            compiled(model).engine._drain()
            moved.append((store.bytes_read, store.bytes_written))
            optimizer.step()
            optimizer.zero_grad()
        plan = compiled(model).plans[-1]
        assert {p.gradient_home for p in plan.parameters if p.updated_twice} == {gradients}
        (read, written), (read_then, written_then) = moved[-2:]
        assert plan.prediction is not None
        assert read_then - read == plan.prediction.nvme_read_bytes
        assert written_then - written == plan.prediction.nvme_write_bytes


def test_a_second_time_that_fails_surfaces_in_the_backward_and_tears_the_step(
    on_nvme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(model: Any, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            step(model, optimizer)

    unbroken = PERCEPTRON.build()
    with on_nvme(unbroken, torch.bfloat16, hold_gradients=True):
        torch.manual_seed(1)
        run(unbroken, lohan_fx.AdamW(unbroken.parameters(), lr=LR), 3)
    torch._dynamo.reset()
    with on_nvme(PERCEPTRON.build(), torch.bfloat16, hold_gradients=True) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        torch.manual_seed(1)
        run(model, optimizer, 1)
        saved = model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
        store = compiled(model).engine.store
        write, may_fail = store.write, threading.Event()

        def failing(extent: str, *args: Any) -> None:
            if extent == "down.weight:moments":
                assert may_fail.wait(60.0)
                raise ZeroDivisionError
            write(extent, *args)

        monkeypatch.setattr(store, "write", failing)
        step(model, optimizer)
        loss = model(**vectors()).loss  # all that the forward wants was written
        may_fail.set()
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        monkeypatch.setattr(store, "write", write)
        for refused in (lambda: model(**vectors()), model.state_dict, optimizer.step):
            with pytest.raises(StepError, match=r"a step failed after some parameters had been updated"):
                refused()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        torch.set_rng_state(saved[2])
        run(model, optimizer, 2)
    assert_same_weights(weights_of(model), weights_of(unbroken))


class Deep(nn.Module):
    """Layers that are no small parameters, whose states do not fit the promise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def test_a_plan_of_the_search_that_updates_twice(on_nvme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search itself places gradients, states and updates; no more than asked, and the same numbers as all in memory."""

    def train(model: Any, optimizer: Any) -> list[float]:
        torch.manual_seed(1)
        found = []
        for _ in range(5):
            loss = model(torch.randn(4, 512).bfloat16())
            loss.backward()
            found += [loss.item(), lohan_fx.clip_grad_norm_(model, 1e-4).item()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    def run(**options: Any) -> tuple[list[float], dict[str, torch.Tensor], Plan]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        with on_nvme(Deep(), torch.bfloat16, hold_gradients=True, **options) as model:
            losses = train(model, lohan_fx.AdamW(model.parameters(), lr=LR))
            return losses, dict(model.state_dict()), compiled(model).plans[-1]

    wanted = run(policy="in-memory")
    monkeypatch.setattr(joint_model, "_times", lambda p, problem, at: (at.states is Tier.NVME,))
    monkeypatch.setattr(holding, "_put_off", raises_infeasible)
    found = run(policy="lohan", host_memory="110MiB")
    plan = found[2]
    assert [p.updated_twice for p in plan.parameters] == [p.states_home is Tier.NVME for p in plan.parameters]
    assert any(p.updated_twice for p in plan.parameters)
    assert plan.prediction is not None and plan.prediction.peak_bytes["host"] <= plan.host_memory_bytes
    assert found[0] == wanted[0]
    assert_same_weights(found[1], wanted[1])


def raises_infeasible(*_: object) -> Plan:
    raise InfeasiblePlan("not asked")
