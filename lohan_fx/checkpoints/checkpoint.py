"""checkpoint: everything that a training needs to go on, made durable where it is; and taken up again.

A checkpoint is not a copy (docs/0010): the states are in the store already, and what is added is a manifest.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lohan_fx.checkpoints.plain_json import decoded
from lohan_fx.checkpoints.random_state import Generators
from lohan_fx.checkpoints.resuming import saved_count
from lohan_fx.checkpoints.training_state import STOPPED_IN_STEP, Parts, Stateful, commit_training, saved_groups
from lohan_fx.compile import compiled
from lohan_fx.errors import StoreError
from lohan_fx.optim import Adam
from lohan_fx.runtime.engine import Engine

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What ``resume`` found: the optimizer steps done, the caller's ``extra``, and the checkpoint's number.

    ``stopped_in_step``: it was made by ``optimizer.step()`` itself, because ``max_bytes_written`` was reached: what your
    loop does between that and its own checkpoint (``scheduler.step()``, what goes into ``extra``) it has not done yet.
    """

    step: int
    extra: Any
    number: int
    stopped_in_step: bool = False


def checkpoint(
    model: nn.Module,
    optimizer: Adam,
    *,
    scheduler: Stateful | None = None,
    loader: Stateful | None = None,
    extra: Any = None,
    keep: int | None = None,
    verify: bool = False,
) -> int:
    """Commit where the training is now; returns the checkpoint's number. Call it between ``step`` and the next backward.

    Takes a moment whatever the size of the model: parameters and states stay where they are on NVMe, and only what
    the plan keeps in memory is written. (The first one of a model compiled with ``checkpoints=0`` takes disk space, and reads
    all states once for their checksums.) It holds parameters, moments, buffers, the optimizer's param groups, step
    counts, the generators of Python, numpy and torch, and, where given, scheduler and loader (their ``state_dict``).

    Args:
        extra: anything of yours that is numbers, text, booleans, None, and lists, tuples, dicts and tensors of them.
        keep: how many checkpoints stay, each costing the disk space of the states once more. Fixed by the first one, or
            by ``compile(..., checkpoints=keep)``, which takes the disk space at the start instead of here. None: 1.
            One outlives the process, and the machine's power; against a drive that stores other bits than it was given,
            which the next read finds when the checkpoint before may be gone, keep two, or ``verify``.
        verify: read back from the drives what was written since the last checkpoint, before this one replaces it. Takes
            as long as reading that does: all states, if there was a step since.

    Raises:
        StepError: a step is half done, or failed half-way.
        StoreError: the disk is full or failing, or holds other bits than were written; the checkpoint before is in force.
        ValueError, TypeError: the model has no directory of its own (``compile(..., nvme=...)``), or something given
            cannot be stored.
    """
    engine = compiled(model).engine
    optimizer = _unwrapped(engine, optimizer)
    return commit_training(model, optimizer, Parts(scheduler, loader, extra), keep, verify=verify)


def resume(
    model: nn.Module, optimizer: Adam, *, scheduler: Stateful | None = None, loader: Stateful | None = None
) -> Resumed | None:
    """Continue a training exactly where its last checkpoint was; None where ``compile`` found no checkpoint.

    Call it once, before the first step, with what was given to ``checkpoint``; ``compile(...,
    resume_from_checkpoint=True)`` has taken up parameters and moments, this the rest. The last thing it does is to set
    the random generators.

    Raises ``ValueError`` where optimizer, scheduler or loader do not fit what the checkpoint holds, and ``StoreError`` where it
    lacks something; nothing has changed then, unless a scheduler or loader refused its own state.
    """
    engine = compiled(model).engine
    optimizer = _unwrapped(engine, optimizer)
    with engine.one_call():
        return _resume(engine, optimizer, Parts(scheduler, loader))


def _resume(engine: Engine, optimizer: Adam, parts: Parts) -> Resumed | None:
    state = engine.resumed
    if state is None:
        return None
    number = engine.store.committed
    try:
        step = saved_count(state, "step", number)
        backwards = None if state["backwards"] is None else saved_count(state, "backwards", number)
        # Absent where an earlier lohan_fx wrote it.
        last_backwards = saved_count(state, "last_backwards", number, absent=0)
        generators = Generators.of(state["random"])
        groups, extra = saved_groups(state, optimizer), decoded(state["extra"])
        takers = {"scheduler": parts.scheduler, "loader": parts.loader}
        saved = {name: decoded(state[name]) for name in takers}
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"checkpoint {number} lacks what a training needs ({error!r}): resume from another") from error
    for name, taker in takers.items():
        if (taker is None) != (saved[name] is None):
            here, there = ("a", "none") if saved[name] is None else ("no", "one")
            raise ValueError(f"resume was given {here} {name}; the checkpoint holds {there}")
    for name, taker in takers.items():
        if taker is not None:
            _take_up(name, taker, saved[name])
    # torch's own, without states: ours are in the store already.
    torch.optim.Optimizer.load_state_dict(optimizer, {"state": {}, "param_groups": groups})
    optimizer.steps_done = step
    engine.micro_batches.resume(backwards, last_backwards)
    # A training that clips does so in its next step, whose gradients must still be there then.
    engine.updates.holds = engine.updates.holds or bool(state.get("holds"))
    optimizer.parts = dataclasses.replace(parts, extra=extra)
    generators.set()
    engine.resumed = None
    _LOG.info("resumed from checkpoint %d, after step %d", number, step)
    return Resumed(step, extra, number, state.get(STOPPED_IN_STEP) is True)


def resumable(model: nn.Module) -> Resumed | None:
    """What ``resume`` will find, if ``compile`` found a checkpoint and it is not taken up yet."""
    engine = compiled(model).engine
    state, number = engine.resumed, engine.store.committed
    if state is None:
        return None
    return Resumed(
        saved_count(state, "step", number), decoded(state["extra"]), number, state.get(STOPPED_IN_STEP) is True
    )


def _take_up(name: str, taker: Stateful, saved: dict[str, Any]) -> None:
    try:
        taker.load_state_dict(saved)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the {name} is a {type(taker).__name__}, which does not take the state that the checkpoint holds ({error!r}): give "
            "resume one of the kind that checkpoint was given"
        ) from error


def _unwrapped(engine: Engine, optimizer: Adam) -> Adam:
    """``optimizer``, or the one inside it: a callback of the Trainer is given accelerate's wrapper."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(optimizer, Adam):
        raise TypeError(f"the optimizer is a {type(optimizer).__name__}: expected lohan_fx.AdamW(model.parameters())")
    if optimizer.engine is not engine:
        raise ValueError("the optimizer is of another model")
    return optimizer
