"""trainer: Hugging Face's ``Trainer`` with checkpoints that copy nothing.

``class Trainer(CheckpointMixin, transformers.Trainer)``; also before TRL's trainers. Transformers is imported where it is
used only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from lohan_fx.checkpoints.checkpoint import Resumed, checkpoint, resumable, resume
from lohan_fx.checkpoints.random_state import Generators, random_state
from lohan_fx.checkpoints.training_state import Parts
from lohan_fx.optim import Adam

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

STATE = "transformers_trainer_state"
STATE_FILE = "trainer_state.json"
STEPS = "optimizer_steps"
"""Those that the optimizer had done at the Trainer's ``global_step``."""


class CheckpointMixin(Base):  # type: ignore[misc]  # mypy runs without transformers' types
    """Where ``save_strategy`` says so, ``lohan_fx.checkpoint`` commits: parameters and moments stay where they are, and the
    manifest holds the Trainer's state, schedule and generators, so that all of it survives or none. ``train()`` goes on where
    the checkpoint was that ``lohan_fx.compile(..., resume_from_checkpoint=...)`` found, bit by bit; it skips the batches that
    were seen, as the Trainer does.

    How many are kept says ``compile(..., checkpoints=...)``; ``save_total_limit`` and what is said of files does not count.
    """

    _generators: Generators | None = None
    _announced = False

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As the Trainer's, but True is as None: where ``compile`` found no checkpoint, the training begins anew, which the
        Trainer would refuse. Raises ``ValueError`` for the path of a checkpoint, where the checkpoint is of another loop, and
        with ``load_best_model_at_end``, since no weights are copied that it could load."""
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            raise ValueError(
                "checkpoints of this Trainer are in the directories that the model was compiled with: name them by "
                "lohan_fx.compile(..., resume_from_checkpoint=...), and train() goes on from there"
            )
        if self.args.load_best_model_at_end:
            raise ValueError(
                "load_best_model_at_end=True needs copies of the weights, which this Trainer does not make: leave it out, or use "
                "transformers.Trainer without CheckpointMixin, which copies the model into RAM at each checkpoint"
            )
        self._announced = False
        found = resumable(self.model)
        if found is None:
            return super().train(None, *args, **options)
        with TemporaryDirectory(prefix="lohan_fx_trainer_") as folder:
            Path(folder, STATE_FILE).write_text(json.dumps(_state_in(found)))
            return super().train(folder, *args, **options)

    # --- what the Trainer asks of itself ----------------------------------------------------------------------

    def training_step(self, *args: Any, **options: Any) -> Any:
        adam = self._adam()
        if not self._announced and isinstance(adam, Adam):
            # A step that reaches ``max_bytes_written`` makes a checkpoint itself.
            adam.parts = Parts(self.lr_scheduler, None, self._extra())
            self._announced = True
        return super().training_step(*args, **options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        from transformers.trainer_callback import ExportableState

        del model, trial
        self.store_flos()
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                self._note(type(callback).__name__, callback.state())
        checkpoint(self.model, self.optimizer, scheduler=self.lr_scheduler, extra=self._extra())

    def _extra(self) -> dict[str, Any]:
        # As TrainerState.save_to_json writes it.
        text = json.dumps(dataclasses.asdict(self.state), sort_keys=True)
        return {STATE: text, STEPS: self._adam().steps_done}

    def _adam(self) -> Any:
        """The optimizer inside accelerate's."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _note(self, callback: str, state: dict[str, Any]) -> None:
        """As the Trainer does: several of one class have a list."""
        noted = self.state.stateful_callbacks
        if isinstance(noted.get(callback), list):
            noted[callback].append(state)
        else:
            noted[callback] = state

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """``compile`` has taken up the parameters."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            found = resume(self.model, self.optimizer, scheduler=self.lr_scheduler)
            if found is not None and found.stopped_in_step and not isinstance(self.lr_scheduler, ReduceLROnPlateau):
                # It comes after ``optimizer.step()``, which the process before has done: PyTorch warns of that.
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
                    self.lr_scheduler.step()
            self._generators = Generators.of(random_state())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Once batches that were seen are skipped, for which generators may have been drawn from."""
        if checkpoint is not None and self._generators is not None:
            self._generators.set()


def _state_in(found: Resumed) -> Any:
    """The Trainer's state in a checkpoint. One that ``optimizer.step()`` made has that of the last one before, and more steps."""
    extra = found.extra
    if not isinstance(extra, dict) or not isinstance(extra.get(STATE), str) or type(extra.get(STEPS)) is not int:
        raise ValueError(
            "the checkpoint that the model was compiled from was not made by a Trainer with CheckpointMixin: continue it by "
            "lohan_fx.resume(model, optimizer, ...) and the loop that made it"
        )
    state = json.loads(extra[STATE])
    state["global_step"] += found.step - extra[STEPS]
    return state
