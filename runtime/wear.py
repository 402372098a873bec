"""wear: bytes written to the drives over a training's life, which is what flash dies of, held against a budget.

Counts what the store wrote, in this process and, after a resume, up to the checkpoint; what a killed process wrote after
its last checkpoint is not known any more. Pure bookkeeping: no threads, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable

from lohan_fx.errors import WearBudgetExceeded


class Wear:
    """``written_here`` tells what this process has written, ``to_come`` at most how much of the last step it has yet to
    write, ``settle`` waits until that is written, ``checkpoint_bytes`` what a checkpoint would write, ``scratch_here`` what of
    ``written_here`` was neither parameters nor states; ``max_bytes`` None: no budget."""

    def __init__(
        self,
        written_here: Callable[[], int],
        to_come: Callable[[], int] = lambda: 0,
        checkpoint_bytes: Callable[[], int] = lambda: 0,
        settle: Callable[[], None] = lambda: None,
        *,
        scratch_here: Callable[[], int] = lambda: 0,
    ) -> None:
        self.max_bytes: int | None = None
        self.earlier_bytes = 0
        self._written_here = written_here
        self._to_come = to_come
        self._checkpoint_bytes = checkpoint_bytes
        self._settle = settle
        self._scratch_here = scratch_here
        self._step_bytes = 0
        self._step = 0
        self._step_began_at: int | None = None

    @property
    def written_bytes(self) -> int:
        """All that was written since the training began."""
        return self.earlier_bytes + self._written_here()

    @property
    def step_bytes(self) -> int:
        """What the next step may write: as much as any so far, or as predicted."""
        return self._step_bytes

    def expect(self, step_bytes: int) -> None:
        """A plan predicts so much per step."""
        self._step_bytes = max(self._step_bytes, step_bytes)

    def refuse_to_store(self, nbytes: int) -> None:
        """So much is about to be written before the first step. Raises ``WearBudgetExceeded`` where that is too much."""
        if self.max_bytes is not None and self.written_bytes + nbytes > self.max_bytes:
            raise self.exceeded(f"not even the model's {nbytes:,} bytes can be stored, and nothing was written")

    def step_begins(self, step: int = 0, *, goes_on: bool = False) -> None:
        """A training forward is about to run, when ``step`` steps were done or dropped; ``goes_on``: a backward of its own step
        came before. Raises ``WearBudgetExceeded`` where its step may not, or could not end in two checkpoints, the stop's and one
        of the caller's own: those that the caller has made since the last step took their room."""
        if step != self._step and not goes_on:
            # Not when gradients are dropped: forwards may come before zero_grad(), and their backwards after it.
            self.step_ends()
        if self._step_began_at is None:
            if self.is_spent(checkpoints=2):
                raise self.exceeded("nothing was written")
            self._step, self._step_began_at = step, self._scratch_here()

    def step_ends(self, updates_bytes: int = 0) -> None:
        """It is done, and its updates, which may run beside the next forward, write ``updates_bytes``; or it was skipped."""
        began_at = self._scratch_here() if self._step_began_at is None else self._step_began_at
        self.expect(self._scratch_here() - began_at + updates_bytes)
        self._step_began_at = None

    def is_spent(self, *, checkpoints: int) -> bool:
        """Whether the next step, and so many ``checkpoints``, would write more than there may be."""
        if self.max_bytes is None:
            return False
        rest_bytes = self.max_bytes - self._step_bytes - checkpoints * self._checkpoint_bytes()
        if self._to_come() + self.written_bytes > rest_bytes and self._to_come():
            self._settle()  # an update of which half is written counts as written and, whole, as yet to be
        return self._to_come() + self.written_bytes > rest_bytes

    def exceeded(self, outcome: str, checkpoint: int | None = None) -> WearBudgetExceeded:
        """What to raise; ``outcome`` says what has become of the training."""
        assert self.max_bytes is not None
        return WearBudgetExceeded(
            f"{self.written_bytes:,} bytes were written to the drives since the training began, the next step may write "
            f"{self._step_bytes:,}, and max_bytes_written is {self.max_bytes:,}: {outcome}; compile with more to go on",
            bytes_written=self.written_bytes,
            max_bytes=self.max_bytes,
            checkpoint=checkpoint,
        )
