"""Nothing stays behind: no thread, no descriptor, no file, no memory, whatever went wrong in between."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import InfeasiblePlan, StepError, StoreError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.runtime.nvme_store import NvmeStore
from tests.end_to_end.models import GPT2_SHALLOW, PERCEPTRON, tokens, vectors
from tests.end_to_end.recipes import LR, assert_same_weights, train, weights_of

pytestmark = pytest.mark.usefixtures("leak_check")

MIB = 1 << 20


def _compile(model: nn.Module, hw: HardwareProfile, nvme: Path, policy: str = "swap-nvme") -> nn.Module:
    return lohan_fx.compile(model, hw, nvme=nvme, compute_dtype=torch.float32, policy=policy, host_memory="2GiB")


def _left(folder: Path) -> list[str]:
    """Our threads, and the files in ``folder``."""
    threads = [t.name for t in threading.enumerate() if t.name.startswith("lohan-")]
    return threads + [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("policy", ["swap-nvme", "swap-host", "in-memory"])
def test_release_ends_threads_and_removes_files(policy: str, hw: HardwareProfile, tmp_path: Path) -> None:
    model = _compile(PERCEPTRON.build(), hw, tmp_path, policy)
    train(model, lohan_fx.AdamW(model.parameters(), lr=LR), PERCEPTRON, 2)
    assert len(_left(tmp_path)) > 4, "threads and a file: something that could be left behind"
    lohan_fx.release(model)
    assert _left(tmp_path) == []


def test_release_without_a_step_and_in_the_middle_of_one(hw: HardwareProfile, tmp_path: Path) -> None:
    lohan_fx.release(_compile(PERCEPTRON.build(), hw, tmp_path))
    model = _compile(PERCEPTRON.build(), hw, tmp_path)
    loss = model(**vectors()).loss
    lohan_fx.release(model)
    assert _left(tmp_path) == []
    del loss


def test_an_error_in_the_users_loop(hw: HardwareProfile, tmp_path: Path) -> None:
    model = PERCEPTRON.build()
    with pytest.raises(KeyboardInterrupt), lohan_fx.releasing(_compile(model, hw, tmp_path)):
        train(model, lohan_fx.AdamW(model.parameters(), lr=LR), PERCEPTRON, 1)
        model(**vectors())
        raise KeyboardInterrupt
    assert _left(tmp_path) == []


def in_a_child(run: Callable[[], object]) -> str:
    """What a forked child says of ``run()``: the error that it ends with, or nothing."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        said = "something else"
        try:
            run()
            said = ""
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(tell, said.encode())
            os._exit(0)
    os.close(tell)
    with os.fdopen(told) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_is_refused_and_leaves_its_parents_training_alone(hw: HardwareProfile, tmp_path: Path) -> None:
    """It has the model, and neither threads nor files: it would wait for ever, and end with the parent's files."""
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    train(expected, torch.optim.AdamW(expected.parameters(), lr=LR), PERCEPTRON, 4)
    with lohan_fx.releasing(_compile(model, hw, tmp_path)):
        optimizer, batch = lohan_fx.AdamW(model.parameters(), lr=LR), vectors()
        assert "forked child" in in_a_child(lambda: model(**batch))  # which would set up the runtime
        train(model, optimizer, PERCEPTRON, 2)
        uses: list[Callable[[], object]] = [
            lambda: model(**batch), model.eval().state_dict, optimizer.state_dict, optimizer.step,
            lambda: lohan_fx.release(model), lambda: lohan_fx.checkpoint(model, optimizer),
        ]  # fmt: skip
        for use in uses:
            assert in_a_child(use).startswith(f"StepError: this model was compiled by process {os.getpid()}")

        def ends(error: BaseException) -> None:
            with lohan_fx.releasing(model):
                raise error

        assert in_a_child(lambda: ends(SystemExit(0))).startswith("SystemExit")
        assert in_a_child(lambda: ends(ValueError("theirs"))) == "ValueError: theirs"
        assert in_a_child(lohan_fx.reset) == ""
        train(model.train(), optimizer, PERCEPTRON, 2, seed=None)
    assert_same_weights(weights_of(model), weights_of(expected))
    assert _left(tmp_path) == []


def test_an_error_inside_the_forward_leaves_a_model_that_trains_on(hw: HardwareProfile, tmp_path: Path) -> None:
    expected, model = GPT2_SHALLOW.build(), GPT2_SHALLOW.build()
    expected_losses = train(expected, torch.optim.AdamW(expected.parameters(), lr=LR), GPT2_SHALLOW, 3)
    wrong = {"input_ids": torch.full((2, 16), 10**6), "labels": torch.zeros(2, 16, dtype=torch.long)}
    with lohan_fx.releasing(_compile(model, hw, tmp_path)):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        losses = train(model, optimizer, GPT2_SHALLOW, 2)
        before = torch.get_rng_state()
        with pytest.raises(IndexError):
            model(**wrong)
        torch.set_rng_state(before)
        losses += train(model, optimizer, GPT2_SHALLOW, 1, seed=None)
    assert losses == expected_losses
    assert_same_weights(weights_of(model), weights_of(expected))


def test_a_backward_before_there_is_an_optimizer(hw: HardwareProfile, tmp_path: Path) -> None:
    model = PERCEPTRON.build()
    with lohan_fx.releasing(_compile(model, hw, tmp_path)):
        with pytest.raises(StepError, match=r"lohan_fx\.AdamW"):
            model(**vectors()).loss.backward()
        losses = train(model, lohan_fx.AdamW(model.parameters(), lr=LR), PERCEPTRON, 2)
    expected = PERCEPTRON.build()
    assert losses == train(expected, torch.optim.AdamW(expected.parameters(), lr=LR), PERCEPTRON, 2)


def test_a_store_that_cannot_be_made_leaves_the_model_as_it_was(
    hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: NvmeStore, extents: object, **options: object) -> None:
        raise StoreError("no space")

    model = PERCEPTRON.build()
    before, parameters = weights_of(model), list(model.parameters())
    monkeypatch.setattr(NvmeStore, "allocate", full)
    with pytest.raises(StoreError):
        _compile(model, hw, tmp_path)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert_same_weights(weights_of(model), before)
    assert _left(tmp_path) == []
    train(model, torch.optim.AdamW(model.parameters(), lr=LR), PERCEPTRON, 1)


def test_a_plan_that_does_not_fit_leaves_a_model_that_can_be_released(hw: HardwareProfile, tmp_path: Path) -> None:
    model = GPT2_SHALLOW.build()
    before = weights_of(model)
    lohan_fx.compile(
        model, hw, nvme=tmp_path, compute_dtype=torch.float32, host_memory="700MiB", device_memory=64 << 10
    )
    with pytest.raises(InfeasiblePlan, match="device_memory"):
        model(**tokens())
    lohan_fx.release(model)
    assert_same_weights(weights_of(model), before)


def test_the_model_and_its_runtime_are_freed(hw: HardwareProfile, tmp_path: Path) -> None:
    model = _compile(PERCEPTRON.build(), hw, tmp_path)
    optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
    train(model, optimizer, PERCEPTRON, 2)
    gone: list[Any] = [weakref.ref(model), weakref.ref(compiled(model)), weakref.ref(compiled(model).engine)]
    lohan_fx.release(model)
    del model, optimizer
    gc.unfreeze()
    gc.collect()
    assert [found() for found in gone] == [None, None, None]


def test_more_models_than_dynamo_recompiles_one_for(
    hw: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All models are called through the same code; each one's graphs go with it."""
    monkeypatch.setattr("lohan_fx.compiled_model.RECOMPILE_LIMIT", 2)
    for _ in range(4):
        with lohan_fx.releasing(_compile(PERCEPTRON.build(), hw, tmp_path)) as model:
            train(model, lohan_fx.AdamW(model.parameters(), lr=LR), PERCEPTRON, 1)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_steps(hw: HardwareProfile, tmp_path: Path) -> None:
    with lohan_fx.releasing(_compile(PERCEPTRON.build(), hw, tmp_path)) as model:
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        train(model, optimizer, PERCEPTRON, 100)
        middle = _resident_bytes()
        train(model, optimizer, PERCEPTRON, 100)
        assert _resident_bytes() - middle < 8 * MIB
        assert compiled(model).engine.swapped_out() == 0


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
