"""``transformers.Trainer`` trains a compiled model: as it is, clipping as it does by default, with plain PyTorch's numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.trainer_callback import ExportableState

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.errors import StepError, WearBudgetExceeded
from lohan_fx.hardware import HardwareProfile
from lohan_fx.trainer import CheckpointMixin
from tests.end_to_end.models import GPT2_SHALLOW, TOKENS, VOCABULARY
from tests.end_to_end.recipes import LR, assert_same_weights, weights_of
from tests.exhaustive import combinations

pytestmark = pytest.mark.usefixtures("leak_check", "little_is_small")

EXAMPLES = 22
"""With batches of 2 and 3 of them per step: the last step of an epoch has 2 backwards, and the last batch is whole."""

Logs = list[dict[str, float]]


def examples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (EXAMPLES, TOKENS), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not where ``leak_check`` looks: what the Trainer saves stays."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def trainer(outputs: Path) -> Callable[..., transformers.Trainer]:
    def make(
        model: nn.Module, optimizer: Any, kind: Any = transformers.Trainer, **arguments: Any
    ) -> transformers.Trainer:
        settings = transformers.TrainingArguments(
            output_dir=str(outputs),
            per_device_train_batch_size=2,
            learning_rate=LR,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            **{"save_strategy": "no", "num_train_epochs": 1, **arguments},
        )
        made: transformers.Trainer = kind(model, settings, train_dataset=examples(), optimizers=(optimizer, None))
        return made

    return make


def logged(trained: transformers.Trainer) -> Logs:
    """Loss, norm of the gradients and learning rate of every step."""
    kept = ("loss", "grad_norm", "learning_rate")
    return [{name: entry[name] for name in kept} for entry in trained.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="as it comes"),
        pytest.param({"gradient_accumulation_steps": 3, "num_train_epochs": 2}, id="accumulating"),
        pytest.param({"max_grad_norm": 0.0}, id="not clipping"),
    ],
)
def test_the_numbers_are_those_of_plain_pytorch(arguments: dict[str, Any], trainer: Any, on_nvme: Any) -> None:
    plain = GPT2_SHALLOW.build()
    expected = trainer(plain, torch.optim.AdamW(plain.parameters(), lr=LR), **arguments)
    expected.train()
    with on_nvme(GPT2_SHALLOW.build()) as model:
        found = trainer(model, lohan_fx.AdamW(model.parameters(), lr=LR), **arguments)
        found.train()
    assert logged(found) == logged(expected)
    assert len(logged(found)) >= 8 and (arguments or any(log["grad_norm"] > 1.0 for log in logged(found)))
    assert_same_weights(weights_of(model), weights_of(plain))


def test_a_checkpoint_of_the_trainer_is_resumed_bit_by_bit(trainer: Any, on_nvme: Any) -> None:
    saves = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    with on_nvme(GPT2_SHALLOW.build()) as model:
        whole = trainer(model, lohan_fx.AdamW(model.parameters(), lr=LR), **saves)
        whole.train()
    expected = weights_of(model)
    with on_nvme(GPT2_SHALLOW.build()) as model:
        again = trainer(model, lohan_fx.AdamW(model.parameters(), lr=LR), **saves)
        again.train(resume_from_checkpoint=str(Path(whole.args.output_dir, "checkpoint-4")))
    assert logged(again) == logged(whole)
    assert_same_weights(weights_of(model), expected)


def test_evaluation_and_saving(trainer: Any, on_nvme: Any, outputs: Path) -> None:
    with on_nvme(GPT2_SHALLOW.build()) as model:
        trained = trainer(model, lohan_fx.AdamW(model.parameters(), lr=LR), max_steps=2)
        trained.train()
        loss = trained.evaluate(examples()[:4])["eval_loss"]
        trained.save_model(str(outputs / "saved"))
    saved = type(model).from_pretrained(outputs / "saved").eval()
    assert_same_weights(weights_of(saved), weights_of(model))
    again = trainer(saved, None).evaluate(examples()[:4])["eval_loss"]
    assert loss == pytest.approx(again, rel=1e-5)  # an inference graph rounds elsewhere than eager


def test_without_our_optimizer_it_says_what_to_do(trainer: Any, on_nvme: Any) -> None:
    with on_nvme(GPT2_SHALLOW.build()) as model:
        with pytest.raises(StepError, match=r"create lohan_fx\.AdamW"):
            trainer(model, None, max_steps=1).train()
        assert compiled(model).engine.updates.options is None


class Committing(CheckpointMixin, transformers.Trainer):
    pass


class Stopped(Exception):
    """What ends a training in the middle of a step."""


class Stops(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self._step:
            raise Stopped


@pytest.fixture
def begin(hw: HardwareProfile, directory: Path) -> Any:
    def begin(**options: Any) -> tuple[nn.Module, lohan_fx.AdamW]:
        model = lohan_fx.compile(GPT2_SHALLOW.build(), hw, compute_dtype=torch.float32, policy="lohan-ds",
                                 host_memory="2GiB", **options)  # fmt: skip
        return model, lohan_fx.AdamW(model.parameters(), lr=LR)

    return begin


SAVING: dict[str, dict[str, Any]] = {
    "as it comes": {"max_steps": 9, "save_steps": 2},
    "accumulating": {"gradient_accumulation_steps": 3, "num_train_epochs": 2, "save_steps": 3},
    "schedule": {"num_train_epochs": 1, "save_steps": 4, "lr_scheduler_type": "cosine", "warmup_steps": 3},
}


@pytest.mark.parametrize(("saving", "stop"), combinations(list(SAVING), [5, 7]))
def test_the_trainer_goes_on_where_its_last_checkpoint_was(
    saving: str, stop: int, trainer: Any, begin: Any, directory: Path, on_nvme: Any
) -> None:
    arguments = {"save_strategy": "steps", "kind": Committing, **SAVING[saving]}
    reference = GPT2_SHALLOW.build()
    adam = torch.optim.AdamW(reference.parameters(), lr=LR)
    plain = trainer(reference, adam, **{**arguments, "save_strategy": "no", "kind": transformers.Trainer})
    plain.train()
    model, optimizer = begin(nvme=directory, checkpoints=1)
    with lohan_fx.releasing(model):
        broken = trainer(model, optimizer, **arguments)
        broken.add_callback(Stops(stop))
        with pytest.raises(Stopped):
            broken.train()
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    model, optimizer = begin(nvme=directory, resume_from_checkpoint=True)
    with lohan_fx.releasing(model):
        again = trainer(model, optimizer, **arguments)
        again.train(resume_from_checkpoint=True)
    assert again.state.global_step == plain.state.global_step == plain.state.max_steps > stop
    assert logged(again) == logged(plain)  # those from before the checkpoint are in it
    assert_same_weights(weights_of(model), weights_of(reference))
    assert not list(Path(again.args.output_dir).glob("checkpoint-*"))


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("stop", [1, 5])
def test_it_goes_on_after_a_step_that_reached_the_budget_of_writes(
    stop: int, trainer: Any, begin: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That step made a checkpoint before the Trainer had counted it: before its first one, or after."""
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8, "lr_scheduler_type": "cosine"}
    reference = GPT2_SHALLOW.build()
    plain = trainer(reference, torch.optim.AdamW(reference.parameters(), lr=LR), **{**arguments, "save_strategy": "no"})
    plain.train()
    model, optimizer = begin(nvme=directory, checkpoints=1, max_bytes_written="1TB")
    with lohan_fx.releasing(model):
        monkeypatch.setattr(compiled(model).engine.wear, "is_spent", lambda **_: optimizer.steps_done == stop)
        with pytest.raises(WearBudgetExceeded):
            trainer(model, optimizer, kind=Committing, **arguments).train()
    model, optimizer = begin(nvme=directory, resume_from_checkpoint=True)
    with lohan_fx.releasing(model):
        again = trainer(model, optimizer, kind=Committing, **arguments)
        again.train()
    assert again.state.global_step == optimizer.steps_done == 8
    assert logged(again)[stop - 8 :] == logged(plain)[stop:]
    assert_same_weights(weights_of(model), weights_of(reference))


class CountsSteps(transformers.TrainerCallback, ExportableState):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def test_a_new_training_begins_anew_and_callbacks_keep_their_state(trainer: Any, begin: Any, directory: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 2, "kind": Committing}
    for steps in (4, 8):
        model, optimizer = begin(nvme=directory, resume_from_checkpoint=True)
        with lohan_fx.releasing(model):
            made = trainer(model, optimizer, max_steps=steps, restore_callback_states_from_checkpoint=True, **arguments)
            made.add_callback(CountsSteps())
            made.train(resume_from_checkpoint=True)
            (counts,) = (one for one in made.callback_handler.callbacks if isinstance(one, CountsSteps))
            assert made.state.global_step == counts.count == steps


def test_what_the_committing_trainer_refuses(trainer: Any, begin: Any, directory: Path) -> None:
    model, optimizer = begin(nvme=directory, checkpoints=1)
    with lohan_fx.releasing(model):
        made = trainer(model, optimizer, max_steps=1, kind=Committing)
        with pytest.raises(ValueError, match=r"name them by lohan_fx.compile\(..., resume_from_checkpoint"):
            made.train(resume_from_checkpoint="checkpoint-4")
        made.args.load_best_model_at_end = True
        with pytest.raises(ValueError, match=r"load_best_model_at_end=True needs copies"):
            made.train()
        made.args.load_best_model_at_end = False
        made.train()
        lohan_fx.checkpoint(model, optimizer, extra={"of": "another loop"})
    model, optimizer = begin(nvme=directory, resume_from_checkpoint=True)
    with lohan_fx.releasing(model), pytest.raises(ValueError, match="not made by a Trainer with CheckpointMixin"):
        trainer(model, optimizer, max_steps=1, kind=Committing).train()


class Commits(transformers.TrainerCallback):
    """Commits after the given step, by what the Trainer hands to its callbacks."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self._step:
            lohan_fx.checkpoint(given["model"], given["optimizer"], extra=state.global_step)


def test_a_callback_commits_without_copies(trainer: Any, begin: Any, directory: Path) -> None:
    model, optimizer = begin(nvme=directory, checkpoints=1)
    with lohan_fx.releasing(model):
        trained = trainer(model, optimizer, max_steps=2)
        trained.add_callback(Commits(2))
        trained.train()
        moments = optimizer.state_dict()["state"]
    expected = weights_of(model)
    model, optimizer = begin(resume_from_checkpoint=[directory])
    with lohan_fx.releasing(model):
        resumed = lohan_fx.resume(model, optimizer)
        assert resumed is not None and (resumed.step, resumed.extra) == (2, 2)
        for slot, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, moments[slot][name]) for name, value in state.items())
    assert_same_weights(weights_of(model), expected)
