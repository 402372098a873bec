"""Checkpoints of a training: after any resume, every loss and every weight is that of a run that was never broken."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lohan_fx
from lohan_fx import pipeline
from lohan_fx.checkpoints.training_state import Parts
from lohan_fx.compile import compiled
from lohan_fx.errors import InfeasiblePlan, StepError, StoreError
from lohan_fx.runtime.generation_files import generation_path, generations_in
from lohan_fx.runtime.manifest import sealed
from lohan_fx.runtime.store_file import STORE_NAME
from tests.exhaustive import combinations
from tests.tiny import WIDTH, Tiny, batch, profile

pytestmark = pytest.mark.usefixtures("leak_check")


class Noisy(Tiny):
    """Random numbers and a buffer decide the result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.layers[0].weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        x = nn.functional.dropout(x - self.mean, 0.5, self.training)
        return super().forward(x.to(self.layers[0].weight.dtype))


class Loader:
    """Knows its position, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        noise = torch.randn(4, 16) + float(np.random.rand()) + random.random()
        return batch(self.position) + noise

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Training:
    """A model, its optimizer, its scheduler and its data."""

    def __init__(self, directory: Path, policy: str, dtype: torch.dtype, seed: int = 0, **options: Any) -> None:
        for plant in (torch.manual_seed, np.random.seed, random.seed):
            plant(seed)
        self.model: nn.Module = Noisy()
        lohan_fx.compile(self.model, profile(), nvme=options.pop("nvme", directory), host_memory="2GiB",
                         compute_dtype=dtype, policy=policy, **options)  # fmt: skip
        parameters = list(self.model.parameters())
        groups = [{"params": parameters[:3], "lr": 0.01}, {"params": parameters[3:], "weight_decay": 0.1}]
        self.optimizer = lohan_fx.AdamW(groups, lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3, 3, 6], gamma=0.5)
        self.loader = Loader()

    @property
    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "loader": self.loader}

    def step(self) -> float:
        loss = self.model(self.loader.next())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def checkpoint(self, **options: Any) -> int:
        return lohan_fx.checkpoint(self.model, self.optimizer, **self.parts, **options)

    def resume(self) -> lohan_fx.Resumed | None:
        return lohan_fx.resume(self.model, self.optimizer, **self.parts)

    def results(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for index, entry in self.optimizer.state_dict()["state"].items():
            found.update({f"{index}.{name}": value for name, value in entry.items()})
        return found

    def end(self) -> None:
        if hasattr(self.model, "_lohan_fx"):
            lohan_fx.release(self.model)


Begin = Callable[..., Training]


@pytest.fixture
def begin(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    made: list[Training] = []

    def begin_it(policy: str = "recompute", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Training:
        if options.pop("streamed", True):
            monkeypatch.setattr("lohan_fx.planning.problem.SMALL_PARAMETER_ELEMENTS", 0)
        made.append(Training(directory, policy, dtype, **options))
        return made[-1]

    yield begin_it
    for training in made:
        training.end()


def commit_one_step(begin: Begin) -> None:
    """A training that has come so far, and has ended."""
    training = begin()
    training.step()
    training.checkpoint()
    training.end()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(
    ("policy", "dtype"),
    combinations(["recompute", "swap-nvme", "keep", "lohan"], [torch.bfloat16, torch.float32]),
    ids=str,
)
def test_a_resumed_run_is_the_unbroken_one(begin: Begin, policy: str, dtype: torch.dtype) -> None:
    streamed = policy in ("recompute", "swap-nvme")
    unbroken = begin(policy, dtype, streamed=streamed)
    expected = [unbroken.step() for _ in range(8)]
    weights = unbroken.results()
    unbroken.end()

    losses: list[float] = []
    for life, until in enumerate((2, 5, 8)):
        training = begin(
            policy, dtype, streamed=streamed, seed=0 if life == 0 else 100 + life, resume_from_checkpoint=True
        )
        found = training.resume()
        assert (found.step if found else 0) == len(losses)
        assert (found.extra if found else None) == ({"losses": losses, "shape": (1, 2)} if life else None)
        losses.extend(training.step() for _ in range(until - len(losses)))
        assert training.checkpoint(extra={"losses": losses, "shape": (1, 2)}) == life + 1
        if life == 1:
            training.step()  # lost: it was not committed
        if life == 2:
            same(training.results(), weights)
        training.end()
    assert losses == expected


def test_commits_between_steps_change_no_number(begin: Begin) -> None:
    plain = begin()
    expected = [plain.step() for _ in range(4)]
    plain.end()
    training = begin(checkpoints=2)
    losses = []
    for _ in range(4):
        losses.append(training.step())
        training.checkpoint()
        training.checkpoint()
    assert losses == expected


def test_compute_copies_that_were_in_memory_are_made_anew(begin: Begin) -> None:
    training = begin("lohan", streamed=False)
    training.step()
    training.checkpoint()
    assert compiled(training.model).engine.states.stale_copies()
    weights = training.results()
    training.end()
    again = begin("recompute", resume_from_checkpoint=True)
    again.resume()
    same(again.results(), weights)
    engine = compiled(again.model).engine
    for slot, parameter in engine.slots.items():
        copy = engine.states._read(parameter.streamed_extent, parameter.numel, parameter.compute_dtype)
        assert torch.equal(copy, engine.states.read_parameter(slot).reshape(-1).to(parameter.compute_dtype))


def test_resuming_reads_nothing_that_it_does_not_need(begin: Begin) -> None:
    commit_one_step(begin)
    store = compiled(begin(resume_from_checkpoint=True).model).engine.store
    assert (store.bytes_read, store.bytes_written) == (0, 0)


def test_a_step_that_is_half_done_cannot_be_committed(begin: Begin) -> None:
    training = begin()
    training.step()
    training.checkpoint()
    for _ in range(2):  # the first holds its gradients, as does the second; from the third on they are applied at once
        training.model(training.loader.next()).backward()
        with pytest.raises(StepError, match=r"optimizer\.step\(\)"):
            training.checkpoint()
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.checkpoint()


def test_training_on_without_resume_is_refused(begin: Begin) -> None:
    commit_one_step(begin)
    again = begin(resume_from_checkpoint=True)
    with pytest.raises(StepError, match=r"lohan_fx\.resume"):
        again.step()
    with pytest.raises(StepError, match=r"lohan_fx\.resume"):
        again.checkpoint()
    again.optimizer.zero_grad()
    assert again.resume() is not None
    assert again.resume() is None
    again.step()


def test_loading_state_dicts_after_a_checkpoint_leaves_it_alone(begin: Begin) -> None:
    training = begin()
    training.step()
    saved = training.model.state_dict(), training.optimizer.state_dict()
    training.step()
    training.checkpoint()
    weights = training.results()
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    training.end()
    again = begin(resume_from_checkpoint=True)
    again.resume()
    same(again.results(), weights)


def test_a_run_that_does_not_resume_leaves_the_checkpoint_alone(begin: Begin, directory: Path) -> None:
    commit_one_step(begin)
    with pytest.raises(StoreError, match="resume_from_checkpoint=True"):
        begin()
    assert generations_in(directory) == [1]


def test_another_model_is_refused(begin: Begin, directory: Path) -> None:
    commit_one_step(begin)
    before = (directory / STORE_NAME).read_bytes()
    with pytest.raises(
        ValueError, match=r"made with compute_dtype=torch.bfloat16, .* compile\(compute_dtype=torch.bfloat16"
    ):
        begin(dtype=torch.float32, resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="the checkpoint is of another model: it has no parameter weight"):
        lohan_fx.compile(nn.Linear(4, 4), profile(), nvme=directory, resume_from_checkpoint=True)
    wider = Tiny()
    wider.layers[0] = nn.Linear(WIDTH, WIDTH + 1)
    with pytest.raises(ValueError, match=r"another model: of layers.0.weight, shape is .* here and .* there"):
        lohan_fx.compile(wider, profile(), nvme=directory, resume_from_checkpoint=True)
    with pytest.raises(
        ValueError, match=r"layers.0.weight is frozen, .* had, torch.float32, .* has it in torch.float16: build"
    ):
        half = Noisy()
        half.layers[0].weight.data = half.layers[0].weight.data.half()
        lohan_fx.compile(half, profile(), nvme=directory, resume_from_checkpoint=True)
    assert (directory / STORE_NAME).read_bytes() == before


def test_another_kind_of_weight_decay_is_refused(directory: Path) -> None:
    def begin_with(kind: type[lohan_fx.Adam], **options: Any) -> tuple[nn.Module, lohan_fx.Adam]:
        model = lohan_fx.compile(Tiny(), profile(), nvme=directory, host_memory="2GiB", **options)
        return model, kind(model.parameters(), weight_decay=0.1)

    model, optimizer = begin_with(lohan_fx.Adam)
    with lohan_fx.releasing(model):
        lohan_fx.checkpoint(model, optimizer)
    model, optimizer = begin_with(lohan_fx.AdamW, resume_from_checkpoint=True)
    with (
        lohan_fx.releasing(model),
        pytest.raises(ValueError, match=r"is of Adam, .* AdamW, .* resume with lohan_fx.Adam$"),
    ):
        lohan_fx.resume(model, optimizer)
    model, optimizer = begin_with(lohan_fx.Adam, resume_from_checkpoint=True)
    with lohan_fx.releasing(model):
        assert lohan_fx.resume(model, optimizer) == lohan_fx.Resumed(0, None, 1)


def test_a_scheduler_of_another_kind_is_refused_by_name(begin: Begin) -> None:
    commit_one_step(begin)
    again = begin(resume_from_checkpoint=True)
    again.scheduler = torch.optim.lr_scheduler.LambdaLR(again.optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="the scheduler is a LambdaLR, which does not take the state"):
        again.resume()


def test_a_loader_that_is_missing_moves_no_scheduler(begin: Begin) -> None:
    commit_one_step(begin)
    again = begin(resume_from_checkpoint=True)
    before = again.scheduler.state_dict()
    with pytest.raises(ValueError, match="resume was given no loader; the checkpoint holds one"):
        lohan_fx.resume(again.model, again.optimizer, scheduler=again.scheduler)
    assert again.scheduler.state_dict() == before
    assert again.resume() is not None


def test_the_error_of_a_hook_of_the_user_is_theirs(begin: Begin) -> None:
    commit_one_step(begin)
    again = begin(resume_from_checkpoint=True)

    def hook(optimizer: torch.optim.Optimizer, state: Any) -> None:
        raise TypeError("the user's")

    again.optimizer.register_load_state_dict_pre_hook(hook)
    with pytest.raises(TypeError, match="the user's"):
        again.resume()


def test_what_was_learned_of_a_step_is_resumed(begin: Begin) -> None:
    training = begin()
    training.loader.next()
    for backwards in (3, 2):
        for _ in range(backwards):
            training.model(training.loader.next()).backward()
        training.optimizer.step()
    engine = compiled(training.model).engine
    engine.wear.expect(123_456_789)
    training.checkpoint()
    training.end()
    again = begin(resume_from_checkpoint=True)
    again.resume()
    engine = compiled(again.model).engine
    assert engine.wear.step_bytes == 123_456_789
    assert (engine.micro_batches.expected, engine.micro_batches.last) == (3, 2)


def test_a_checkpoint_from_before_that_was_saved_is_resumed(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> None:
    training = begin()
    training.step()
    store = compiled(training.model).engine.store
    commit, later = store.commit, ("bytes_written", "step_bytes", "last_backwards")

    def earlier(state: dict[str, Any], **options: Any) -> int:
        assert state.keys() >= set(later)
        return commit({name: value for name, value in state.items() if name not in later}, **options)

    monkeypatch.setattr(store, "commit", earlier)
    training.checkpoint()
    training.end()
    again = begin(resume_from_checkpoint=True)
    assert again.resume() is not None
    assert compiled(again.model).engine.micro_batches.expected == 1
    again.step()


def test_a_promise_that_holds_a_training_holds_it_resumed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least there is, for which requests are the smallest: a resume has the chunks that are on disk, and may not have larger
    ones of what streams."""
    monkeypatch.setattr(pipeline, "time_ops", lambda gm, device: None)
    rows = torch.zeros(1, WIDTH).expand(1 << 20, WIDTH)

    def begun(host_memory: str | int, **options: Any) -> tuple[Any, Any]:
        model = lohan_fx.compile(
            Tiny(), profile(), nvme=directory, host_memory=host_memory, compute_dtype=torch.float32, **options
        )
        try:
            lohan_fx.prepare(model, rows)
        except InfeasiblePlan:
            lohan_fx.release(model)
            raise
        return model, lohan_fx.AdamW(model.parameters())

    with pytest.raises(InfeasiblePlan) as refused:
        begun("200MiB")
    (enough,) = re.findall("host_memory=([0-9,]+) would fit", str(refused.value))
    least = int(enough.replace(",", ""))
    model, optimizer = begun(least, checkpoints=1)
    model(rows).backward()
    optimizer.step()
    lohan_fx.checkpoint(model, optimizer)
    lohan_fx.release(model)
    model, optimizer = begun(least, resume_from_checkpoint=True)
    assert lohan_fx.resume(model, optimizer) is not None
    model(rows).backward()
    optimizer.step()
    lohan_fx.release(model)


def test_chunks_of_any_size_that_a_plan_may_have_are_resumed(begin: Begin, directory: Path) -> None:
    training = begin()
    plan = lohan_fx.prepare(training.model, batch())
    training.end()
    plan = dataclasses.replace(plan, windows=dataclasses.replace(plan.windows, chunk_elements=3 * 4096))
    training = begin(plan=plan)
    training.step()
    training.checkpoint()
    weights = training.results()
    training.end()
    again = begin(resume_from_checkpoint=True)
    again.resume()
    same(again.results(), weights)
    again.step()
    assert compiled(again.model).plans[-1].windows.chunk_elements == 3 * 4096


def test_a_checkpoint_that_must_be_there(begin: Begin, directory: Path) -> None:
    with pytest.raises(StoreError, match="there is no checkpoint"):
        begin(nvme=None, resume_from_checkpoint=directory)
    for none in ("", []):
        with pytest.raises(ValueError, match="names no directory"):
            begin(nvme=None, resume_from_checkpoint=none)
    commit_one_step(begin)
    assert begin(nvme=None, resume_from_checkpoint=directory).resume() is not None


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("step", 1e400, "step is inf: it is damaged"),
        ("step", True, "step is True: it is damaged"),
        ("backwards", "two", "backwards is 'two': it is damaged"),
        ("last_backwards", -1, "last_backwards is -1: it is damaged"),
        ("random", {"numpy": ["MT19937", [2**40], 0, 0, 0.0]}, "random state of the checkpoint cannot be set"),
        (
            "random",
            {"numpy": ["MT19937", [0] * 624, 0, 0, 0.0], "python": []},
            "random state of the checkpoint cannot be set",
        ),
        ("extra", {"@tensor": {"dtype": "float32", "shape": [0, 2**39, 2**39], "data": ""}}, "cannot be"),
        ("optimizer", [{"parameters": []}, {"parameters": []}], "has other parameters"),
        ("scheduler", None, "resume was given a scheduler"),
    ],
)
def test_a_state_that_no_training_wrote_changes_nothing(
    begin: Begin, directory: Path, key: str, value: Any, told: str
) -> None:
    """Under a good checksum, as somebody who writes manifests by hand would make it."""
    commit_one_step(begin)
    path = generation_path(directory, 1)
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    body["state"][key] = value
    path.write_bytes(sealed(json.dumps(body).encode()))
    again = begin(resume_from_checkpoint=True)
    before = [dict(group, params=len(group["params"])) for group in again.optimizer.param_groups]
    generators = random.getstate(), torch.get_rng_state()
    with pytest.raises((StoreError, ValueError), match=told):
        again.resume()
    assert [dict(group, params=len(group["params"])) for group in again.optimizer.param_groups] == before
    assert again.optimizer.steps_done == 0
    assert random.getstate() == generators[0] and torch.equal(torch.get_rng_state(), generators[1])


def test_what_a_checkpoint_cannot_hold_is_refused_by_name(begin: Begin) -> None:
    training = begin()
    training.step()
    for keep in (0, 1.5, True, "2"):
        with pytest.raises(ValueError, match=f"checkpoints to keep: expected 1 to 16, got {keep!r}"):
            training.checkpoint(keep=keep)
    with pytest.raises(TypeError, match=r"extra\.a\[1\] is a object"):
        training.checkpoint(extra={"a": [1, object()]})
    itself: list[object] = []
    itself.append(itself)
    with pytest.raises(ValueError, match="extra contains itself"):
        training.checkpoint(extra=itself)
    with pytest.raises(TypeError, match=r"the loader is a list, which has no state_dict\(\)"):
        lohan_fx.checkpoint(training.model, training.optimizer, loader=[])  # type: ignore[arg-type]
    # What was refused is not kept for a checkpoint at the end of a wear budget.
    assert training.optimizer.parts == Parts()
    assert training.checkpoint() == 1
    with pytest.raises(ValueError, match="the optimizer is of another model"):
        lohan_fx.checkpoint(training.model, begin(nvme=_other(training)).optimizer)


def _other(training: Training) -> Path:
    found = compiled(training.model).engine.store._directories[0].parent / "other"
    found.mkdir()
    return found


def test_a_temporary_directory_holds_no_checkpoint(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    training = begin(nvme=None)
    training.step()
    with pytest.raises(ValueError, match="name directories that outlive it"):
        training.checkpoint()
    for options in ({"checkpoints": 1}, {"resume_from_checkpoint": True}):
        with pytest.raises(ValueError, match="name them with nvme="):
            begin(nvme=None, **options)
    training.end()
    shutil.rmtree(tmp_path / "lohan_fx")


def test_nothing_in_a_checkpoint_is_pickled_and_all_is_private(begin: Begin, directory: Path) -> None:
    training = begin()
    training.step()
    training.checkpoint(extra=torch.arange(3))
    for path in directory.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    header, _, body = generation_path(directory, 1).read_bytes().partition(b"\n")
    assert header.startswith(b"lohan_fx.checkpoint 1 ")
    assert json.loads(body)["state"]["extra"]["@tensor"]["shape"] == [3]
    for module in ("pickle", "marshal", "shelve"):
        for name in ("checkpoint", "resuming", "plain_json", "random_state"):
            assert module not in vars(importlib.import_module(f"lohan_fx.checkpoints.{name}"))
