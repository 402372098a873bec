"""held_gradients: gradients that wait for the end of their step: where, what is known of them, and reading them.

Gradients wait where updates run after the backward, where more of the same step may come, and where all of them must be
known before the first is applied (clipping, loss scaling).

Guarantees: what waits in memory stays within what the plan gave it and ``hold_bytes``; the rest waits in the store. Where a
gradient waits does not hang on timing: it decides how a norm is rounded, and so how all gradients are clipped.

Assumes: ``norm`` and ``read`` are called when everything offered is in place (the optimizer's barrier); an update has let go
of a gradient when the next one of its parameter comes (the forward waits for updates, and ``step_updates`` for second times).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from lohan_fx.errors import StepError
from lohan_fx.plan import OptimizerTiming, Plan, Tier
from lohan_fx.runtime.gradient_norm import combined, norm_of
from lohan_fx.runtime.slots import STATE_DTYPE, Held, ParameterSlot, Residency
from lohan_fx.runtime.states import States, memory_of

PIECE_BYTES = 8 << 20
"""Of a fp32 sum: what is measured, and read from the store, at once."""


class HeldGradients:
    """The gradients of the step under way, of all parameters of one model.

    ``hold_bytes``: host RAM for those that the plan says nothing of.
    """

    def __init__(self, states: States, slots: Mapping[int, ParameterSlot], residency: Mapping[int, Residency]) -> None:
        self._states = states
        self._slots = slots
        self._residency = residency
        self._placed: dict[int, dict[torch.dtype, int | None]] = {}
        self.hold_bytes = 0
        self._least_left: int | None = None
        self._left_on_device: int | None = None
        self._late: set[int] = set()
        self._deferred: set[int] = set()
        self._twice: set[int] = set()
        self._planned: dict[int, tuple[torch.device | None, int]] = {}

    # --- where ------------------------------------------------------------------------------------------------

    @property
    def hold_bytes(self) -> int:
        return self._hold_bytes

    @hold_bytes.setter
    def hold_bytes(self, nbytes: int) -> None:
        self._hold_bytes = nbytes
        self._forget_places()

    def apply_plan(self, plan: Plan, device: torch.device) -> None:
        """Note where ``plan``, of a training graph, wants each gradient to wait, and what it leaves for those that it does not
        speak of: of several plans the least, since the graphs of each may run."""
        homes = {p.name: p for p in plan.parameters}
        self._late.clear()
        self._deferred.clear()
        self._twice.clear()
        self._planned.clear()
        self._forget_places()
        for slot, parameter in self._slots.items():
            home = homes.get(parameter.name)
            if home is None or home.gradient_home is None:
                continue
            in_memory = home.gradient_home is not Tier.NVME
            self._planned[slot] = memory_of(home.gradient_home, device), home.held_bytes if in_memory else 0
            late = home.optimizer_runs is OptimizerTiming.AFTER_BACKWARD
            (self._late if late else self._deferred).add(slot)
            if home.updated_twice:
                self._twice.add(slot)
        if plan.prediction is not None:
            left = max(0, plan.host_memory_bytes - plan.prediction.peak_bytes["host"])
            self._least_left = left if self._least_left is None else min(self._least_left, left)
            self.hold_bytes = self._least_left
            if device.type != "cpu":
                left = max(0, plan.device_memory_bytes - plan.prediction.peak_bytes["device"])
                self._left_on_device = left if self._left_on_device is None else min(self._left_on_device, left)

    @property
    def spare_bytes(self) -> int:
        """Memory of the device that neither the plan nor what is held takes."""
        return max(0, self.hold_bytes - self._taken_bytes) if self._left_on_device is None else self._left_on_device

    def applied_late(self, slot: int) -> bool:
        """Whether the plan says that ``slot`` is updated in a stage after the backward."""
        return slot in self._late

    def deferred(self, slot: int) -> bool:
        """Whether the plan says that ``slot`` is updated beside the next forward."""
        return slot in self._deferred

    def updated_twice(self, slot: int) -> bool:
        """Whether the plan says that the update beside the next forward writes no states, and the backward's does."""
        return slot in self._twice

    def make_room(self, slot: int, *, alone: bool = False) -> Held:
        """See to it that a gradient of ``slot`` can be held. ``alone``: it is the only one of its step, and kept as it is."""
        parameter, resident = self._slots[slot], self._residency[slot]
        if resident.contributions:
            assert resident.held is not None
            if resident.held.dtype != STATE_DTYPE:
                resident.held = self._widened(slot, resident.held)
            elif resident.held.borrowed and resident.held.memory is not None:
                resident.held.memory, resident.held.borrowed = resident.held.memory.clone(), False
            resident.held.norms.clear()
        else:
            dtype = parameter.compute_dtype if alone and not self.applied_late(slot) else STATE_DTYPE
            resident.held = self._new(slot, dtype)
        assert resident.held is not None
        return resident.held

    def take_in(self, slot: int, gradient: torch.Tensor, *, alone: bool, measures: bool, in_place: bool) -> bool:
        """Make room for ``gradient`` and, if it ``measures``, take its norm while it is near. Returns whether it is held
        already: where host and device share memory (``in_place``) the only gradient of a step is itself what is held, if
        it is not part of something larger, which it would keep alive."""
        resident = self._residency[slot]
        first = not resident.contributions
        held = self.make_room(slot, alone=alone)
        flat = gradient.detach().reshape(-1)
        if first and measures:
            held.norms[0] = norm_of(flat)
        whole = flat.is_contiguous() and flat.untyped_storage().nbytes() == flat.numel() * flat.element_size()
        if not (first and alone and in_place and whole and held.memory is not None and held.dtype == flat.dtype):
            return False
        held.memory, held.borrowed = flat, True
        resident.contributions = 1
        return True

    def _new(self, slot: int, dtype: torch.dtype) -> Held:
        """A place for a gradient of ``slot``; its memory is not touched yet."""
        held = Held(dtype)
        if self._in_memory(slot, dtype):
            held.memory = torch.empty(self._slots[slot].numel, dtype=dtype, device=self._plan_of(slot)[0])
        else:
            self._states.allocate_gradient(slot)
        return held

    def _plan_of(self, slot: int) -> tuple[torch.device | None, int]:
        """Which memory the plan has for gradients of ``slot``, and how much of it; where it says nothing, that of the states,
        which meet them."""
        master = self._residency[slot].master
        return self._planned.get(slot, (torch.device("cpu") if master is None else master.device, 0))

    def _in_memory(self, slot: int, dtype: torch.dtype) -> bool:
        """Whether a gradient of ``slot`` waits in memory, decided once for a plan and ``hold_bytes``: what came first stays."""
        memory, planned_bytes = self._plan_of(slot)
        placed = self._placed.setdefault(slot, {})
        if dtype not in placed:
            more = max(0, self._slots[slot].numel * dtype.itemsize - planned_bytes)
            here = [nbytes for nbytes in placed.values() if nbytes is not None]
            # While a gradient is widened both are there; after that the larger.
            fits = not more or self._taken_bytes - max(here, default=0) + sum(here) + more <= self.hold_bytes
            placed[dtype] = more if memory is not None and fits else None
            if placed[dtype] is not None:
                self._taken_bytes += max(0, more - max(here, default=0))
        return placed[dtype] is not None

    def _forget_places(self) -> None:
        """All but those of what is held now."""
        self._placed = {
            slot: {resident.held.dtype: self._placed[slot][resident.held.dtype]}
            for slot, resident in self._residency.items()
            if resident.held is not None
        }
        self._taken_bytes = sum(nbytes or 0 for placed in self._placed.values() for nbytes in placed.values())

    def _widened(self, slot: int, narrow: Held) -> Held:
        """``narrow`` as a fp32 sum: another gradient has come after the one that was thought to be alone."""
        wide = self._new(slot, STATE_DTYPE)
        # From the end, because on NVMe both lie in one extent: nothing is overwritten before it was read.
        for start, piece in self._pieces(slot, narrow, backwards=True):
            if wide.memory is not None:
                wide.memory[start : start + piece.numel()].copy_(piece)
            else:
                self._states.write_gradient(slot, start, piece)
        return wide

    def forget(self) -> None:
        """What was held is applied, on its way to be, or dropped."""
        for slot in self._residency:
            self.forget_one(slot)

    def forget_one(self, slot: int) -> None:
        """As ``forget``, of one parameter."""
        self._residency[slot].held = None
        self._residency[slot].contributions = 0

    # --- what -------------------------------------------------------------------------------------------------

    def holds(self, slot: int) -> bool:
        return self._residency[slot].contributions > 0

    def scaled(self) -> bool:
        """Whether any gradient was clipped or unscaled already."""
        return any(r.held is not None and r.held.factors for r in self._residency.values())

    def scale(self, slot: int, factor: torch.Tensor) -> None:
        """Multiply the gradient of ``slot`` by ``factor``, shape (), when it is applied."""
        self._held(slot).factors.append(factor.detach().clone())

    def norm(self, slot: int, norm_type: float) -> torch.Tensor:
        """The fp32 norm of the gradient of ``slot``, as if it had been multiplied already: shape ()."""
        held = self._held(slot)
        if held.norms and norm_type == 2.0:
            found = combined(norm for _, norm in sorted(held.norms.items()))
        elif held.memory is not None:
            found = norm_of(held.memory, norm_type)
        else:
            found = combined((norm_of(piece, norm_type) for _, piece in self._pieces(slot, held)), norm_type)
        for factor in held.factors if norm_type != 0.0 else ():
            found = found * factor.abs()
        return found

    def read(self, slot: int) -> torch.Tensor:
        """The gradient of ``slot`` in fp32, of the parameter's shape, on the CPU."""
        held = self._held(slot)
        value = torch.empty(self._slots[slot].numel, dtype=STATE_DTYPE)
        if held.memory is None and held.dtype == STATE_DTYPE:
            self._states.read_gradient(slot, 0, value)
        else:
            for start, piece in self._pieces(slot, held):
                value[start : start + piece.numel()].copy_(piece)
        for factor in held.factors:
            value.mul_(float(factor))
        return value.view(self._slots[slot].shape)

    def _held(self, slot: int) -> Held:
        held = self._residency[slot].held
        if held is None:
            raise StepError(
                f"no gradient of {self._slots[slot].name} is held: ask between backward and optimizer.step()"
            )
        return held

    def _pieces(self, slot: int, held: Held, *, backwards: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, piece) of what is held, from wherever it is; the piece until the next one is asked for."""
        numel, each = self._slots[slot].numel, PIECE_BYTES // STATE_DTYPE.itemsize
        starts = range(0, numel, each)
        read = torch.empty(min(each, numel) if held.memory is None else 0, dtype=held.dtype)
        for start in reversed(starts) if backwards else starts:
            elements = min(each, numel - start)
            if held.memory is not None:
                yield start, held.memory[start : start + elements]
            else:
                piece = read[:elements]
                self._states.read_gradient(slot, start, piece)
                yield start, piece
