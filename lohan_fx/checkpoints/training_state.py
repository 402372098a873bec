"""training_state: what a checkpoint holds beside the bytes in the store: gathered between two steps, and committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from lohan_fx.checkpoints.plain_json import decoded, encoded
from lohan_fx.checkpoints.random_state import random_state
from lohan_fx.checkpoints.resuming import PARAMETERS, checkpoint_of_model
from lohan_fx.errors import StepError, StoreError, WearBudgetExceeded

if TYPE_CHECKING:
    from lohan_fx.optim import Adam

STOPPED_IN_STEP = "stopped_in_step"


class Stateful(Protocol):
    """A learning rate scheduler, a data loader that knows its position, a sampler: anything of PyTorch's kind."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(frozen=True)
class Parts:
    """What of a training is the caller's: given to ``checkpoint`` or ``resume``, and kept for a stop between them."""

    scheduler: Stateful | None = None
    loader: Stateful | None = None
    extra: Any = None


def commit_training(
    model: nn.Module, optimizer: Adam, parts: Parts, keep: int | None, *, verify: bool = False, stopped: bool = False
) -> int:
    """Make the training as it is now a checkpoint; its number. Raises as ``lohan_fx.checkpoint``."""
    with optimizer.engine.one_call():
        return _commit(model, optimizer, parts, keep, verify=verify, stopped=stopped)


def _commit(model: nn.Module, optimizer: Adam, parts: Parts, keep: int | None, *, verify: bool, stopped: bool) -> int:
    engine = optimizer.engine
    if engine.resumed is not None:
        raise StepError("the model was compiled from a checkpoint: call lohan_fx.resume(model, optimizer, ...) first")
    engine.before_reading()
    if engine.updates.holds_any():
        raise StepError(
            "a checkpoint was asked for between backward and optimizer.step(): ask after optimizer.step(), or, where the step "
            "was skipped (by a GradScaler), after optimizer.zero_grad()"
        )
    engine.store.keep_generations(keep if keep is not None else engine.store.keeps or 1)
    state = {
        **checkpoint_of_model(model, engine),
        "optimizer": groups_of(optimizer),
        "step": optimizer.steps_done,
        "backwards": engine.micro_batches.expected,
        "last_backwards": engine.micro_batches.last,
        "holds": engine.updates.holds,
        "scheduler": _state_of(parts.scheduler, "scheduler"),
        "loader": _state_of(parts.loader, "loader"),
        "extra": encoded(parts.extra, "extra"),
        "random": random_state(),
        STOPPED_IN_STEP: stopped,
    }
    optimizer.parts = parts
    engine.write_back()
    wear = {"bytes_written": engine.wear.written_bytes, "step_bytes": engine.wear.step_bytes}
    return engine.store.commit({**state, **wear}, verify=verify)


def _state_of(part: Stateful | None, name: str) -> Any:
    if part is None:
        return None
    if not hasattr(part, "state_dict"):
        raise TypeError(
            f"the {name} is a {type(part).__name__}, which has no state_dict(): give checkpoint one that has, or put what it "
            "needs to go on into extra"
        )
    return encoded(part.state_dict(), name)


def stopped_by_wear(optimizer: Adam, model: nn.Module) -> WearBudgetExceeded:
    """What ``optimizer.step()`` raises once the budget is spent, after a checkpoint where one can be made."""
    engine = optimizer.engine
    if engine.store.is_temporary:
        return engine.wear.exceeded("the step is whole; there is no checkpoint, because the store is a temporary one")
    try:
        number = commit_training(model, optimizer, optimizer.parts, None, stopped=True)
    except (StoreError, ValueError, TypeError) as error:
        return engine.wear.exceeded(f"the step is whole, but no checkpoint could be made of it ({error})")
    return engine.wear.exceeded(f"checkpoint {number} was made after step {optimizer.steps_done}", number)


def groups_of(optimizer: Adam) -> list[dict[str, Any]]:
    """The param groups as a checkpoint holds them: names instead of tensors."""
    return [
        {
            PARAMETERS: [shell.parameter_name for shell in group["params"]],
            "options": encoded({key: value for key, value in group.items() if key != "params"}, f"param group {index}"),
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def saved_groups(state: Mapping[str, Any], optimizer: Adam) -> list[dict[str, Any]]:
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
        options = decoded(kept["options"])
        # Adam goes on as either kind, AdamW only as its own. Absent where an earlier lohan_fx wrote it.
        decouples = options.get("decoupled_weight_decay", True)
        if options["weight_decay"] and group["decoupled_weight_decay"] and not decouples:
            raise ValueError(
                f"param group {index} of the checkpoint is of Adam, which adds weight decay to the gradient, and the optimizer "
                f"is {type(optimizer).__name__}, which does not: resume with lohan_fx.Adam"
            )
        groups.append({**options, "params": list(range(first, first + len(names)))})
        first += len(names)
    return groups
