"""step_updates: what becomes of the gradients of a step: applied in the backward that made them, or held until ``step``.

Guarantees: a gradient is applied in the backward only where no other one of the same step follows (``micro_batches``), and
nothing asks for gradients in between (``holds``). What is held is applied by ``finish_step``, with what the hyper-parameters
are then. An update that fails tears the step, also where it runs beside the next forward.

Assumes: as ``engine``, one call at a time, and calls in the order of a training loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch

from lohan_fx.errors import StepError
from lohan_fx.runtime.adam import AdamOptions
from lohan_fx.runtime.chunk_update import Purpose
from lohan_fx.runtime.held_gradients import HeldGradients
from lohan_fx.runtime.interrupts import interrupt_waits
from lohan_fx.runtime.micro_batches import MicroBatches
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer
from lohan_fx.runtime.slots import ParameterSlot
from lohan_fx.runtime.turns import Turns

Options = Callable[[int], AdamOptions | None]
"""slot -> the hyper-parameters of its update now; None where the optimizer was not given that parameter."""


class StepUpdates:
    """The updates of the step under way, of all parameters of one model.

    ``options`` is the optimizer's; ``applied_with`` are the hyper-parameters of the updates of the step under way, ``dropped``
    the slots of which a gradient came while the optimizer lacked them, ``unkept`` those of earlier steps, where autograd would
    have added to them until the model's ``zero_grad``.
    ``holds``: gradients wait until ``step``, and the updates then run beside the next forward (docs/0014). ``step`` counts
    the steps whose gradients were applied or dropped, ``finished`` those of them that ``finish_step`` has ended: what a forward
    has kept may have a backward after ``drop``.
    """

    def __init__(
        self, slots: Mapping[int, ParameterSlot], gradients: HeldGradients, micro_batches: MicroBatches
    ) -> None:
        self._slots = slots
        self._gradients = gradients
        self._micro_batches = micro_batches
        self.options: Options | None = None
        self.applied_with: dict[int, AdamOptions] = {}
        self.holds = False
        self.step = 0
        self.finished = 0
        self.dropped: set[int] = set()
        self.unkept: set[int] = set()
        self._taken: dict[int, None] = {}
        self._reached: Collection[int] = frozenset()
        self._applying = self._holding = False
        self._optimizer: OutOfCoreOptimizer | None = None
        self._turns: Turns[int] = Turns()
        self._in_place = False

    def connect(self, optimizer: OutOfCoreOptimizer, turns: Turns[int], *, shares_memory: bool) -> None:
        """What updates is there, and its machine's ``turns``. ``shares_memory``: host and device have one, so that a gradient
        can be held as it is."""
        self._optimizer, self._turns = optimizer, turns
        self._in_place = shares_memory

    # --- a step's gradients arrive ----------------------------------------------------------------------------

    def forward_begins(self) -> None:
        self._turns.forward_begins()

    def make_way(self) -> None:
        """Before a forward that comes before ``step``: the plan has no room there for all that the last backward left on the
        device and that is on its way."""
        if self._optimizer is not None:
            self._optimizer.let_leave(self._gradients.spare_bytes)

    @contextmanager
    def backward(self, reached: Collection[int]) -> Iterator[None]:
        """Around a backward that gives the slots ``reached`` a gradient: one that gives none is no part of the step.

        Raises ``StepError`` where its gradients could not be applied to this step.
        """
        if reached and self.options is None:
            raise StepError(
                "backward was called before there is an optimizer for the offloaded parameters: create "
                "lohan_fx.AdamW(model.parameters(), ...) first; an optimizer of torch.optim cannot update them"
            )
        if reached and self._gradients.scaled():
            raise StepError(
                "backward was called after the gradients of this step were clipped or unscaled: clip after the last backward, "
                "and call optimizer.step(), or zero_grad() where a step is skipped, before the next one"
            )
        self._turns.end()
        self._applying = self._micro_batches.backward_begins()
        self._reached = frozenset(reached)
        try:
            yield
        except BaseException as error:
            self._micro_batches.backward_failed(error)
            self.failed(error)
            raise
        finally:
            self._applying = False
            self._micro_batches.forward_closes()
        if reached:
            self._micro_batches.backward_ends()

    def settle_held(self) -> None:
        """Before a backward: what is held may be on its way to NVMe, and this one's gradients are added to it."""
        if self._holding:
            self._ready().barrier()

    def take(self, slot: int, gradient: torch.Tensor) -> None:
        """The gradient of ``slot`` is there."""
        if slot not in self._reached:
            return
        assert self.options is not None
        # The gradient before this one is given up with the states that still come of it.
        self._ready().finish_repeating(slot)
        self._taken.setdefault(slot)
        options = self.options(slot)
        if options is None or slot in self.dropped:
            self.dropped.add(slot)
            return
        deferred = self.holds or self._gradients.deferred(slot)
        if self._applying and not deferred and not self._gradients.applied_late(slot):
            self._micro_batches.gradient_applied()
            self.applied_with[slot] = options
            self._ready().offer(slot, gradient, Purpose.APPLY, options)
            return
        self._holding = True
        expected = self._micro_batches.expected
        measures = (self.holds or expected is None) and expected in (None, 1)
        alone = deferred and expected == 1
        if not self._gradients.take_in(slot, gradient, alone=alone, measures=measures, in_place=self._in_place):
            self._ready().offer(slot, gradient, Purpose.HOLD, None)

    # --- between the last backward and ``step`` ---------------------------------------------------------------

    def holds_any(self) -> bool:
        """Whether there are gradients that ``step`` has not counted yet."""
        return not self._micro_batches.torn and (self._micro_batches.applied or self._holding)

    def waits(self, slot: int) -> bool:
        """Whether there is a gradient of ``slot`` that waits for ``step``. Raises ``StepError`` where there was one, and it
        has been applied already, and ``ValueError`` where the optimizer was not given the parameter."""
        if self._micro_batches.torn:
            return False
        if slot in self.dropped:
            raise ValueError(
                f"the gradient of {self._slots[slot].name} was asked for, and is not kept, because the optimizer was not given "
                "that parameter: give it to the optimizer, or freeze it by requires_grad_(False) before compile"
            )
        if self._micro_batches.applied and not self._gradients.holds(slot):
            raise StepError(
                f"the gradient of {self._slots[slot].name} was asked for, but it went to the optimizer inside the backward: to "
                "clip, unscale or read gradients, compile with lohan_fx.compile(..., hold_gradients=True)"
            )
        return self._gradients.holds(slot)

    def settled_gradients(self, *, hold_from_now_on: bool = True, of_step: int | None = None) -> HeldGradients:
        """What is held, once all of it is in place; from now on all steps hold their gradients. Raises ``StepError`` where
        the gradients ``of_step`` were asked for, and are applied or dropped by now."""
        if of_step not in (None, self.step):
            raise StepError(
                "a gradient was asked for that is applied or dropped by now: ask between backward and optimizer.step()"
            )
        self.holds = self.holds or hold_from_now_on
        self._ready().barrier()
        return self._gradients

    def drop(self) -> None:
        """Forget the gradients that are held. Raises ``StepError`` where they have been applied already."""
        self._micro_batches.gradients_dropped()
        if self._holding:
            self.finish_updates()
            # A failure to hold them is forgotten with them: no parameter has changed.
            self.settle()
        if not self._micro_batches.torn:
            self.forget()

    def drop_one(self, slot: int) -> None:
        """Forget the gradient of ``slot`` alone, as if this step's backwards had not reached it. Raises ``StepError`` where it
        has been applied already."""
        if self._micro_batches.torn:
            return
        self.dropped.discard(slot)
        self.unkept.discard(slot)
        if slot in self.applied_with:
            self._micro_batches.gradients_dropped()
        if not self._gradients.holds(slot):
            return
        self._ready().barrier()
        self._gradients.forget_one(slot)
        if not any(map(self._gradients.holds, self._slots)) and not self.applied_with:
            self.drop()

    # --- ``step``, and after it -------------------------------------------------------------------------------

    def finish_step(self, counted: Callable[[], None]) -> Collection[int]:
        """Apply what is held, and wait until all is in place; the slots that were updated. ``counted`` is called at the end,
        and Ctrl-C lets that and what else makes the step's end be done, or nothing of it.

        Where gradients are held anyway, or the plan says so of a parameter, updates are only begun, in the order in which
        the next forward will want the parameters; what they are made of is fixed here. May be called again if it was
        interrupted while it waited; interrupted in an update, it tears the step.
        """
        assert self.options is not None
        optimizer = self._ready()
        try:
            optimizer.barrier()
            # Also after an update in the backward: that of another micro-batch may have reached more parameters.
            now, later = self._to_apply()
            if now or later:
                optimizer.let_compute_end()
            self._apply(now)
            if now:
                optimizer.barrier()
            if later:
                self._turns.begin()
            self._apply(later)
            self._repeat()
        except Exception as error:
            self._micro_batches.backward_failed(error)
            self.failed(error)
            raise
        with interrupt_waits():
            updated = list(self.applied_with)
            self.forget()
            self.finished += 1
            self._micro_batches.step_ends()
            counted()
        return updated

    def _apply(self, held: Iterable[int]) -> None:
        assert self.options is not None
        for slot in held:
            options = self.options(slot)
            if options is not None:
                self._micro_batches.gradient_applied()
                self.applied_with[slot] = options
                # Not torn by Ctrl-C where lanes are to update: they have all or nothing of it.
                held_back = nullcontext() if self._ready().updated_here(slot) else interrupt_waits()
                with held_back, self._torn_if_interrupted():
                    self._ready().apply_held(slot, options, twice=self._gradients.updated_twice(slot))

    def _repeat(self) -> None:
        """Begin the second time of updates that are made twice, in the order in which their next gradients will come."""
        with interrupt_waits(), self._torn_if_interrupted():
            self._ready().repeat(self._taken)
        self._taken.clear()

    @contextmanager
    def _torn_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Also of Ctrl-C: how far an update on this thread had come, nobody could tell the next call.
            self._micro_batches.update_failed(error)
            raise

    def _to_apply(self) -> tuple[list[int], list[int]]:
        """The slots whose gradients are held: those whose updates ``step`` waits for, and those that it only begins, as
        the forward wanted them: first those for which lanes work, then those that this thread updates at once meanwhile."""
        held = [slot for slot in self._slots if self._gradients.holds(slot)]
        order = self._turns.places()
        held.sort(key=lambda slot: (self._ready().updated_here(slot), order.get(slot, len(order))))
        later = {slot for slot in held if self.holds or self._gradients.deferred(slot)}
        return [slot for slot in held if slot not in later], [slot for slot in held if slot in later]

    def pending(self) -> list[int]:
        """The slots whose updates ``finish_step`` began and that are not in place."""
        optimizer = self._optimizer
        return [] if optimizer is None else [slot for slot in self._slots if optimizer.is_pending(slot)]

    def finish_updates(self) -> None:
        """Wait for the updates that ``finish_step`` began."""
        if self._optimizer is None:
            return
        try:
            self._optimizer.finish_updates()
        except BaseException as error:
            self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """Where an update of the step before is among what failed, parameters of two steps are mixed."""
        if self._optimizer is not None and self._optimizer.update_failed():
            self._micro_batches.update_failed(error)

    @property
    def window_used(self) -> int:
        """Bytes of gradients on the device that were offered and have not left it. Any thread."""
        return 0 if self._optimizer is None else self._optimizer.window_used

    def leaving(self) -> list[torch.Tensor | None]:
        """Where the gradients lie that were held and whose updates wait. Any thread."""
        return [] if self._optimizer is None else self._optimizer.leaving()

    def settle(self) -> None:
        """Wait until nothing is under way, whatever has become of it, and forget what failed."""
        if self._optimizer is not None:
            self._optimizer.settle()

    def forget(self) -> None:
        """The gradients of this step are applied, on their way to be, or dropped."""
        self._gradients.forget()
        self.step += 1
        self.unkept |= self.dropped
        self.dropped.clear()
        self.applied_with.clear()
        self._holding = False

    def _ready(self) -> OutOfCoreOptimizer:
        assert self._optimizer is not None, "a gradient came before the first plan"
        return self._optimizer
