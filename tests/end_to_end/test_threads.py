"""Threads of one process beside each other: one trains a model that others evaluate, or compiles something else meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import OffloadedParameterError
from lohan_fx.parameters import shell
from tests.end_to_end.models import PERCEPTRON, vectors
from tests.end_to_end.recipes import LR, assert_same_weights, weights_of

pytestmark = pytest.mark.usefixtures("leak_check", "little_is_small")

CLIP = 0.05
PATIENCE_S = 60.0


def clipped_step(model: Any, optimizer: Any, seed: int) -> tuple[float, float]:
    torch.manual_seed(seed)
    loss = model(**vectors()).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def test_what_another_thread_compiles_is_not_ours(on_nvme: Callable[..., Any]) -> None:
    """PyTorch says of the whole process that something is being compiled, and then its own AdamW rounds otherwise."""
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    plain = torch.optim.AdamW(expected.parameters(), lr=LR)
    wanted = [clipped_step(expected, plain, seed) for seed in range(3)]
    begun, may_end = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        begun.set()
        may_end.wait(PATIENCE_S)
        return graph

    def compile_something_else() -> None:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))

    with on_nvme(model, hold_gradients=True):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        assert clipped_step(model, optimizer, 0) == wanted[0]
        other = threading.Thread(target=compile_something_else)
        other.start()
        try:
            assert begun.wait(PATIENCE_S)
            assert clipped_step(model, optimizer, 1) == wanted[1]
            with pytest.raises(OffloadedParameterError):
                model.up.weight.sum()
        finally:
            may_end.set()
            other.join()
        assert clipped_step(model, optimizer, 2) == wanted[2]
    assert_same_weights(weights_of(model), weights_of(expected))


def test_calls_of_two_threads_that_overlap_leave_nothing_behind() -> None:
    first, second = shell.capturing(), shell.capturing()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert shell._capturing
    second.__exit__(None, None, None)
    assert not shell._capturing


def test_calls_of_several_threads_wait_for_each_other(on_nvme: Callable[..., Any], monkeypatch: Any) -> None:
    expected, model = PERCEPTRON.build(), PERCEPTRON.build()
    plain = torch.optim.AdamW(expected.parameters(), lr=LR)
    running: set[int] = set()
    together: list[int] = []
    failed: list[BaseException] = []
    trained = threading.Event()

    def evaluate() -> None:
        try:
            while not trained.is_set():
                with torch.no_grad():
                    model.down(torch.ones(2, 64))
        except BaseException as error:
            failed.append(error)

    with on_nvme(model, hold_gradients=True):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        assert clipped_step(model, optimizer, 0) == clipped_step(expected, plain, 0)
        engine = compiled(model).engine

        def watch(name: str) -> None:
            original = getattr(engine, name)

            @contextlib.contextmanager
            def watched(*args: Any, **kwargs: Any) -> Iterator[None]:
                running.add(threading.get_ident())
                together.append(len(running))
                time.sleep(0.002)
                with original(*args, **kwargs):
                    yield
                running.discard(threading.get_ident())

            monkeypatch.setattr(engine, name, watched)

        watch("forward")
        watch("backward")
        others = [threading.Thread(target=evaluate) for _ in range(2)]
        for other in others:
            other.start()
        try:
            for seed in range(1, 6):
                assert clipped_step(model, optimizer, seed) == clipped_step(expected, plain, seed)
        finally:
            trained.set()
            for other in others:
                other.join()
    assert not failed and max(together) == 1
    assert_same_weights(weights_of(model), weights_of(expected))


ASKS: dict[str, Callable[[Any, Any], object]] = {
    "state_dict": lambda model, optimizer: model.state_dict(),
    "load_state_dict": lambda model, optimizer: model.load_state_dict({}, strict=False),
    "zero_grad": lambda model, optimizer: model.zero_grad(),
    "optimizer.state_dict": lambda model, optimizer: optimizer.state_dict(),
    "optimizer.load_state_dict": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "checkpoint": lohan_fx.checkpoint,
    "prepare": lambda model, optimizer: lohan_fx.prepare(model, **vectors()),
    "release": lambda model, optimizer: lohan_fx.release(model),
}


def test_what_another_thread_asks_for_waits_for_the_call(hw: Any, directory: Any) -> None:
    """A checkpoint during a step left states of two steps in it, under checksums of neither."""
    model = PERCEPTRON.build()
    lohan_fx.compile(model, hw, nvme=directory, compute_dtype=torch.float32, host_memory="2GiB", checkpoints=1)
    optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
    clipped_step(model, optimizer, 0)
    engine = compiled(model).engine
    for name, ask in ASKS.items():
        other = threading.Thread(target=ask, args=(model, optimizer))
        with engine.one_call():
            other.start()
            other.join(0.1)
            assert other.is_alive(), f"{name} did not wait"
        other.join(PATIENCE_S)
        assert not other.is_alive()
    assert not hasattr(model, "_lohan_fx")


def test_state_dicts_of_another_thread_are_of_one_step(on_nvme: Callable[..., Any]) -> None:
    model, found = PERCEPTRON.build(), []
    of_steps = [weights_of(model)]
    trained = threading.Event()

    def look() -> None:
        while not trained.is_set():
            found.append(model.state_dict())

    with on_nvme(model, hold_gradients=True):
        optimizer = lohan_fx.AdamW(model.parameters(), lr=LR)
        other = threading.Thread(target=look)
        other.start()
        try:
            for seed in range(8):
                clipped_step(model, optimizer, seed)
                of_steps.append(dict(model.state_dict()))
        finally:
            trained.set()
            other.join()
    assert all(
        any(all(torch.equal(value, step[name]) for name, value in one.items()) for step in of_steps) for one in found
    )
