"""micro_batches: which backward of a step is the last one, and whether the calls come in an order that is exact.

A gradient may be applied inside the backward only if no other gradient of the same step will follow. Nobody tells
the runtime, so it holds the gradients of the first step until ``step`` is called, counts that step's backwards, and
expects as many from then on; ``accumulation_steps`` given to the optimizer says it from the start. Fewer than
expected is exact (what is held is applied in ``step``) and, once, changes nothing for the steps after it; more is
refused before anything is computed, because the parameters have moved on.

Pure bookkeeping: no threads, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from lohan_fx.errors import StepError


class MicroBatches:
    """Counts forwards and backwards between two steps.

    ``states`` names everything that updates change: what must be written anew after a step that failed half-way.
    """

    def __init__(self, states: Iterable[str] = ()) -> None:
        self._states = frozenset(states)
        self._stale: set[str] = set()
        self.expected: int | None = None
        self._declared = False
        self._last = 0
        self._backwards = 0
        self._open_forwards = 0
        self._applied = False
        self._torn: str | None = None

    @property
    def applied(self) -> bool:
        """Whether updates of this step ran already, or began to."""
        return self._applied

    @property
    def backwards(self) -> int:
        """Backwards finished since the last step."""
        return self._backwards

    def declare(self, backwards: int | None) -> None:
        """Every step has so many backwards, or fewer; None: to be learned."""
        self.expected, self._declared = backwards, backwards is not None

    @property
    def last(self) -> int:
        """How many backwards the last step had; 0 where that was declared or there was none."""
        return self._last

    def resume(self, expected: int | None, last: int) -> None:
        """Go on with what was learned before a checkpoint, unless it is declared now."""
        if not self._declared:
            self.expected, self._last = expected, last

    def forward_begins(self) -> None:
        """A forward is about to run. Raises ``StepError`` where its gradients could not be added to this step's."""
        self._refuse_torn()
        if self._applied:
            raise StepError(
                f"a forward was called before optimizer.step(), but this step's update already ran inside its backward "
                f"number {self._backwards} (the last step had {self.expected}): call optimizer.step() after the last "
                "backward, or say lohan_fx.AdamW(..., accumulation_steps=n) with the number of backwards per step"
            )

    def forward_opens(self) -> None:
        """A training forward ran: its backward is owed."""
        self._open_forwards += 1

    def forward_closes(self) -> None:
        """A training forward's backward ran, or its graph was dropped without one."""
        self._open_forwards = max(0, self._open_forwards - 1)

    def backward_begins(self) -> bool:
        """A backward starts. Returns whether its gradients are to be applied right away."""
        self._refuse_torn()
        if self._applied:
            raise StepError(
                "backward was called after this step's update ran inside an earlier backward: call optimizer.step() "
                "between them, or say lohan_fx.AdamW(..., accumulation_steps=n)"
            )
        return self.expected == self._backwards + 1 and self._open_forwards <= 1

    def gradient_applied(self) -> None:
        """The first gradient of an applying backward went to the optimizer: there is no way back."""
        self._applied = True

    def backward_ends(self) -> None:
        self._backwards += 1

    def backward_failed(self, why: BaseException) -> None:
        """The backward raised. If updates had begun, parameters of two steps are mixed, and nothing may go on."""
        if self._applied:
            self.update_failed(why)

    def update_failed(self, why: BaseException) -> None:
        """An update failed, or one of the step before that ran beside this forward."""
        self._torn = f"{type(why).__name__}: {why}"
        self._stale = set(self._states)

    def step_ends(self) -> None:
        """``optimizer.step()`` is done: learn how many backwards a step has."""
        if self._backwards and not self._declared:
            # One step with fewer may be the rest of an epoch: only two alike in a row are believed.
            if self._backwards >= (self.expected or 0) or self._backwards == self._last:
                self.expected = self._backwards
            self._last = self._backwards
        if self._backwards:
            # Forwards whose backward never ran: a later one would read parameters of this step, and autograd refuses it.
            self._open_forwards = 0
        self._forget_step()

    def gradients_dropped(self) -> None:
        """``zero_grad``: what is held is forgotten. Raises ``StepError`` if it has been applied already."""
        if self._applied and not self._torn:
            raise StepError(
                "zero_grad() was called between backward and optimizer.step(), but the update already ran inside the "
                "backward and cannot be taken back: call optimizer.step() first, or compile with hold_gradients=True where "
                "gradients are to be dropped"
            )
        if not self._torn:
            self._forget_step()

    @property
    def torn(self) -> bool:
        """Whether a step failed half-way, and its parameters and states have not all been written anew."""
        return self._torn is not None

    def restored(self, state: str) -> None:
        """``state`` was written anew. With the last of them nothing is torn any more."""
        self._stale.discard(state)
        if self._torn is not None and not self._stale:
            self._torn = None
            self._forget_step()

    def refuse_if_torn(self) -> None:
        self._refuse_torn()

    def refuse_if_unfinished(self, what: str) -> None:
        """Raises ``StepError`` where parameters and states are of no step: torn, or updated before ``step`` said so."""
        self._refuse_torn()
        if self._applied:
            raise StepError(
                f"{what} between backward and optimizer.step(), but the update already ran inside the backward: call "
                "optimizer.step() first"
            )

    def _forget_step(self) -> None:
        self._backwards = 0
        self._applied = False

    def _refuse_torn(self) -> None:
        if self._torn is not None:
            raise StepError(
                f"a step failed after some parameters had been updated ({self._torn}): the parameters are of two "
                f"different steps. Load model.load_state_dict and optimizer.load_state_dict of one step (not loaded yet: "
                f"{', '.join(sorted(self._stale)[:3])}{', ...' if len(self._stale) > 3 else ''}), or compile the model again"
            )
