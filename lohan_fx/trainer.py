"""trainer: Hugging Face's ``Trainer`` with checkpoints that copy nothing.

``class Trainer(CheckpointMixin, transformers.Trainer)``; also before TRL's trainers. Transformers is imported where it is
used only.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lohan_fx.checkpoints.checkpoint import checkpoint, resumable_extra, resume
from lohan_fx.checkpoints.random_state import Generators, random_state

if TYPE_CHECKING:
    Base = Any
else:
    Base = object

STATE = "transformers_trainer_state"
STATE_FILE = "trainer_state.json"


class CheckpointMixin(Base):  # type: ignore[misc]  # mypy runs without transformers' types
    """Where ``save_strategy`` says so, ``lohan_fx.checkpoint`` commits: parameters and moments stay where they are, and the
    manifest holds the Trainer's state, schedule and generators, so that all of it survives or none. ``train()`` goes on where
    the checkpoint was that ``lohan_fx.compile(..., resume_from_checkpoint=...)`` found, bit by bit; it skips the batches that
    were seen, as the Trainer does.

    How many are kept says ``compile(..., checkpoints=...)``; ``save_total_limit`` and what is said of files does not count.
    """

    _generators: Generators | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """As the Trainer's. Raises ``ValueError`` for the path of a checkpoint, where the checkpoint is of another loop, and
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
        found, extra = resumable_extra(self.model)
        if not found:
            return super().train(None, *args, **options)
        if not isinstance(extra, dict) or not isinstance(extra.get(STATE), str):
            raise ValueError(
                "the checkpoint that the model was compiled from was not made by a Trainer with CheckpointMixin: continue it by "
                "lohan_fx.resume(model, optimizer, ...) and the loop that made it"
            )
        with TemporaryDirectory(prefix="lohan_fx_trainer_") as folder:
            Path(folder, STATE_FILE).write_text(extra[STATE])
            return super().train(folder, *args, **options)

    # --- what the Trainer asks of itself ----------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        from transformers.trainer_callback import ExportableState

        del model, trial
        self.store_flos()
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                self._note(type(callback).__name__, callback.state())
        # As TrainerState.save_to_json writes it.
        text = json.dumps(dataclasses.asdict(self.state), sort_keys=True)
        checkpoint(self.model, self.optimizer, scheduler=self.lr_scheduler, extra={STATE: text})

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
            resume(self.model, self.optimizer, scheduler=self.lr_scheduler)
            self._generators = Generators.of(random_state())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Once batches that were seen are skipped, for which generators may have been drawn from."""
        if checkpoint is not None and self._generators is not None:
            self._generators.set()
