"""checkpoint: everything that a training needs to go on, made durable where it is; and taken up again.

A checkpoint is not a copy (docs/0010): the states are in the store already, and what is added is a manifest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lohan_fx.compile import compiled
from lohan_fx.errors import StepError, StoreError
from lohan_fx.optim import Adam
from lohan_fx.plain_json import decoded, encoded
from lohan_fx.random_state import random_state, set_random_state
from lohan_fx.resuming import PARAMETERS, checkpoint_of_model
from lohan_fx.runtime.engine import Engine

_LOG = logging.getLogger(__name__)


class Stateful(Protocol):
    """A learning rate scheduler, a data loader that knows its position, a sampler: anything of PyTorch's kind."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(frozen=True)
class Resumed:
    """What ``resume`` found: the optimizer steps done, the caller's ``extra``, and the checkpoint's number."""

    step: int
    extra: Any
    number: int


def checkpoint(
    model: nn.Module,
    optimizer: Adam,
    *,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
    extra: Any = None,
    keep: int | None = None,
) -> int:
    """Commit where the training is now; returns the checkpoint's number. Call it between ``step`` and the next backward.

    Takes a moment whatever the size of the model: parameters and states stay where they are on NVMe, and only what
    the plan keeps in memory is written. It holds parameters, moments, buffers, the optimizer's param groups, step
    counts, the generators of Python, numpy and torch, and, where given, scheduler and loader (their ``state_dict``).

    Args:
        extra: anything of yours that is numbers, text, booleans, None, and lists, tuples, dicts and tensors of them.
        keep: how many checkpoints stay, each costing the disk space of the states once more. Fixed by the first one, or
            by ``compile(..., checkpoints=keep)``, which takes the disk space at the start instead of here. None: 1.

    Raises:
        StepError: a step is half done, or failed half-way.
        StoreError: the disk is full or failing; the checkpoint before is in force.
        ValueError, TypeError: the model has no directory of its own (``compile(..., nvme=...)``), or something given
            cannot be stored.
    """
    engine = compiled(model).engine
    _check(engine, optimizer)
    if engine.resumed is not None:
        raise StepError("the model was compiled from a checkpoint: call lohan_fx.resume(model, optimizer, ...) first")
    engine.before_reading()
    if engine.holds_gradients():
        raise StepError("a checkpoint was asked for between backward and optimizer.step(): ask after optimizer.step()")
    engine.store.keep_generations(keep or engine.store.keeps or 1)
    state = {
        **checkpoint_of_model(model, engine),
        "optimizer": _groups(optimizer),
        "step": optimizer.steps_done,
        "backwards": engine.micro_batches.expected,
        "scheduler": None if scheduler is None else encoded(scheduler.state_dict(), "scheduler"),
        "loader": None if loader is None else encoded(loader.state_dict(), "loader"),
        "extra": encoded(extra, "extra"),
        "random": random_state(),
    }
    engine.states.write_back()
    return engine.store.commit(state)


def resume(
    model: nn.Module, optimizer: Adam, *, scheduler: Stateful | None = None, loader: Stateful | None = None
) -> Resumed | None:
    """Continue a training exactly where its last checkpoint was; None where ``compile`` found no checkpoint.

    Call it once, before the first step, with what was given to ``checkpoint``; ``compile(...,
    resume_from_checkpoint=True)`` has taken up parameters and moments, this the rest. The last thing it does is to set
    the random generators.

    Raises ``ValueError`` where optimizer, scheduler or loader do not fit what the checkpoint holds; nothing has changed
    then, apart from a scheduler or loader that refused.
    """
    engine = compiled(model).engine
    _check(engine, optimizer)
    state = engine.resumed
    if state is None:
        return None
    number = engine.store.committed
    try:
        groups = _groups_of(state, optimizer)
        for name, taker in (("scheduler", scheduler), ("loader", loader)):
            saved = decoded(state[name])
            if (taker is None) != (saved is None):
                here, there = ("a", "none") if saved is None else ("no", "one")
                raise ValueError(f"resume was given {here} {name}; the checkpoint holds {there}")
            if taker is not None:
                taker.load_state_dict(saved)
        # torch's own, without states: ours are in the store already.
        torch.optim.Optimizer.load_state_dict(optimizer, {"state": {}, "param_groups": groups})
        optimizer.steps_done = int(state["step"])
        if engine.micro_batches.expected is None:
            engine.micro_batches.expected = state["backwards"]
        found = Resumed(int(state["step"]), decoded(state["extra"]), number)
        set_random_state(state["random"])
    except (KeyError, TypeError) as error:
        raise StoreError(f"checkpoint {number} lacks what a training needs ({error!r}): resume from another") from error
    engine.resumed = None
    _LOG.info("resumed from checkpoint %d, after step %d", number, found.step)
    return found


def _check(engine: Engine, optimizer: Adam) -> None:
    if not isinstance(optimizer, Adam):
        raise TypeError(f"the optimizer is a {type(optimizer).__name__}: expected lohan_fx.AdamW(model.parameters())")
    if optimizer.engine is not engine:
        raise ValueError("the optimizer is of another model")


def _groups(optimizer: Adam) -> list[dict[str, Any]]:
    return [
        {
            PARAMETERS: [shell.parameter_name for shell in group["params"]],
            "options": encoded({key: value for key, value in group.items() if key != "params"}, f"param group {index}"),
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def _groups_of(state: Mapping[str, Any], optimizer: Adam) -> list[dict[str, Any]]:
    """The param groups in torch's form. Raises ``ValueError`` where they hold other parameters than ``optimizer``'s."""
    saved: Sequence[Mapping[str, Any]] = state["optimizer"]
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(f"the checkpoint has {len(saved)} param groups, the optimizer {len(optimizer.param_groups)}")
    groups: list[dict[str, Any]] = []
    first = 0
    for index, (kept, group) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        names = [shell.parameter_name for shell in group["params"]]
        if kept[PARAMETERS] != names:
            raise ValueError(
                f"param group {index} of the checkpoint has other parameters than the optimizer's: make the groups as "
                "in the run that wrote it"
            )
        groups.append({**decoded(kept["options"]), "params": list(range(first, first + len(names)))})
        first += len(names)
    return groups
