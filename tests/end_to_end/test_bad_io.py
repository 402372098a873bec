"""Reads and writes of the store that fail: a ``StoreError`` where it is waited for, and nothing lost, stuck or leaked."""

from __future__ import annotations

import errno
import gc
import importlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx import ops
from lohan_fx.compile import compiled
from lohan_fx.errors import StepError, StoreError
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.store_file import STORE_NAME
from tests.runtime.faulty_backend import Claim, Fault, FaultyBackend, Short
from tests.tiny import Plain, Tiny, batch, profile, same_weights

pytestmark = pytest.mark.usefixtures("leak_check")

PATIENCE_S = 60.0
"""Far less than any timeout of the runtime: a failure must not be found out by waiting."""

READ_FAULTS: list[Fault] = [errno.EIO, Short(100), Claim(0)]
WRITE_FAULTS: list[Fault] = [errno.EIO, errno.ENOSPC, Short(100), Claim(0)]

Twins = tuple[nn.Module, Plain, lohan_fx.AdamW, FaultyBackend]
Build = Callable[..., Twins]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """A model on a store that can be made to fail, plain PyTorch's copy, and the optimizer; released at the end."""
    made: list[nn.Module] = []

    def compile_it(policy: str, **options: Any) -> Twins:
        backend = FaultyBackend()
        monkeypatch.setattr(
            importlib.import_module("lohan_fx.compile"),
            "NvmeStore",
            lambda directories, **arguments: NvmeStore(directories, **arguments, backend=backend),
        )
        # Parameters this small would otherwise stay in memory, where no fault can reach them.
        monkeypatch.setattr("lohan_fx.planning.problem.SMALL_PARAMETER_ELEMENTS", 0)
        model = Tiny()
        plain = Plain(model)
        lohan_fx.compile(
            model, profile(), nvme=tmp_path, host_memory="2GiB", compute_dtype=torch.float32, policy=policy
        )
        made.append(model)
        return model, plain, lohan_fx.AdamW(model.parameters(), lr=0.01, **options), backend

    yield compile_it
    for model in made:
        if hasattr(model, "_lohan_fx"):
            lohan_fx.release(model)
    assert not list(tmp_path.iterdir())


def step(model: nn.Module, plain: Plain, optimizer: lohan_fx.AdamW, seed: int) -> None:
    loss = model(batch(seed))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert [loss.item()] == plain.step(batch(seed))


def fails(act: Callable[[], object], tmp_path: Path, *words: str) -> None:
    """``act`` raises a ``StoreError`` soon, naming the file, what was asked, and each of ``words``."""
    started_s = time.monotonic()
    with pytest.raises(StoreError) as caught:
        act()
    assert time.monotonic() - started_s < PATIENCE_S
    message = str(caught.value)
    for word in (str(tmp_path / STORE_NAME), "bytes at", *words):
        assert word in message, message


def nothing_is_out(engine: Engine) -> None:
    """Once all is quiet, every buffer is back, and no arrival is expected any more."""
    engine.let_go()
    assert engine._machine is not None
    pool = engine._machine.pool
    assert {purpose: pool.in_use(purpose) for purpose in pool._shelves if purpose != "activations"} == {
        "fetch": 0,
        "swap_in": 0,
        "swap_out": 0,
        "gradients": 0,
        "optimizer": 0,
        "small": 0,
        "compute": 0,
    }
    assert not ops._expected.arrivals


# --- what does not touch parameters or states: the step may simply be tried again ------------------------------


@pytest.mark.parametrize("fault", READ_FAULTS, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_fetching_a_parameter(fault: Fault, training: bool, build: Build, tmp_path: Path) -> None:
    model, plain, optimizer, backend = build("recompute")
    step(model, plain, optimizer, 0)
    with torch.set_grad_enabled(training):
        model(batch(1))
        for skipped in (0, 3):
            backend.faults["preadv"] = [None] * skipped + [fault]
            fails(lambda: model(batch(1)), tmp_path, "reading", "layers.", ":master'")
            nothing_is_out(compiled(model).engine)
    step(model, plain, optimizer, 1)
    step(model, plain, optimizer, 2)
    same_weights(model, plain.model)


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=str)
def test_swapping_out(fault: Fault, build: Build, tmp_path: Path) -> None:
    model, plain, optimizer, backend = build("swap-nvme")
    lohan_fx.prepare(model, batch())
    for seed in range(2):
        backend.faults["pwritev"] = [fault]
        loss = model(batch(seed))
        compiled(model).engine.let_go()
        fails(loss.backward, tmp_path, "writing", "activation:")  # before any update: nothing is torn
        del loss
        nothing_is_out(compiled(model).engine)
        gc.collect()  # tracebacks are cycles
        assert compiled(model).engine.swapped_out() == 0
        optimizer.zero_grad()
        step(model, plain, optimizer, seed)
    same_weights(model, plain.model)


def test_a_forward_that_failed_goes_at_once_with_all_it_kept(build: Build) -> None:
    """What of it could not be swapped out is not held against the next backward, even if the collector comes late."""
    model, plain, optimizer, backend = build("swap-nvme")
    step(model, plain, optimizer, 0)
    gc.collect()
    gc.disable()
    try:
        backend.faults["pwritev"] = [errno.EIO] * 3
        backend.faults["preadv"] = [None] * 5 + [errno.EIO]
        failed = False
        try:
            model(batch(1))
        except StoreError as error:
            failed = "layers.2." in str(error) and compiled(model).engine.swapped_out() > 0
        assert failed
        nothing_is_out(compiled(model).engine)
        backend.faults.clear()
        assert compiled(model).engine.swapped_out() == 0
        step(model, plain, optimizer, 1)
    finally:
        gc.enable()
    same_weights(model, plain.model)


@pytest.mark.parametrize("fault", READ_FAULTS, ids=str)
def test_swapping_in(fault: Fault, build: Build, tmp_path: Path) -> None:
    model, plain, optimizer, backend = build("swap-nvme")
    step(model, plain, optimizer, 0)
    loss = model(batch(1))
    compiled(model).engine.let_go()
    backend.faults["preadv"] = [fault]
    fails(loss.backward, tmp_path, "reading", "activation:")
    del loss
    nothing_is_out(compiled(model).engine)
    step(model, plain, optimizer, 1)
    same_weights(model, plain.model)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_gradients_that_are_held(call: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, optimizer, backend = build("keep")
    lohan_fx.prepare(model, batch())
    engine = compiled(model).engine
    step(model, plain, optimizer, 0)
    engine.micro_batches.expected = 2
    engine.gradients.hold_bytes = 0
    model(batch(1)).backward()
    engine.let_go()
    loss = model(batch(2))  # its backward is the last one: what is held is read, summed, and not written again
    engine.micro_batches.expected = 3
    backend.faults[call] = [errno.EIO]
    fails(lambda: (loss.backward(), optimizer.step()), tmp_path, "layers.")
    refused: list[Callable[[], object]] = [optimizer.step, lambda: model(batch(2)).backward()]
    for act in refused if call == "pwritev" else ():  # else a fetch has failed
        with pytest.raises(
            StepError, match=r"could not be held .*errno 5.* no parameter: call optimizer\.zero_grad\(\)"
        ):
            act()
    optimizer.zero_grad()  # nothing was updated, so nothing is torn
    nothing_is_out(engine)
    step(model, plain, optimizer, 3)
    step(model, plain, optimizer, 4)
    same_weights(model, plain.model)


# --- updates: parameters of two steps, refused until both state dicts are loaded -------------------------------


@pytest.mark.parametrize(
    ("call", "fault", "word"),
    [
        *[("pwritev", fault, "writing") for fault in WRITE_FAULTS],
        *[("preadv", fault, "reading") for fault in READ_FAULTS],
    ],
    ids=str,
)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("skipped", [0, 5])
def test_updating(call: str, fault: Fault, word: str, held: bool, skipped: int, build: Build, tmp_path: Path) -> None:
    if held and (skipped or not isinstance(fault, int)):
        pytest.skip("covered by the others")
    model, plain, optimizer, backend = build("keep", accumulation_steps=None if held else 1)
    lohan_fx.prepare(model, batch())
    saved = model.state_dict(), optimizer.state_dict()
    loss = model(batch(0))
    if held:
        loss.backward()
        compiled(model).engine.let_go()
        backend.faults[call] = [fault]
        fails(optimizer.step, tmp_path, word, "layers.")
    else:
        backend.faults[call] = [None] * skipped + [fault]
        fails(lambda loss=loss: (loss.backward(), optimizer.step()), tmp_path, word, "layers.")
    del loss
    nothing_is_out(compiled(model).engine)
    if call == "preadv" and not held and not compiled(model).engine.micro_batches.torn:
        optimizer.zero_grad()  # it was a fetch that failed, before any update
    else:
        refused: list[Callable[[], object]] = [optimizer.step, lambda: model(batch(0)), model.state_dict]
        for act in refused:
            with pytest.raises(StepError, match=r"\(StoreError: .*two different steps.*load_state_dict"):
                act()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for seed in range(3):
        step(model, plain, optimizer, seed)
    same_weights(model, plain.model)


def test_release_after_updates_that_failed(build: Build, tmp_path: Path) -> None:
    model, _, optimizer, backend = build("keep", accumulation_steps=1)
    lohan_fx.prepare(model, batch())
    loss = model(batch(0))
    backend.faults["pwritev"] = [errno.EIO] * 3
    fails(lambda: (loss.backward(), optimizer.step()), tmp_path, "writing")
    with pytest.warns(UserWarning, match="the last step failed half-way"):
        lohan_fx.release(model)
    assert torch.isfinite(model(batch(0)))


def test_a_drive_that_is_gone_for_good(build: Build, tmp_path: Path) -> None:
    """Every read and write fails from some moment on; when the drive is back, the model can be released."""
    model, plain, optimizer, backend = build("swap-nvme")
    step(model, plain, optimizer, 0)
    loss = model(batch(1))
    broken: list[Fault] = [errno.EIO] * 10_000
    backend.faults.update(preadv=list(broken), pwritev=list(broken))
    fails(loss.backward, tmp_path)
    del loss
    fails(lambda: model(batch(1)), tmp_path)
    fails(model.state_dict, tmp_path, "layers.0.weight:master")
    fails(lambda: lohan_fx.release(model), tmp_path, "layers.0.weight:master")
    nothing_is_out(compiled(model).engine)
    backend.faults.clear()
    lohan_fx.release(model)
    same_weights(model, plain.model)


# --- parameters and states read and written from outside ------------------------------------------------------


def test_reading_for_a_state_dict(build: Build, tmp_path: Path) -> None:
    model, plain, optimizer, backend = build("keep")
    step(model, plain, optimizer, 0)
    for read, extent in (
        (model.state_dict, "layers.0.weight:master"),
        (optimizer.state_dict, "layers.0.weight:moments"),
    ):
        backend.faults["preadv"] = [errno.EIO]
        fails(read, tmp_path, "reading", extent)
    for again in (1, 2):
        step(model, plain, optimizer, again)
    same_weights(model, plain.model)


def test_writing_a_state_dict(build: Build, tmp_path: Path) -> None:
    model, plain, optimizer, backend = build("keep")
    step(model, plain, optimizer, 0)
    saved = model.state_dict(), optimizer.state_dict()
    backend.faults["pwritev"] = [errno.EIO]
    # PyTorch collects the exceptions of load_state_dict in one of its own.
    with pytest.raises(RuntimeError, match=rf"(?s)layers\.0\.weight.*writing 1024 bytes.*{tmp_path / STORE_NAME}"):
        model.load_state_dict(saved[0])
    backend.faults["pwritev"] = [errno.EIO]
    fails(lambda: optimizer.load_state_dict(saved[1]), tmp_path, "writing", "layers.0.weight:moments")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(model, plain, optimizer, 1)
    same_weights(model, plain.model)


# --- short counts that can be continued -----------------------------------------------------------------------


def test_short_counts_of_whole_pages_are_continued(build: Build) -> None:
    model, plain, optimizer, backend = build("swap-nvme")
    wide = 64 * 16  # rows: activations of several pages
    for seed in range(3):
        backend.faults.update(preadv=[Short(4096)] * 200, pwritev=[Short(4096)] * 200)
        loss = model(batch(seed, wide))
        loss.backward()
        optimizer.step()
        assert [loss.item()] == plain.step(batch(seed, wide))
    same_weights(model, plain.model)


def test_interrupted_calls_are_repeated(build: Build) -> None:
    model, plain, optimizer, backend = build("swap-nvme")
    for seed in range(2):
        backend.faults.update(preadv=[errno.EINTR, None] * 20, pwritev=[errno.EINTR, None] * 20)
        step(model, plain, optimizer, seed)
    same_weights(model, plain.model)


# --- the disk is full later -----------------------------------------------------------------------------------


def test_no_space_for_activations(build: Build, tmp_path: Path) -> None:
    model, plain, optimizer, backend = build("swap-nvme")
    backend.faults["fallocate"] = [errno.ENOSPC]
    with pytest.raises(StoreError, match=rf"preallocating .*{tmp_path / STORE_NAME}.*No space left.*free disk space"):
        model(batch(0))
    step(model, plain, optimizer, 0)  # there is space again
    backend._free_bytes[tmp_path] = 4096
    with pytest.raises(StoreError, match=r"bytes are needed .* and 4096 are free"):
        model(batch(0, rows=200))
    backend._free_bytes.clear()
    step(model, plain, optimizer, 1)
    same_weights(model, plain.model)


def test_no_space_for_gradients_that_are_held(build: Build, tmp_path: Path) -> None:
    model, plain, optimizer, backend = build("keep")
    lohan_fx.prepare(model, batch())
    model(batch(0))
    compiled(model).engine.gradients.hold_bytes = 0
    loss = model(batch(0))
    backend._free_bytes[tmp_path] = 0
    with pytest.raises(StoreError, match=r"bytes are needed .* and 0 are free"):
        loss.backward()
    backend._free_bytes.clear()
    del loss
    optimizer.zero_grad()
    step(model, plain, optimizer, 0)
    step(model, plain, optimizer, 1)
    same_weights(model, plain.model)
