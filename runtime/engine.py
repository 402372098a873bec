"""engine: the runtime of one compiled model: executes the ops, keeps the states, and guards the order of steps.

Guarantees: between ``step`` and the next forward everything is in place, or, where gradients are held (``holds``), is
before anybody looks: a fetch waits for its parameter's update, and whoever else reads or writes states waits for all of
them. An error on any lane surfaces at the node that waits for it, or at ``step``. ``close`` ends all threads, and removes
the files unless told otherwise.

Assumes: forwards, backwards and ``step`` are called one after the other (by one thread, as in any training loop).
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lohan_fx import ops
from lohan_fx.errors import StepError
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.runtime.activation_swap import ActivationSwap
from lohan_fx.runtime.adam import AdamOptions
from lohan_fx.runtime.chunk_update import Purpose
from lohan_fx.runtime.device_link import link_to
from lohan_fx.runtime.held_gradients import HeldGradients
from lohan_fx.runtime.host_arena import HostArena
from lohan_fx.runtime.host_pool import HostPool, Reservation
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S, Lane
from lohan_fx.runtime.machine import Machine, use_threads
from lohan_fx.runtime.micro_batches import MicroBatches
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer
from lohan_fx.runtime.parameter_stream import ParameterStream
from lohan_fx.runtime.resident_limit import ResidentLimit
from lohan_fx.runtime.slots import ParameterSlot, Residency
from lohan_fx.runtime.state_buffer import buffer_bytes
from lohan_fx.runtime.states import States
from lohan_fx.runtime.timeline import Timeline
from lohan_fx.runtime.wear import Wear

SSD_THREADS = 3
OTHER_THREADS = 2
"""Beside a GPU the optimizer takes all cores but these: Python's own thread and the copies."""

Options = Callable[[int], AdamOptions | None]
"""slot -> the hyper-parameters of its update now; None where the optimizer was not given that parameter."""

OPTIMIZER_STATES = "optimizer states"
"""What ``restored`` calls the moments of all parameters."""


class Engine:
    """Executes the ``lohan`` ops of one model. Made by ``compile``; set up by the first plan (``configure``).

    ``options`` is the optimizer's; ``applied_with`` are the hyper-parameters of the updates of the step under way.
    ``on_stage`` is told when a training forward, a backward and the optimizer's barrier begin, and when a step ends.
    ``holds``: gradients wait until ``step``, and the updates then run beside the next forward (docs/0014).
    ``resident_limit`` is looked at as each fetch begins and each gradient arrives.
    ``resumed`` is what a checkpoint holds of the training until ``lohan_fx.resume`` has taken it over.
    """

    def __init__(self, slots: Sequence[ParameterSlot], store: NvmeStore, device: torch.device) -> None:
        self.slots = {slot.slot: slot for slot in slots}
        self.store = store
        self.device = device
        self.timeline = Timeline()
        self.residency = {slot: Residency() for slot in self.slots}
        trained = [slot.master_extent for slot in slots if slot.trainable]
        self.micro_batches = MicroBatches([*trained, OPTIMIZER_STATES] if trained else [])
        self.states = States(store, self.slots, self.residency)
        self.gradients = HeldGradients(self.states, self.slots, self.residency)
        self.options: Options | None = None
        self.applied_with: dict[int, AdamOptions] = {}
        self.on_stage: Callable[[str], None] = lambda stage: None
        self.holds = False
        self.resumed: Mapping[str, Any] | None = None
        self.wear = Wear(lambda: store.bytes_written)
        self.resident_limit = ResidentLimit(None, lambda: None)
        self._activation_slots: list[int] = []
        self._fetched: dict[int, None] = {}
        self._applying = self._holding = False
        self._machine: Machine | None = None
        self._closed = False
        ops.bind(self.slots, self)

    # --- setting up -------------------------------------------------------------------------------------------

    def configure(self, plan: Plan, *, swap_sizes_bytes: Sequence[int], activation_slots: Sequence[int]) -> None:
        """Get ready to run graphs rewritten by ``plan``: host memory, lanes, places for swaps, resident parameters.

        The first plan fixes the staging buffers; a later one (another input shape) only adds places.
        """
        if self._machine is None:
            self._set_up(plan)
        ops.bind(activation_slots, self)
        self._activation_slots.extend(activation_slots)
        self._swap.prepare(sorted(swap_sizes_bytes))
        self._finish_updates()
        self.states.apply_homes(plan, self.device)
        self.gradients.apply_plan(plan, self.device)
        if plan.prediction is not None:
            self.wear.expect(plan.prediction.nvme_write_bytes)

    def _set_up(self, plan: Plan) -> None:
        windows = plan.windows
        arena_bytes = sum(a.bytes + 4096 for a in plan.activations if a.decision == Swap(Tier.HOST))
        pool = HostPool(
            {
                "fetch": Reservation(windows.io_buffers, windows.io_bytes),
                "swap_in": Reservation(windows.io_buffers, windows.io_bytes),
                "swap_out": Reservation(windows.io_buffers, windows.io_bytes),
                "gradients": Reservation(windows.optimizer_buffers, 4 * windows.chunk_elements),
                "optimizer": Reservation(windows.optimizer_buffers, buffer_bytes(windows.chunk_elements)),
                "activations": Reservation(1 if arena_bytes else 0, arena_bytes),
            },
            pin=self.device.type == "cuda",
        )
        # A lane's copies use one thread each: the compute threads keep the cores. So does Adam, unless a GPU computes.
        one_thread = functools.partial(use_threads, 1)
        adam_threads = 1 if self.device.type == "cpu" else max(1, (os.cpu_count() or 1) - OTHER_THREADS)
        compute_threads = torch.get_num_threads()
        self._machine = Machine(
            store=self.store,
            pool=pool,
            link=link_to(self.device),
            timeline=self.timeline,
            ssd=Lane("ssd", threads=SSD_THREADS, initializer=one_thread),
            h2d=Lane("h2d", initializer=one_thread),
            d2h=Lane("d2h", initializer=one_thread),
            cpu=Lane("cpu", initializer=functools.partial(use_threads, adam_threads)),
            io_bytes=windows.io_bytes,
        )
        # What a thread says is partly said for the process (MKL, threads started later): the last word is ours.
        torch.set_num_threads(compute_threads)
        self._swap = ActivationSwap(self._machine, HostArena(pool.acquire("activations") if arena_bytes else None))
        self._optimizer = OutOfCoreOptimizer(
            self._machine,
            self.slots,
            self.residency,
            chunk_elements=windows.chunk_elements,
            window_bytes=windows.gradient_bytes,
        )
        self._stream = ParameterStream(self._machine, self.slots, self.residency, self._optimizer.pending)

    def close(self, *, remove: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """End the threads, free the memory, close the store and remove its files. Idempotent.

        Raises ``LaneTimeout`` if threads or store do not end within ``timeout_s`` each.
        """
        if self._closed:
            return
        self._closed = True
        ops.unbind([*self.slots, *self._activation_slots])
        try:
            if self._machine is not None:
                self._machine.close(timeout_s)
        finally:
            self.store.close(remove=remove, timeout_s=timeout_s)

    # --- the ops ----------------------------------------------------------------------------------------------

    def fetch(self, shell: torch.Tensor, slot: int) -> torch.Tensor:
        del shell
        self._fetched.setdefault(slot)
        self.resident_limit.look()
        return self._stream.fetch(slot)

    def swap_out(self, x: torch.Tensor, slot: int, tier: str) -> torch.Tensor:
        del slot
        return self._swap.swap_out(x, tier)

    def swap_in(self, handle: torch.Tensor, slot: int) -> torch.Tensor:
        del slot
        return self._swap.swap_in(handle)

    def offload_grad(self, g: torch.Tensor, slot: int) -> None:
        assert self.options is not None
        self.resident_limit.look()
        options = self.options(slot)
        if options is None:
            return
        if self._applying and not self.holds and not self.gradients.applied_late(slot):
            self.micro_batches.gradient_applied()
            self.applied_with[slot] = options
            self._optimizer.offer(slot, g, Purpose.APPLY, options)
            return
        self._holding = True
        expected = self.micro_batches.expected
        measures = (self.holds or expected is None) and expected in (None, 1)
        in_place = self._machine is not None and self._machine.link.shares_memory
        alone = self.holds and expected == 1
        if not self.gradients.take_in(slot, g, alone=alone, measures=measures, in_place=in_place):
            self._optimizer.offer(slot, g, Purpose.HOLD, None)

    # --- the order of a step ----------------------------------------------------------------------------------

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Around a forward graph."""
        self.micro_batches.forward_begins()
        if training:
            self.wear.step_begins()
            self.on_stage("forward")
            self._fetched.clear()
        try:
            with ops.expecting(), self._on_the_clock("forward"):
                yield
        except BaseException as error:
            self._failed(error)
            raise
        if training:
            self.micro_batches.forward_opens()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward graph."""
        if self.options is None:
            raise StepError(
                "backward was called before there is an optimizer for the offloaded parameters: create "
                "lohan_fx.AdamW(model.parameters(), ...) first; an optimizer of torch.optim cannot update them"
            )
        if self.gradients.scaled():
            raise StepError(
                "backward was called after the gradients of this step were clipped or unscaled: clip after the last backward, "
                "and call optimizer.step(), or zero_grad() where a step is skipped, before the next one"
            )
        self._applying = self.micro_batches.backward_begins()
        self.on_stage("backward")
        try:
            if self._holding:
                # What is held may be on its way to NVMe; this backward's gradients are added to it.
                self._optimizer.barrier()
            # Now, because after the first update a failed activation would leave the step half done.
            self._swap.raise_failure()
            with ops.expecting(), self._on_the_clock("backward"):
                yield
        except BaseException as error:
            self.micro_batches.backward_failed(error)
            self._failed(error)
            raise
        finally:
            self._applying = False
            self.micro_batches.forward_closes()
        self.micro_batches.backward_ends()

    @contextmanager
    def _on_the_clock(self, label: str) -> Iterator[None]:
        """Count the block as work of the compute lane, without the time it waited for other lanes."""
        start_s, stalled_s = time.perf_counter(), self.timeline.stall_s
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.timeline.record("compute", label, start_s, end_s, idle_s=self.timeline.stall_s - stalled_s)

    def holds_gradients(self) -> bool:
        """Whether there are gradients that ``step`` has not counted yet."""
        return not self.micro_batches.torn and (self.micro_batches.applied or self._holding)

    def step(self) -> Collection[int]:
        """Finish the step: apply what is held, and wait until all is in place; the slots that were updated.

        Where gradients are held anyway, the updates are only begun, in the order in which the next forward will want the
        parameters; what they are made of is fixed here. May be called again if it was interrupted.
        """
        if self._closed:
            raise StepError("step() was called after the model was released: it has ordinary parameters again now")
        self.micro_batches.refuse_if_torn()
        assert self.options is not None
        if self._machine is None:
            return ()
        self.on_stage("optimizer")
        try:
            self._optimizer.barrier()
            # Also after an update in the backward: that of another micro-batch may have reached more parameters.
            for slot in self._to_apply():
                options = self.options(slot)
                if options is not None:
                    self.micro_batches.gradient_applied()
                    self.applied_with[slot] = options
                    self._optimizer.apply_held(slot, options)
            if not self.holds:
                self._optimizer.barrier()
        except Exception as error:
            self.micro_batches.backward_failed(error)
            self._failed(error)
            raise
        updated = list(self.applied_with)
        self._forget_gradients()
        self.micro_batches.step_ends()
        self.wear.step_ends()
        self.on_stage("end")
        return updated

    def _to_apply(self) -> list[int]:
        """The slots whose gradients are held: first those that are updated at once, then as the forward fetched them."""
        held = [slot for slot in self.residency if self.gradients.holds(slot)]
        order = {slot: place for place, slot in enumerate(self._fetched)}
        return sorted(held, key=lambda slot: (not self._optimizer.updated_here(slot), order.get(slot, len(order))))

    def _finish_updates(self) -> None:
        """Wait for the updates that ``step`` began."""
        if self._machine is None:
            return
        try:
            self._optimizer.finish_updates()
        except Exception as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> None:
        """Where an update of the step before is among what failed, parameters of two steps are mixed."""
        if self._machine is not None and self._optimizer.update_failed():
            self.micro_batches.update_failed(error)

    def gradient_waits(self, slot: int) -> bool:
        """Whether there is a gradient of ``slot`` that waits for ``step``. Raises ``StepError`` where there was one, and it
        has been applied already."""
        if self.micro_batches.torn:
            return False
        if self.micro_batches.applied and not self.gradients.holds(slot):
            raise StepError(
                f"the gradient of {self.slots[slot].name} was asked for, but it went to the optimizer inside the backward: to "
                "clip, unscale or read gradients, compile with lohan_fx.compile(..., hold_gradients=True)"
            )
        return self.gradients.holds(slot)

    def settled_gradients(self, *, hold_from_now_on: bool = True) -> HeldGradients:
        """What is held, once all of it is in place; from now on all steps hold their gradients."""
        self.holds = self.holds or hold_from_now_on
        self._optimizer.barrier()
        return self.gradients

    def zero_grad(self) -> None:
        """Forget the gradients that are held."""
        self.micro_batches.gradients_dropped()
        if self._machine is not None and self._holding:
            self._finish_updates()
            # A failure to hold them is forgotten with them: no parameter has changed.
            self._optimizer.settle()
        if not self.micro_batches.torn:
            self._forget_gradients()

    def before_reading(self) -> None:
        """Before parameters or states are read from outside. Raises ``StepError`` where a step is half done."""
        self.micro_batches.refuse_if_unfinished("parameters or optimizer states were read")
        self._drain()

    def before_writing(self) -> None:
        """Before they are written from outside, which a torn step needs and one that only lacks ``step`` forbids."""
        if not self.micro_batches.torn:
            self.micro_batches.refuse_if_unfinished("parameters or optimizer states were loaded")
            self._drain()
        elif self._machine is not None:
            self._optimizer.settle()

    def restored(self, state: str) -> None:
        """``state`` (the extent of a master, or ``OPTIMIZER_STATES``) was written from outside."""
        torn = self.micro_batches.torn
        self.micro_batches.restored(state)
        if torn and not self.micro_batches.torn:
            self._forget_gradients()

    def _forget_gradients(self) -> None:
        self.gradients.forget()
        self.applied_with.clear()
        self._holding = False

    def let_go(self) -> None:
        """Before the end: wait until nothing is under way, whatever has become of it."""
        with contextlib.suppress(Exception):  # then the step is torn, which the caller asks for
            self._finish_updates()
        if self._machine is not None:
            self._optimizer.settle()

    def _drain(self) -> None:
        if self._machine is not None:
            self._finish_updates()
            self._machine.drain()

    def swapped_out(self) -> int:
        """Activations that are away now (0 between steps)."""
        return self._swap.away if self._machine is not None else 0


def slots_by_name(slots: Mapping[int, ParameterSlot]) -> dict[str, ParameterSlot]:
    """The slots by the parameter's name in the model."""
    return {slot.name: slot for slot in slots.values()}
