"""state_buffer: one chunk's states in memory: where each array is, what to read before and write after.

A pool buffer holds, one after the other, fp32 master, first and second moment, gradient, and the compute-dtype
copy. Arrays that live in memory are used in place, and neither read nor written; those on a GPU only together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lohan_fx.runtime.device_link import DeviceLink
from lohan_fx.runtime.host_pool import Buffer, page_padded_bytes
from lohan_fx.runtime.slots import STATE_DTYPE, Chunk, Held, Residency

Movement = tuple[str, int, torch.Tensor, int]
"""(extent, offset, memory, bytes) of one read or write."""

ARRAYS = 5


def buffer_bytes(chunk_elements: int) -> int:
    """Bytes of a pool buffer for chunks of ``chunk_elements``."""
    return ARRAYS * page_padded_bytes(chunk_elements * STATE_DTYPE.itemsize)


class StateBuffer:
    """The arrays of ``chunk``, in ``buffer`` or resident.

    ``held``: where gradients of this step are held, if anywhere. ``updates``: an update follows the sum; otherwise the sum
    is held. ``adds``: something is held already, and what arrives is added to it.
    """

    def __init__(
        self, buffer: Buffer, chunk: Chunk, resident: Residency, held: Held | None, *, updates: bool, adds: bool
    ) -> None:
        self.buffer = buffer
        self._chunk = chunk
        self._resident = resident
        self._held = held
        self._updates = updates
        self._adds = adds
        self.master = self._place(0, resident.master)
        self.exp_avg = self._place(1, resident.exp_avg)
        self.exp_avg_sq = self._place(2, resident.exp_avg_sq)
        self._gradient = self._place(3, None)

    def _bytes(self, index: int) -> torch.Tensor:
        padded = self._chunk.padded_bytes
        return self.buffer.tensor[index * padded : (index + 1) * padded]

    def _place(self, index: int, resident: torch.Tensor | None) -> torch.Tensor:
        start, elements = self._chunk.start, self._chunk.elements
        if resident is not None:
            return resident[start : start + elements]
        return self._bytes(index).view(STATE_DTYPE)[:elements]

    def to_read(self) -> list[Movement]:
        """What must be read before ``sum_gradient`` and the update."""
        chunk, parameter = self._chunk, self._chunk.parameter
        found: list[Movement] = []
        if self._updates and self._resident.master is None:
            nbytes = chunk.elements * STATE_DTYPE.itemsize
            found.append((parameter.master_extent, chunk.master_offset, self._bytes(0), nbytes))
            found.append((parameter.moments_extent, chunk.moments_offset, self._moments(), 2 * chunk.padded_bytes))
        if self._adds:
            found += self._held_away()
        return found

    def _held_away(self) -> list[Movement]:
        """The held gradient's read or write, where it is not in memory."""
        held, chunk = self._held, self._chunk
        assert held is not None, "gradients were held, and nobody knows where"
        if held.memory is not None:
            return []
        nbytes = chunk.elements * held.dtype.itemsize
        offset = chunk.gradient_offset(held.dtype)
        return [(chunk.parameter.gradient_extent, offset, self._bytes(self._sum_index(held)), nbytes)]

    @staticmethod
    def _sum_index(held: Held | None) -> int:
        """Which array of the buffer a sum is in that is not in memory: one that is no fp32 sum lies where the compute copy
        will, because the fp32 gradient is made from it."""
        return 3 if held is None or held.dtype == STATE_DTYPE else 4

    def _moments(self) -> torch.Tensor:
        padded = self._chunk.padded_bytes
        return self.buffer.tensor[padded : 3 * padded]

    def sum_gradient(self, arrived: torch.Tensor | None, factors: Sequence[float] = ()) -> torch.Tensor:
        """What is held plus what ``arrived``, summed where it is held, in order of arrival. Before an update: in fp32, times
        ``factors`` one after the other, and what is held stays as it was."""
        total = self._sum()
        if arrived is not None:
            total = total.add_(arrived) if self._adds else total.copy_(arrived)
        else:
            assert self._adds, "nothing is held and nothing arrived"
        if not self._updates or (total.dtype == STATE_DTYPE and not factors):
            return total
        near = total.device == self._gradient.device
        gradient = self._gradient.copy_(total) if near else total.to(STATE_DTYPE, copy=True)
        for factor in factors:
            gradient.mul_(factor)
        return gradient

    def _sum(self) -> torch.Tensor:
        start, elements, held = self._chunk.start, self._chunk.elements, self._held
        if held is not None and held.memory is not None:
            return held.memory[start : start + elements]
        dtype = STATE_DTYPE if held is None else held.dtype
        return self._bytes(self._sum_index(held))[: elements * dtype.itemsize].view(dtype)

    def make_compute_copy(self, link: DeviceLink) -> None:
        """Cast the updated master to the compute dtype, into the resident copy or into the buffer."""
        start, elements = self._chunk.start, self._chunk.elements
        compute = self._resident.compute
        if compute is not None:
            target = compute[start : start + elements]
            if target.data_ptr() == self.master.data_ptr():
                return
            if compute.device.type == "cpu" or compute.device == self.master.device:
                target.copy_(self.master)
            else:
                staged = self._compute_bytes().view(target.dtype)
                staged.copy_(self.master)
                link.finish(link.copy_in(target, staged, None))
        elif not self._chunk.parameter.is_master:
            self._compute_bytes().view(self._chunk.parameter.compute_dtype).copy_(self.master)

    def _compute_bytes(self) -> torch.Tensor:
        return self._bytes(4)[: self._chunk.elements * self._chunk.parameter.compute_dtype.itemsize]

    def to_write(self) -> list[Movement]:
        """What must be written after the update, or after a sum that is held."""
        chunk, parameter, resident = self._chunk, self._chunk.parameter, self._resident
        nbytes = chunk.elements * STATE_DTYPE.itemsize
        if not self._updates:
            return self._held_away()
        found: list[Movement] = []
        if resident.master is None:
            found.append((parameter.master_extent, chunk.master_offset, self._bytes(0), nbytes))
            found.append((parameter.moments_extent, chunk.moments_offset, self._moments(), 2 * chunk.padded_bytes))
        streamed = resident.compute is None and not (parameter.is_master and resident.master is None)
        if streamed:
            # A resident master of the compute dtype is not in the buffer yet; copied, it gets page alignment too.
            source = self._bytes(4)
            if parameter.is_master:
                source.view(STATE_DTYPE)[: chunk.elements].copy_(self.master)
            found.append((parameter.streamed_extent, chunk.streamed_offset, source, self._compute_length()))
        return found

    def _compute_length(self) -> int:
        return self._chunk.elements * self._chunk.parameter.compute_dtype.itemsize
