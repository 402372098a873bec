"""states: parameters and optimizer states as a whole: putting them into the store, reading them, moving them home.

Guarantees: memory used beside what is returned or made resident is that of ``staging``, by parts of ``REQUEST_BYTES`` or of one
chunk where that is larger. A chunk of which all is to be written is written at once, so that checkpoints have its checksum
from what was in memory. What is read is what the last finished step wrote.

Assumes: nothing is under way (the caller settles the engine first).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from lohan_fx.plan import Plan, Tier
from lohan_fx.runtime import staging
from lohan_fx.runtime.host_pool import page_padded_bytes
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.pinned_memory import pinned
from lohan_fx.runtime.slots import STATE_DTYPE, Chunk, ParameterSlot, Residency
from lohan_fx.runtime.staging import Part, Staging

CPU = torch.device("cpu")


class States:
    """The bytes of all parameters of one model, wherever they are."""

    def __init__(
        self, store: NvmeStore, slots: Mapping[int, ParameterSlot], residency: Mapping[int, Residency]
    ) -> None:
        self._store = store
        self._staging = Staging(store)
        self._slots = slots
        self._residency = residency
        self.chunk_elements = 1 << 20
        self.cut = False
        """Whether there are moments in the store, in pieces of ``chunk_elements``, which must then stay as it is."""
        self._gradient_extents: set[str] = set()

    def many(self, *, behind: bool = False) -> AbstractContextManager[None]:
        """Around many calls of what follows, which then make their staging buffers and threads once. ``behind``: what is written
        is in the store at the end, and may not be before; so errors may come late."""
        return self._staging.kept(behind=behind)

    # --- whole parameters -------------------------------------------------------------------------------------

    def read_parameter(self, slot: int) -> torch.Tensor:
        """The master of ``slot`` (its value, where it is frozen), as a new tensor of the parameter's shape."""
        parameter, resident = self._slots[slot], self._residency[slot]
        if resident.master is not None:
            return resident.master.to("cpu", copy=True).view(parameter.shape)
        return self._read(parameter.master_extent, parameter.numel, parameter.master_dtype).view(parameter.shape)

    def write_parameter(self, slot: int, value: torch.Tensor) -> None:
        """Make ``value`` the master of ``slot`` and renew the compute-dtype copy; the moments stay."""
        parameter, resident = self._slots[slot], self._residency[slot]
        if tuple(value.shape) != tuple(parameter.shape):
            raise ValueError(
                f"parameter {parameter.name} has shape {tuple(parameter.shape)}; the value has {tuple(value.shape)}"
            )
        flat = value.detach().reshape(-1)
        if resident.master is not None:
            resident.master.copy_(flat)
        if resident.compute is not None:
            resident.compute.copy_(flat.to(parameter.master_dtype))
        self.write_piece(slot, 0, flat)

    def write_piece(self, slot: int, start: int, flat: torch.Tensor) -> None:
        """Write ``flat`` to the store as the elements of ``slot`` from ``start`` on, which is a whole number of pages."""
        parameter = self._slots[slot]
        offset = start * parameter.master_dtype.itemsize
        self._write(parameter.master_extent, flat, parameter.master_dtype, offset=offset)
        if not parameter.is_master:
            offset = start * parameter.compute_dtype.itemsize
            self._write(
                parameter.streamed_extent, flat, parameter.compute_dtype, offset=offset, through=parameter.master_dtype
            )

    def read_moments(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second moment of ``slot``, fp32, as new tensors of the parameter's shape."""
        parameter, resident = self._slots[slot], self._residency[slot]
        if resident.exp_avg is not None and resident.exp_avg_sq is not None:
            moments = resident.exp_avg, resident.exp_avg_sq
            first, second = (moment.to("cpu", copy=True).view(parameter.shape) for moment in moments)
            return first, second
        found = tuple(torch.empty(parameter.numel, dtype=STATE_DTYPE, device=CPU) for _ in range(2))

        def take(chunk: Chunk, memory: torch.Tensor) -> None:
            for moment, half in zip(found, _halves(chunk, memory), strict=True):
                moment[chunk.start : chunk.start + chunk.elements].copy_(half)

        self._staging.read(self._moments_parts(parameter, take))
        return found[0].view(parameter.shape), found[1].view(parameter.shape)

    def write_moments(self, slot: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        """Set both moments of ``slot``."""
        parameter, resident = self._slots[slot], self._residency[slot]
        for name, value in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
            if tuple(value.shape) != tuple(parameter.shape):
                raise ValueError(
                    f"{name} of {parameter.name} has shape {tuple(value.shape)}; expected {tuple(parameter.shape)}"
                )
        if resident.exp_avg is not None and resident.exp_avg_sq is not None:
            resident.exp_avg.copy_(exp_avg.reshape(-1))
            resident.exp_avg_sq.copy_(exp_avg_sq.reshape(-1))
            return
        self._store_moments(parameter, exp_avg, exp_avg_sq)

    def _store_moments(self, parameter: ParameterSlot, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        self.cut = True
        moments = exp_avg.reshape(-1), exp_avg_sq.reshape(-1)

        def give(chunk: Chunk, memory: torch.Tensor) -> None:
            for moment, half in zip(moments, _halves(chunk, memory), strict=True):
                half.copy_(moment[chunk.start : chunk.start + chunk.elements])

        self._staging.write(self._moments_parts(parameter, give))

    def _moments_parts(self, parameter: ParameterSlot, copy: Callable[[Chunk, torch.Tensor], None]) -> list[Part]:
        return [
            Part(parameter.moments_extent, c.moments_offset, 2 * c.padded_bytes, functools.partial(copy, c))
            for c in parameter.chunks(self.chunk_elements)
        ]

    def written_by_update(self, slot: int) -> int:
        """Bytes that one update of ``slot`` writes to the store."""
        parameter, resident = self._slots[slot], self._residency[slot]
        chunks = parameter.chunks(self.chunk_elements)
        states = 0 if resident.master is not None else sum(3 * chunk.padded_bytes for chunk in chunks)
        copied = resident.compute is None and not (parameter.is_master and resident.master is None)
        if not copied:
            return states
        return states + sum(page_padded_bytes(c.elements * parameter.compute_dtype.itemsize) for c in chunks)

    # --- checkpoints ------------------------------------------------------------------------------------------

    def written_back_bytes(self) -> int:
        """What ``write_back`` writes of the states that are in memory."""
        in_memory = [self._slots[slot] for slot, found in self._residency.items() if found.master is not None]
        return sum(3 * c.padded_bytes for parameter in in_memory for c in parameter.chunks(self.chunk_elements))

    def stale_copies(self) -> list[str]:
        """The parameters whose compute-dtype copy in the store is older than their master: the newest is in memory."""
        return [
            self._slots[slot].name
            for slot, resident in self._residency.items()
            if resident.compute is not None and self._slots[slot].trainable and not self._slots[slot].is_master
        ]

    def renew_copy(self, slot: int) -> None:
        """Make the compute-dtype copy in the store from the master in the store."""
        parameter = self._slots[slot]
        per_piece = self._staged_elements(STATE_DTYPE)
        for start in range(0, parameter.numel, per_piece):
            piece = torch.empty(min(per_piece, parameter.numel - start), dtype=STATE_DTYPE, device=CPU)
            self._read_into(parameter.master_extent, start * STATE_DTYPE.itemsize, piece)
            offset = start * parameter.compute_dtype.itemsize
            self._write(parameter.streamed_extent, piece, parameter.compute_dtype, offset=offset)

    # --- homes ------------------------------------------------------------------------------------------------

    def apply_homes(self, plan: Plan, device: torch.device) -> None:
        """Move each parameter and its states to where ``plan`` wants them."""
        homes = {p.name: p for p in plan.parameters}
        with self.many():
            for slot, parameter in self._slots.items():
                home = homes.get(parameter.name)
                if home is not None:
                    self._move(slot, home.home, home.states_home, device)

    def _move(self, slot: int, home: Tier, states_home: Tier | None, device: torch.device) -> None:
        parameter, resident = self._slots[slot], self._residency[slot]
        if parameter.trainable:
            self._move_states(slot, memory_of(states_home, device), device)
        wanted = None if home is Tier.NVME else home is Tier.DEVICE
        found = None if resident.compute is None else resident.on_device
        if wanted == found:
            return
        if wanted is None:
            self._write_compute(parameter, resident)
            resident.compute = None
        elif parameter.is_master and resident.master is not None and _same(resident.master, device if wanted else CPU):
            resident.compute = resident.master
        else:
            value = self.read_parameter(slot).reshape(-1).to(parameter.compute_dtype)
            resident.compute = value.to(device) if wanted else _for_copies(value, device)
        resident.on_device = bool(wanted)

    def _move_states(self, slot: int, memory: torch.device | None, device: torch.device) -> None:
        """Move the states of ``slot`` into ``memory``; None is NVMe."""
        parameter, resident = self._slots[slot], self._residency[slot]
        if resident.master is None if memory is None else _same(resident.master, memory):
            return
        if memory is not None:
            master = self.read_parameter(slot).reshape(-1).to(memory)
            if parameter.is_master and memory == CPU:
                master = _for_copies(master, device)  # which computes with it
            exp_avg, exp_avg_sq = (moment.reshape(-1).to(memory) for moment in self.read_moments(slot))
            resident.master, resident.exp_avg, resident.exp_avg_sq = master, exp_avg, exp_avg_sq
            return
        assert resident.master is not None and resident.exp_avg is not None and resident.exp_avg_sq is not None
        master, exp_avg, exp_avg_sq = resident.master, resident.exp_avg, resident.exp_avg_sq
        self._write(parameter.master_extent, master, parameter.master_dtype)
        self._store_moments(parameter, exp_avg, exp_avg_sq)
        # Now that they are there: should writing them fail, those in memory are the only ones.
        resident.master = resident.exp_avg = resident.exp_avg_sq = None
        if resident.compute is master:
            resident.compute, resident.on_device = None, False

    def _write_compute(self, parameter: ParameterSlot, resident: Residency) -> None:
        assert resident.compute is not None
        self._write(parameter.streamed_extent, resident.compute.to("cpu"), parameter.compute_dtype)

    # --- gradients that are held in the store -----------------------------------------------------------------

    def allocate_gradient(self, slot: int) -> None:
        """Take the disk space for the fp32 gradient of ``slot``, once for all steps."""
        parameter = self._slots[slot]
        if parameter.gradient_extent not in self._gradient_extents:
            nbytes = parameter.numel * STATE_DTYPE.itemsize
            # Ctrl-C is raised once the space is taken, before that is noted here.
            self._store.allocate({parameter.gradient_extent: nbytes}, unless_there=True)
            self._gradient_extents.add(parameter.gradient_extent)

    def read_gradient(self, slot: int, start: int, flat: torch.Tensor) -> None:
        """Fill ``flat`` with what is held of ``slot`` as that dtype, from element ``start`` on."""
        self._read_into(self._slots[slot].gradient_extent, start * flat.dtype.itemsize, flat)

    def write_gradient(self, slot: int, start: int, flat: torch.Tensor) -> None:
        """Hold ``flat`` as fp32, from element ``start`` on."""
        offset = start * STATE_DTYPE.itemsize
        self._write(self._slots[slot].gradient_extent, flat, STATE_DTYPE, offset=offset)

    # --- staging ----------------------------------------------------------------------------------------------

    def _read(self, extent: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        value = torch.empty(numel, dtype=dtype, device=CPU)
        self._read_into(extent, 0, value)
        return value

    def _read_into(self, extent: str, offset: int, flat: torch.Tensor) -> None:
        per_part = self._staged_elements(flat.dtype)

        def part(start: int) -> Part:
            piece = flat[start : start + per_part].view(torch.uint8)
            return Part(
                extent,
                offset + start * flat.itemsize,
                piece.numel(),
                lambda memory: piece.copy_(memory[: piece.numel()]),
            )

        self._staging.read([part(start) for start in range(0, flat.numel(), per_part)])

    def _staged_elements(self, dtype: torch.dtype) -> int:
        """How many are moved at once: whole chunks."""
        return self.chunk_elements * max(1, staging.REQUEST_BYTES // (self.chunk_elements * dtype.itemsize))

    def _write(
        self,
        extent: str,
        flat: torch.Tensor,
        dtype: torch.dtype,
        *,
        offset: int = 0,
        through: torch.dtype | None = None,
    ) -> None:
        """Write ``flat`` as ``dtype`` (cast to ``through`` before, so that the copy is the master's cast)."""
        per_part = self._staged_elements(dtype)

        def part(start: int) -> Part:
            piece = flat[start : start + per_part]
            nbytes = piece.numel() * dtype.itemsize

            def copy(memory: torch.Tensor) -> None:
                memory[:nbytes].view(dtype).copy_(piece if through is None else piece.to(through))

            return Part(extent, offset + start * dtype.itemsize, nbytes, copy)

        self._staging.write([part(start) for start in range(0, flat.numel(), per_part)])


def _halves(chunk: Chunk, memory: torch.Tensor) -> Iterator[torch.Tensor]:
    """Both moments of ``chunk`` in the memory that has them as the store does."""
    for begin in (0, chunk.padded_bytes):
        yield memory[begin : begin + chunk.elements * STATE_DTYPE.itemsize].view(STATE_DTYPE)


def _for_copies(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``value``, flat and in host memory, where ``device`` can copy it from by itself."""
    if device.type != "cuda":
        return value
    return pinned(value.numel(), value.dtype).copy_(value)


def memory_of(home: Tier | None, device: torch.device) -> torch.device | None:
    """The memory that ``home`` is; None is NVMe."""
    return {Tier.DEVICE: device, Tier.HOST: CPU}.get(home) if home is not None else None


def _same(held: torch.Tensor | None, memory: torch.device) -> bool:
    return held is not None and held.device.type == memory.type
