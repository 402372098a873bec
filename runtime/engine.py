"""engine: the runtime of one compiled model: executes the ops, keeps the states, and guards the order of steps.

Guarantees: between ``step`` and the next forward everything is in place, or, where gradients are held (``updates.holds``),
is before anybody looks: a fetch waits for its parameter's update, and whoever else reads or writes states waits for all of
them. An error on any lane surfaces at the node that waits for it, or at ``step``. ``close`` ends all threads, and removes
the files unless told otherwise.

Assumes: forwards and backwards, and what reads or writes states from outside, each in ``one_call``, and ``step`` are called one
after the other, whichever threads do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lohan_fx import ops
from lohan_fx.errors import StepError
from lohan_fx.plan import Plan, Swap, Tier
from lohan_fx.runtime.activation_swap import ActivationSwap
from lohan_fx.runtime.held_gradients import HeldGradients
from lohan_fx.runtime.host_arena import HostArena
from lohan_fx.runtime.lanes import DEFAULT_TIMEOUT_S
from lohan_fx.runtime.machine import ACTIVATIONS, Machine, start_machine
from lohan_fx.runtime.memory_use import MemoryUse, held_use, resident_use
from lohan_fx.runtime.micro_batches import MicroBatches
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer
from lohan_fx.runtime.parameter_stream import ParameterStream
from lohan_fx.runtime.resident_limit import ResidentLimit, Rise
from lohan_fx.runtime.room import Room
from lohan_fx.runtime.slots import ParameterSlot, Residency
from lohan_fx.runtime.states import States
from lohan_fx.runtime.step_updates import StepUpdates
from lohan_fx.runtime.timeline import Timeline
from lohan_fx.runtime.wear import Wear
from lohan_fx.runtime.workspace import Workspace
from lohan_fx.runtime.write_back import write_back

OPTIMIZER_STATES = "optimizer states"
"""What ``restored`` calls the moments of all parameters."""
FILLING_STEPS = 2
"""After these it is known how many buffers lanes use: gradients that a first step holds are applied in the forward after it."""

_LOG = logging.getLogger(__name__)


class Engine:
    """Executes the ``lohan`` ops of one model. Made by ``compile``; set up by the first plan (``configure``).

    ``updates``: what becomes of gradients; the optimizer's hyper-parameters are there.
    ``on_stage`` is told when a training forward, a backward and the optimizer's barrier begin, and when a step ends.
    ``resident_limit`` is looked at as each fetch begins and each gradient arrives.
    ``workspace``: where graphs keep what lives no longer than they run; ``room``: what does.
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
        self.updates = StepUpdates(self.slots, self.gradients, self.micro_batches)
        self.on_stage: Callable[[str], None] = lambda stage: None
        self.resumed: Mapping[str, Any] | None = None
        self.wear = Wear(
            lambda: store.bytes_written,
            self._still_to_write,
            self._checkpoint_bytes,
            self._finish_updates,
            scratch_here=lambda: store.scratch_bytes_written,
        )
        self.resident_limit = ResidentLimit(None, lambda: None)
        self.workspace, self.room = Workspace(), Room()
        self._activation_slots: list[int] = []
        self._machine: Machine | None = None
        self._closed = self._ended = self._has_gradients = False
        self._calling = threading.RLock()
        self._process = os.getpid()
        ops.bind(self.slots, self)

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that has the threads and the files."""
        return os.getpid() != self._process

    def _refuse_if_inherited(self) -> None:
        if self.inherited:
            raise StepError(
                f"this model was compiled by process {self._process}, whose forked child, process {os.getpid()}, has neither its "
                "threads nor its files: compile a model of its own there, or lohan_fx.release(model) before the fork"
            )

    def _refuse_if_closed(self, what: str) -> None:
        if self._closed:
            raise StepError(f"{what} after the model was released, or ended by lohan_fx.reset() or an interrupt")

    # --- setting up -------------------------------------------------------------------------------------------

    def configure(
        self,
        plan: Plan,
        *,
        swap_sizes_bytes: Sequence[int],
        activation_slots: Sequence[int],
        brought_bytes: int,
        trains: bool = True,
    ) -> None:
        """Get ready to run graphs rewritten by ``plan``: host memory, lanes, places for swaps, resident parameters.
        ``swap_sizes_bytes``: of what one forward swaps to the drives.
        ``brought_bytes``: the most that lives at once of what drives bring, or what returns to host memory. ``trains``: there
        is a backward among them, whose gradients wait where the plan says.

        The first plan fixes the staging buffers, and the first that swaps to host memory how much there is for that, since it
        stays resident while the graphs of each plan run. A later one (another input shape) only adds places; what it swaps there
        beyond that goes to the drives, which is logged, and counts as wear. Raises ``StepError`` where updates of a step that is
        half done may be on their way to what is moved here.
        """
        self._refuse_if_inherited()
        self.micro_batches.forward_begins()
        if self._machine is None:
            self._machine = self._set_up(plan)
        self._machine.landing.reserve(brought_bytes)
        ops.bind(activation_slots, self)
        self._activation_slots.extend(activation_slots)
        # Each plan has counted on its own windows; where several share the runtime the narrowest keep all their promises.
        if trains:
            self._optimizer.narrow(plan.windows.gradient_bytes)
        if any(isinstance(a.decision, Swap) for a in plan.activations):
            self._swap.leaving.narrow(plan.windows.swap_out_bytes)
        to_drives_bytes = self._provide_arena(self._machine, _arena_bytes(plan))
        self._swap.prepare(plan.forwards * list(swap_sizes_bytes))
        self.updates.finish_updates()
        self.states.apply_homes(plan, self.device)
        if trains:
            self.gradients.apply_plan(plan, self.device)
        if plan.prediction is not None:
            self.wear.expect(plan.prediction.nvme_write_bytes + to_drives_bytes)

    def _provide_arena(self, machine: Machine, nbytes: int) -> int:
        """Have host memory for ``nbytes`` of activations, unless there is some already; how many have no place in it."""
        if nbytes and not self._arena.nbytes:
            self._arena.provide(machine.reserve_activations(nbytes))
        lacking_bytes = max(0, nbytes - self._arena.nbytes)
        if lacking_bytes:
            _LOG.warning(
                "this plan swaps %d bytes to host memory, which has room for the %d of an earlier one: up to %d go to "
                "the drives in each step, which no prediction counts; lohan_fx.prepare(model, ...) the largest inputs "
                "first, or say compile(forwards=...)",
                nbytes, self._arena.nbytes, lacking_bytes,
            )  # fmt: skip
        return lacking_bytes

    def _set_up(self, plan: Plan) -> Machine:
        windows = plan.windows
        machine = start_machine(self.store, self.device, self.timeline, windows)
        self._arena = HostArena(None)
        self._swap = ActivationSwap(machine, self._arena)
        self._optimizer = OutOfCoreOptimizer(
            machine,
            self.slots,
            self.residency,
            chunk_elements=windows.chunk_elements,
            window_bytes=windows.gradient_bytes,
        )
        self.updates.connect(self._optimizer, machine.turns, shares_memory=machine.link.shares_memory)
        self._stream = ParameterStream(machine, self.slots, self.residency, self._optimizer.pending)
        return machine

    def close(self, *, remove: bool = True, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """End the threads, free the memory, close the store and remove its files. Idempotent.

        Raises ``LaneTimeout`` if threads or store do not end within ``timeout_s`` each; then ``close`` may be called again.
        """
        if self._ended:
            return
        self._closed = True
        ops.unbind([*self.slots, *self._activation_slots])
        try:
            if self._machine is not None:
                self._machine.close(timeout_s)
        finally:
            self.workspace.give_back()
            self.room.close()
            self.store.close(remove=remove, timeout_s=timeout_s)
        self._ended = True

    # --- the ops ----------------------------------------------------------------------------------------------

    def fetch(self, shell: torch.Tensor, slot: int) -> torch.Tensor:
        del shell
        self.resident_limit.look((ops.FETCH, slot))
        return self._stream.fetch(slot)

    def swap_out(self, x: torch.Tensor, slot: int, tier: str) -> torch.Tensor:
        del slot
        return self._swap.swap_out(x, tier)

    def swap_in(self, handle: torch.Tensor, slot: int) -> torch.Tensor:
        del slot
        return self._swap.swap_in(handle)

    def offload_grad(self, g: torch.Tensor, slot: int) -> None:
        self.resident_limit.look((ops.OFFLOAD_GRAD, slot))
        self.updates.take(slot, g)

    # --- the order of a step ----------------------------------------------------------------------------------

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """Around a call of the model, with what is captured for it, a backward, ``step``, and whatever else reads or writes
        parameters, states or held gradients: another thread's waits."""
        self._refuse_if_inherited()
        with self._calling:
            yield

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Around a forward graph."""
        self._refuse_if_inherited()
        self.micro_batches.forward_begins()
        if training:
            self.wear.step_begins(self.updates.step, goes_on=self.micro_batches.backwards > 0)
            self.on_stage("forward")
            self.updates.forward_begins()
        self.updates.make_way()
        try:
            with ops.expecting(), self._on_the_clock("forward"):
                yield
        except BaseException as error:
            self.updates.failed(error)
            raise
        if training:
            self.micro_batches.forward_opens()

    @contextmanager
    def backward(self, reached: Collection[int]) -> Iterator[None]:
        """Around a backward graph, which gives the slots ``reached`` a gradient."""
        self._refuse_if_inherited()
        with self.updates.backward(reached):
            self.on_stage("backward")
            self._has_gradients = True
            self.updates.settle_held()
            # Now, because after the first update a failed activation would leave the step half done.
            self._swap.raise_failure()
            with ops.expecting(), self._on_the_clock("backward"):
                yield

    @contextmanager
    def _on_the_clock(self, label: str) -> Iterator[None]:
        """Count the block as work of the compute lane, without the time it waited for other lanes."""
        start_s, stalled_s = time.perf_counter(), self.timeline.stall_s
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.timeline.record("compute", label, start_s, end_s, idle_s=self.timeline.stall_s - stalled_s)

    def step(self, counted: Callable[[], None] = lambda: None) -> Collection[int]:
        """Finish the step (``updates.finish_step``); the slots that were updated. ``counted`` is called where it is done, also
        if Ctrl-C keeps what follows from running."""
        # Lanes, which are in no such mode, write what is made here.
        with self.one_call(), torch.inference_mode(False):
            self._refuse_if_closed("step() was called")
            self.micro_batches.refuse_if_torn()
            if self._machine is None:
                counted()
                return ()
            self.on_stage("optimizer")
            updated = self.updates.finish_step(counted)
            self.wear.step_ends(self._written_by_updates(updated))
            self.on_stage("end")
            return updated

    def drop_gradients(self) -> None:
        """``zero_grad``: forget the gradients that are held, which ends a step that is skipped. Raises ``StepError`` where they
        have been applied already."""
        with self.one_call():
            held = self.updates.holds_any()
            self.updates.drop()
            if held:
                self.wear.step_ends()

    def _still_to_write(self) -> int:
        """Most bytes that the updates which ``step`` began may yet write."""
        return self._written_by_updates(self.updates.pending())

    def _written_by_updates(self, slots: Iterable[int]) -> int:
        return sum(self.states.written_by_update(slot) for slot in slots)

    def _finish_updates(self) -> None:
        with self.one_call():
            self.updates.finish_updates()

    def _checkpoint_bytes(self) -> int:
        """What a checkpoint would write of the states that are in memory."""
        return 0 if self.store.is_temporary else self.states.written_back_bytes()

    def before_reading(self) -> None:
        """Before parameters or states are read from outside. Raises ``StepError`` where a step is half done, or all is over."""
        self._refuse_if_inherited()
        self._refuse_if_closed("parameters or optimizer states were read")
        self.micro_batches.refuse_if_unfinished("parameters or optimizer states were read")
        self._drain()

    def write_back(self) -> None:
        """Before a checkpoint, and after ``before_reading``: have all states in the store."""
        if self._machine is not None:
            write_back(self._machine, self.slots, self.residency)

    def before_writing(self) -> None:
        """Before they are written from outside, which a torn step needs and one that only lacks ``step`` forbids."""
        self._refuse_if_inherited()
        self._refuse_if_closed("parameters or optimizer states were loaded")
        if not self.micro_batches.torn:
            self.micro_batches.refuse_if_unfinished("parameters or optimizer states were loaded")
            self._drain()
        else:
            self.updates.settle()

    def restored(self, state: str) -> None:
        """``state`` (the extent of a master, or ``OPTIMIZER_STATES``) was written from outside."""
        torn = self.micro_batches.torn
        self.micro_batches.restored(state)
        if torn and not self.micro_batches.torn:
            self.updates.forget()

    def let_go(self) -> None:
        """Before the end: wait until nothing is under way, whatever has become of it."""
        self._refuse_if_inherited()
        with contextlib.suppress(Exception):  # then the step is torn, which the caller asks for
            self.updates.finish_updates()
        self.updates.settle()

    def _drain(self) -> None:
        if self._machine is not None:
            self.updates.finish_updates()
            self._machine.drain()

    def swapped_out(self) -> int:
        """Activations that are away now (0 between steps)."""
        return self._swap.away if self._machine is not None else 0

    def return_free_memory(self) -> None:
        """Give memory that the runtime keeps for later back to the system. By the thread that runs the graphs."""
        self.room.return_free_memory()
        if self._machine is not None:
            self._machine.landing.return_free_memory()

    def free_bytes(self) -> int:
        """How much ``return_free_memory`` gives back. Any thread."""
        return self.room.free_bytes() + (self._machine.landing.free_bytes() if self._machine is not None else 0)

    def growth_bytes(self, rise: Rise) -> int:
        """By how much the process grows as graphs take ``rise``, if one stretch of each room takes all of it. Any thread."""
        brought = (
            self._machine.landing.growth_bytes(rise.brought_bytes) if self._machine is not None else rise.brought_bytes
        )
        return rise.heap_bytes + brought + self.room.growth_bytes(rise.outliving_bytes)

    def coming_bytes(self) -> int:
        """By how much the process grows as what is being read arrives; while it is not known yet how many of their buffers the
        lanes use, by the others too. Any thread."""
        if self._machine is None:
            return 0
        coming_bytes = self._machine.landing.coming_bytes()
        return coming_bytes + (self._machine.pool.unused_bytes() if self._fills_buffers() else 0)

    def _fills_buffers(self) -> bool:
        """Whether these are the first steps."""
        return self._has_gradients and self.updates.finished < FILLING_STEPS

    def memory_use(self) -> MemoryUse:
        """What is in host memory now. Any thread."""
        parameters, states = resident_use(self.residency)
        if self._machine is None:
            return MemoryUse(parameter_bytes=parameters, state_bytes=states)
        places = self._machine.places()
        leaving_bytes = self.updates.window_used if self._machine.link.shares_memory else 0
        held_bytes, in_room_bytes = held_use(self.residency, self.updates.leaving(), self.room.place())
        return MemoryUse(
            staging=tuple(place for purpose, place in places.items() if purpose != ACTIVATIONS),
            landing=(self._machine.landing.place(),),
            swapped=tuple(place for purpose, place in places.items() if purpose == ACTIVATIONS),
            workspace=(self.workspace.place(), self.room.place()),
            parameter_bytes=parameters,
            state_bytes=states,
            gradient_bytes=held_bytes + leaving_bytes,
            # What a graph hands over lies where it was made; nearly all gradients have a place.
            gradient_workspace_bytes=in_room_bytes + (leaving_bytes if self.room.place()[1] else 0),
        )


def slots_by_name(slots: Mapping[int, ParameterSlot]) -> dict[str, ParameterSlot]:
    """The slots by the parameter's name in the model."""
    return {slot.name: slot for slot in slots.values()}


def _arena_bytes(plan: Plan) -> int:
    """What ``plan`` swaps to host memory, each on pages of its own."""
    return plan.forwards * sum(a.bytes + 4096 for a in plan.activations if a.decision == Swap(Tier.HOST))
