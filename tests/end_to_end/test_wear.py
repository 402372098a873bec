"""A budget of bytes written: kept, told, carried over a resume, and its end is a checkpoint like any other."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import WearBudgetExceeded
from lohan_fx.runtime.generation_files import generations_in
from tests.tiny import Plain, Tiny, batch, profile, same_weights

STEPS = 6


@pytest.fixture(autouse=True)
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters this small would otherwise stay in memory, and write nothing."""
    monkeypatch.setattr("lohan_fx.planning.problem.SMALL_PARAMETER_ELEMENTS", 0)


@pytest.fixture
def nvme(tmp_path: Path, leak_check: None) -> Iterator[Path]:
    del leak_check
    yield tmp_path
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def begin(nvme: Path | None, policy: str = "recompute", **options: Any) -> tuple[nn.Module, lohan_fx.AdamW]:
    torch.manual_seed(0)
    model = lohan_fx.compile(Tiny(), profile(), nvme=nvme, host_memory="2GiB", compute_dtype=torch.float32,
                             policy=policy, **options)  # fmt: skip
    return model, lohan_fx.AdamW(model.parameters(), lr=0.01, accumulation_steps=1)


def step(model: nn.Module, optimizer: lohan_fx.AdamW, seed: int) -> float:
    loss = model(batch(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def written_by(steps: int, nvme: Path) -> tuple[int, int]:
    """What a training of so many steps writes in all, and what each step does."""
    model, optimizer = begin(nvme)
    with lohan_fx.releasing(model):
        monitor = lohan_fx.Monitor(model)
        reports = []
        for seed in range(steps):
            step(model, optimizer, seed)
            reports.append(monitor.step())
        assert len({report.nvme_written_bytes for report in reports}) == 1
        assert reports[-1].max_nvme_written_bytes is None
        return reports[-1].nvme_total_written_bytes, reports[-1].nvme_written_bytes


def test_the_budget_ends_in_a_checkpoint_from_which_a_larger_one_goes_on(nvme: Path) -> None:
    in_all, per_step = written_by(4, nvme)
    model, optimizer = begin(nvme, checkpoints=1, max_bytes_written=in_all + per_step - 1)
    plain = Plain(Tiny())
    plain.model.load_state_dict(model.state_dict())
    losses = [step(model, optimizer, seed) for seed in range(3)]
    with pytest.raises(WearBudgetExceeded, match=r"checkpoint 1 was made after step 4") as caught:
        step(model, optimizer, 3)
    assert caught.value.checkpoint == 1 and caught.value.max_bytes == in_all + per_step - 1
    assert in_all <= caught.value.bytes_written <= caught.value.max_bytes
    with pytest.raises(WearBudgetExceeded, match="nothing was written"):
        model(batch(4))
    lohan_fx.release(model)

    model, optimizer = begin(nvme, resume_from_checkpoint=True, max_bytes_written="1GB")
    with lohan_fx.releasing(model):
        found = lohan_fx.resume(model, optimizer)
        assert found is not None and (found.step, found.stopped_in_step) == (4, True)
        assert compiled(model).engine.wear.written_bytes >= in_all
        expected = [plain.step(batch(seed))[0] for seed in range(STEPS)]
        losses += expected[3:4] + [step(model, optimizer, seed) for seed in range(4, STEPS)]
        assert losses == expected
        same_weights(model, plain.model)
        total = compiled(model).engine.wear.written_bytes
        assert total >= in_all + 2 * per_step
        lohan_fx.checkpoint(model, optimizer)
    model, optimizer = begin(nvme, resume_from_checkpoint=True)
    with lohan_fx.releasing(model):
        found = lohan_fx.resume(model, optimizer)
        assert found is not None and not found.stopped_in_step
        assert total <= compiled(model).engine.wear.written_bytes < total + per_step


def test_a_caller_who_catches_the_end_makes_its_own_checkpoint(nvme: Path) -> None:
    in_all, per_step = written_by(2, nvme)
    model, optimizer = begin(nvme, max_bytes_written=in_all + per_step - 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with lohan_fx.releasing(model):
        step(model, optimizer, 0)
        scheduler.step()
        with pytest.raises(WearBudgetExceeded):
            step(model, optimizer, 1)
        scheduler.step()
        assert lohan_fx.checkpoint(model, optimizer, scheduler=scheduler, extra="mine") == 2
    model, optimizer = begin(nvme, resume_from_checkpoint=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with lohan_fx.releasing(model):
        found = lohan_fx.resume(model, optimizer, scheduler=scheduler)
        assert found == lohan_fx.Resumed(2, "mine", 2)
        assert scheduler.last_epoch == 2


def test_what_was_given_to_the_last_checkpoint_is_in_that_of_the_end(nvme: Path) -> None:
    in_all, per_step = written_by(2, nvme)
    model, optimizer = begin(nvme, checkpoints=1, max_bytes_written=in_all + 2 * per_step)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses: list[float] = []
    with lohan_fx.releasing(model), pytest.raises(WearBudgetExceeded):
        for seed in range(5):
            losses.append(step(model, optimizer, seed))
            scheduler.step()
            lohan_fx.checkpoint(model, optimizer, scheduler=scheduler, extra=losses)
    model, optimizer = begin(nvme, resume_from_checkpoint=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with lohan_fx.releasing(model):
        found = lohan_fx.resume(model, optimizer, scheduler=scheduler)
        assert found is not None and found.stopped_in_step
        assert (scheduler.last_epoch, found.extra) == (found.step - 1, losses)


def _forget_each(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize(("policy", "by"), [("recompute", "optimizer"), ("swap-nvme", "model"), ("swap-nvme", "each")])
def test_steps_that_are_skipped_count_each_for_itself(nvme: Path, policy: str, by: str) -> None:
    """As a gradient scaler skips them: it does not call ``step``, and what the forwards wrote is written."""
    model, optimizer = begin(nvme, policy, hold_gradients=True, max_bytes_written="1GB")
    drop = {"optimizer": optimizer.zero_grad, "model": model.zero_grad, "each": functools.partial(_forget_each, model)}
    with lohan_fx.releasing(model):
        step(model, optimizer, 0)
        compiled(model).engine.before_reading()  # the update of that step runs beside the next forward
        wear = compiled(model).engine.wear
        per_step = wear.step_bytes
        for seed in range(1, 10):
            wear.max_bytes = wear.written_bytes + per_step
            model(batch(seed)).backward()
            drop[by]()
            assert wear.step_bytes == per_step
        wear.max_bytes = wear.written_bytes + per_step - 1
        with pytest.raises(WearBudgetExceeded, match="nothing was written"):
            model(batch(4))


@pytest.mark.parametrize("drops", ["after the step", "after the first forward"])
def test_a_step_counts_all_that_it_writes_whenever_that_is_written(nvme: Path, drops: str) -> None:
    """Its updates run beside the next forward, or before it where something waits for them; gradients that an earlier step has
    left may be dropped by then, as by Lightning. Budgets were passed by what was not counted."""
    model, optimizer = begin(nvme, "swap-nvme", hold_gradients=True, max_bytes_written="1GB")
    with lohan_fx.releasing(model):
        engine = compiled(model).engine
        for seed in range(3):
            before = engine.wear.written_bytes
            for backward in range(3):
                loss = model(batch(seed))
                if not backward and drops == "after the first forward":
                    optimizer.zero_grad()
                loss.backward()
            optimizer.step()
            if drops == "after the step":
                optimizer.zero_grad()
            engine.before_reading()
            assert engine.wear.step_bytes == engine.wear.written_bytes - before


def test_an_update_that_is_half_written_does_not_count_twice(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had ended trainings too early, some from within a forward and without a checkpoint."""
    model, optimizer = begin(nvme, hold_gradients=True, max_bytes_written="1GB")
    with lohan_fx.releasing(model):
        step(model, optimizer, 0)
        engine = compiled(model).engine
        engine.before_reading()
        # From here on as if all of that step's updates were written, and none in place until somebody waits for it.
        on_their_way = list(engine.slots)
        monkeypatch.setattr(engine.updates, "pending", lambda: on_their_way)
        monkeypatch.setattr(engine.updates, "finish_updates", lambda: on_their_way.clear())
        engine.wear.max_bytes = engine.wear.written_bytes + engine.wear.step_bytes
        model(batch(1))
        assert not on_their_way
        monkeypatch.undo()
        optimizer.zero_grad()
        engine.wear.max_bytes -= 1
        with pytest.raises(WearBudgetExceeded, match="nothing was written"):
            model(batch(1))


def test_a_step_begins_only_if_two_checkpoints_can_follow_it(nvme: Path) -> None:
    """Of states in memory, which a checkpoint writes and a step does not: its end's, and one that the caller makes of that. Those
    between steps count, too, and a resume with the same budget is refused."""
    model, optimizer = begin(nvme, "lohan")
    with lohan_fx.releasing(model):
        step(model, optimizer, 0)
        wear, checkpoint_bytes = compiled(model).engine.wear, compiled(model).engine.states.written_back_bytes()
        assert checkpoint_bytes and not wear.step_bytes
        wear.max_bytes = wear.written_bytes + 2 * checkpoint_bytes
        step(model, optimizer, 1)
        lohan_fx.checkpoint(model, optimizer)
        with pytest.raises(WearBudgetExceeded, match="nothing was written"):
            model(batch(2))
        wear.max_bytes = wear.written_bytes + 2 * checkpoint_bytes  # the manifest is in no budget
        step(model, optimizer, 2)
        lohan_fx.checkpoint(model, optimizer)
        budget = wear.max_bytes
    model, optimizer = begin(nvme, "lohan", max_bytes_written=budget, resume_from_checkpoint=True)
    with lohan_fx.releasing(model):
        lohan_fx.resume(model, optimizer)
        with pytest.raises(WearBudgetExceeded, match="nothing was written"):
            model(batch(1))


def test_without_directories_of_its_own_the_end_is_clean_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    in_all, _ = written_by(1, tmp_path)
    model, optimizer = begin(None, max_bytes_written=in_all)
    plain = Plain(Tiny())
    plain.model.load_state_dict(model.state_dict())
    with lohan_fx.releasing(model):
        with pytest.raises(WearBudgetExceeded, match="a temporary one") as caught:
            step(model, optimizer, 0)
        assert caught.value.checkpoint is None
        plain.step(batch(0))
        same_weights(model, plain.model)


def test_a_budget_that_cannot_hold_the_model_is_refused_untouched(nvme: Path) -> None:
    model = Tiny()
    with pytest.raises(WearBudgetExceeded, match="nothing was written"):
        lohan_fx.compile(model, profile(), nvme=nvme, host_memory="2GiB", max_bytes_written=100)
    assert not generations_in(nvme) and type(model.layers[0].weight) is nn.Parameter
    with pytest.raises(ValueError, match="max_bytes_written"):
        lohan_fx.compile(model, profile(), nvme=nvme, max_bytes_written="a lot")
