"""memory_use: what the runtime of one model has in host memory now, by its own books.

Guarantees: a value, taken without waiting for any lane; every storage counts once. Any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from lohan_fx.runtime.slots import Residency

Range = tuple[int, int]
"""(address, bytes)."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in host memory; where a GPU computes, without what is in its own.

    ``staging``, ``swapped``, ``landing`` and ``workspace``: where the buffers of the lanes lie, activations in host memory,
    what the drives bring to where it is used, and what graphs make and use up; touched or not. ``gradient_bytes``: those
    that wait for their update or for the end of the step, ``gradient_workspace_bytes`` of them in ``workspace``.
    """

    staging: tuple[Range, ...] = ()
    swapped: tuple[Range, ...] = ()
    landing: tuple[Range, ...] = ()
    workspace: tuple[Range, ...] = ()
    parameter_bytes: int = 0
    state_bytes: int = 0
    gradient_bytes: int = 0
    gradient_workspace_bytes: int = 0


def resident_use(residency: Mapping[int, Residency]) -> tuple[int, int]:
    """(parameters, states) that stay in host memory. A master that is the parameter itself counts with the parameters."""
    kept = list(residency.values())
    parameters = storage_bytes(r.compute for r in kept)
    both = storage_bytes(t for r in kept for t in (r.compute, r.master, r.exp_avg, r.exp_avg_sq))
    return parameters, both - parameters


def held_use(
    residency: Mapping[int, Residency], leaving: Iterable[torch.Tensor | None], room: Range
) -> tuple[int, int]:
    """(in all, those in ``room``) of gradients that are held, and those of ``leaving``: on their way to an update."""
    held = [r.held.memory for r in residency.values() if r.held is not None]
    found = _storages([*held, *leaving])
    begin, nbytes = room
    return sum(found.values()), sum(size for address, size in found.items() if begin <= address < begin + nbytes)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the storages of ``tensors`` in host memory, each once."""
    return sum(_storages(tensors).values())


def _storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found
