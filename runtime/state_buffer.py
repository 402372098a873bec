"""state_buffer: one chunk's states in memory: where each array is, what to read before and write after.

A pool buffer holds, one after the other, fp32 master, first and second moment, gradient, and the compute-dtype
copy. Arrays that live in memory are used in place, and neither read nor written; those on a GPU only together.

Norms and biases have buffers of their own size: most of a model's tensors are such, and each would keep one of a few large
buffers for as long as its requests wait behind large ones, while the drives run out of work (docs/0034).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from lohan_fx.plan import Windows
from lohan_fx.runtime.adam import LOOP_ELEMENTS
from lohan_fx.runtime.device_link import DeviceLink
from lohan_fx.runtime.host_pool import Buffer, page_padded_bytes
from lohan_fx.runtime.slots import STATE_DTYPE, Chunk, Held, Residency

Movement = tuple[str, int, torch.Tensor, int]
"""(extent, offset, memory, bytes) of one read or write."""

ARRAYS = 5
SMALL_ELEMENTS = 16 << 10
"""A chunk of no more has a small buffer."""
SMALL_BUFFERS = 8
WHOLE = slice(None)


def buffer_bytes(chunk_elements: int) -> int:
    """Bytes of a pool buffer for chunks of ``chunk_elements``."""
    return ARRAYS * page_padded_bytes(chunk_elements * STATE_DTYPE.itemsize)


def small_buffers(windows: Windows) -> int:
    """How many small buffers there are: none where updates are strictly one after the other."""
    return 0 if windows.serial_optimizer or windows.chunk_elements <= SMALL_ELEMENTS else SMALL_BUFFERS


def purpose_of(elements: int, windows: Windows) -> str:
    """Of which kind a chunk's pool buffer is."""
    return "small" if elements <= SMALL_ELEMENTS and small_buffers(windows) else "optimizer"


def states_bytes(windows: Windows) -> int:
    """Bytes of all pool buffers for states."""
    return _of_all(windows, buffer_bytes)


def used_bytes(windows: Windows, copy_itemsize: int) -> int:
    """What of ``states_bytes`` is used where a processor's updates find gradients in place: master, moments, and, where the
    graphs compute in another dtype, the copy (of ``copy_itemsize`` bytes each, else 0) and one thread's part of a gradient."""

    def of_one(elements: int) -> int:
        gradient = min(elements, LOOP_ELEMENTS) * STATE_DTYPE.itemsize if copy_itemsize else 0
        states = 3 * page_padded_bytes(elements * STATE_DTYPE.itemsize)
        return states + page_padded_bytes(gradient) + page_padded_bytes(elements * copy_itemsize)

    return _of_all(windows, of_one)


def _of_all(windows: Windows, of_one: Callable[[int], int]) -> int:
    """Over the pool buffers for states, large and small, of what one for so many elements has."""
    return windows.optimizer_buffers * of_one(windows.chunk_elements) + small_buffers(windows) * of_one(SMALL_ELEMENTS)


def cut(tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Those elements of a 1-D ``tensor``; itself where they are all, as no tensor need be made then."""
    return tensor if start == 0 and end == tensor.numel() else tensor[start:end]


class _Arrays:
    """The arrays of a chunk of ``elements`` in a pool buffer: tensors that are made once for all chunks of that size."""

    def __init__(self, buffer: torch.Tensor, elements: int, padded: int) -> None:
        self.bytes = [buffer[index * padded : (index + 1) * padded] for index in range(ARRAYS)]
        self.moments = buffer[padded : 3 * padded]
        self._elements = elements
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def typed(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Array ``index`` as elements of ``dtype``."""
        found = self._typed.get((index, dtype))
        if found is None:
            found = self.bytes[index][: self._elements * dtype.itemsize].view(dtype)
            self._typed[index, dtype] = found
        return found


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
        elements, padded = chunk.elements, chunk.padded_bytes
        self._arrays = buffer.views((_Arrays, elements), lambda tensor: _Arrays(tensor, elements, padded))
        self.master = self._place(0, resident.master)
        self.exp_avg = self._place(1, resident.exp_avg)
        self.exp_avg_sq = self._place(2, resident.exp_avg_sq)
        self._gradient = self._place(3, None)

    def _place(self, index: int, resident: torch.Tensor | None) -> torch.Tensor:
        start = self._chunk.start
        if resident is not None:
            return cut(resident, start, start + self._chunk.elements)
        return self._arrays.typed(index, STATE_DTYPE)

    def to_read(self) -> list[Movement]:
        """What must be read before ``sum_gradient`` or the update."""
        chunk, parameter = self._chunk, self._chunk.parameter
        found: list[Movement] = []
        if self._updates and self._resident.master is None:
            nbytes = chunk.elements * STATE_DTYPE.itemsize
            found.append((parameter.master_extent, chunk.master_offset, self._arrays.bytes[0], nbytes))
            found.append((parameter.moments_extent, chunk.moments_offset, self._arrays.moments, 2 * chunk.padded_bytes))
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
        return [(chunk.parameter.gradient_extent, offset, self._arrays.bytes[self._sum_index(held)], nbytes)]

    @staticmethod
    def _sum_index(held: Held | None) -> int:
        """Which array of the buffer a sum is in that is not in memory: one that is no fp32 sum lies where the compute copy
        will, because the fp32 gradient is made from it."""
        return 3 if held is None or held.dtype == STATE_DTYPE else 4

    def parts(self, elements: int) -> Iterator[slice]:
        """The chunk in parts of so many elements, which stay in a cache; whole, where a GPU has its states, or what is held of
        its gradient."""
        held = None if self._held is None else self._held.memory
        on_cpu = self.master.device.type == "cpu" and (held is None or held.device.type == "cpu")
        step = elements if on_cpu else self._chunk.elements
        for start in range(0, self._chunk.elements, step):
            yield slice(start, min(start + step, self._chunk.elements))

    def sum_gradient(self, arrived: torch.Tensor | None, part: slice = WHOLE) -> torch.Tensor:
        """What is held of ``part`` plus what ``arrived``, summed where it is held, in order of arrival."""
        total = self._of(self._sum(), part)
        if arrived is not None:
            more = self._of(arrived, part)
            return total.add_(self._as_wide(more, total, part)) if self._adds else total.copy_(more)
        assert self._adds, "nothing is held and nothing arrived"
        return total

    def _as_wide(self, more: torch.Tensor, total: torch.Tensor, part: slice) -> torch.Tensor:
        """``more`` in the dtype of ``total``, made where the compute copy will be: torch would make it in the heap of the lane's
        thread, for each chunk in another place, until as much as the whole gradient is free there (docs/0057). Behind the
        narrower copies of the parts before, which stay."""
        if more.dtype == total.dtype or total.dtype != STATE_DTYPE or {more.device.type, total.device.type} != {"cpu"}:
            return more
        return self._of(self._arrays.typed(4, STATE_DTYPE), part).copy_(more)

    def gradient(self, arrived: torch.Tensor | None, part: slice, factors: Sequence[float] = ()) -> torch.Tensor:
        """Before an update, of ``part``: what is held plus what ``arrived``, in fp32, times ``factors`` one after the other.
        Valid until the next part is asked for; of what is held, fp32 sums in memory may get what arrived, and no factor."""
        if self._adds:
            total = self.sum_gradient(arrived, part)
        else:
            assert arrived is not None, "nothing is held and nothing arrived"
            total = self._of(arrived, part)
        if total.dtype == STATE_DTYPE and not factors:
            return total
        near = total.device == self._gradient.device
        # The same memory for each part: it stays in a cache, and what was there of parts before is done with.
        found = cut(self._gradient, 0, total.numel()).copy_(total) if near else total.to(STATE_DTYPE, copy=True)
        for factor in factors:
            found.mul_(factor)
        return found

    def _sum(self) -> torch.Tensor:
        start, held = self._chunk.start, self._held
        if held is not None and held.memory is not None:
            return cut(held.memory, start, start + self._chunk.elements)
        return self._arrays.typed(self._sum_index(held), STATE_DTYPE if held is None else held.dtype)

    def _of(self, array: torch.Tensor, part: slice) -> torch.Tensor:
        """``part`` of an array of the whole chunk."""
        return cut(array, *part.indices(self._chunk.elements)[:2])

    def updated(self, part: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What an update of ``part`` changes: master, first and second moment."""
        return self._of(self.master, part), self._of(self.exp_avg, part), self._of(self.exp_avg_sq, part)

    def make_compute_copy(self, part: slice) -> None:
        """Cast ``part`` of the updated master to the compute dtype: into the resident copy, or, where that is on NVMe or a GPU
        without the master, into the buffer."""
        compute, master = self._resident.compute, self._of(self.master, part)
        if compute is not None and not self._returns(compute):
            target = self._of(self._cut(compute), part)
            if target.data_ptr() != master.data_ptr():
                target.copy_(master)
        elif compute is not None or not self._chunk.parameter.is_master:
            self._of(self._arrays.typed(4, self._chunk.parameter.compute_dtype), part).copy_(master)

    def return_compute_copy(self, link: DeviceLink) -> None:
        """Bring the copy, of which all parts are made, from the buffer to the GPU, where it stays there."""
        compute = self._resident.compute
        if compute is not None and self._returns(compute):
            link.finish(link.copy_in(self._cut(compute), self._arrays.typed(4, compute.dtype)))

    def _returns(self, compute: torch.Tensor) -> bool:
        return compute.device.type != "cpu" and compute.device != self.master.device

    def _cut(self, resident: torch.Tensor) -> torch.Tensor:
        return cut(resident, self._chunk.start, self._chunk.start + self._chunk.elements)

    def to_write(self) -> tuple[list[Movement], list[Movement]]:
        """What must be written after the update, states and compute-dtype copy; or after a sum that is held."""
        chunk, parameter, resident = self._chunk, self._chunk.parameter, self._resident
        nbytes = chunk.elements * STATE_DTYPE.itemsize
        if not self._updates:
            return self._held_away(), []
        states: list[Movement] = []
        if resident.master is None:
            states.append((parameter.master_extent, chunk.master_offset, self._arrays.bytes[0], nbytes))
            states.append(
                (parameter.moments_extent, chunk.moments_offset, self._arrays.moments, 2 * chunk.padded_bytes)
            )
        streamed = resident.compute is None and not (parameter.is_master and resident.master is None)
        if not streamed:
            return states, []
        # A resident master of the compute dtype is not in the buffer yet; copied, it gets page alignment too.
        if parameter.is_master:
            self._arrays.typed(4, STATE_DTYPE).copy_(self.master)
        source = self._arrays.bytes[4]
        return states, [(parameter.streamed_extent, chunk.streamed_offset, source, self._compute_length())]

    def _compute_length(self) -> int:
        return self._chunk.elements * self._chunk.parameter.compute_dtype.itemsize
