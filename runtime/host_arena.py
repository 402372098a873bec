"""host_arena: places of any size in one fixed stretch of host memory, for activations swapped to RAM.

Guarantees: never more than ``nbytes``; ``take`` never blocks (None where nothing is large enough); a region handed
back is merged with its neighbours. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lohan_fx.runtime.host_pool import page_padded_bytes


@dataclass(frozen=True)
class Region:
    """A place of ``nbytes`` in ``memory``, of which it takes up ``padded_bytes``."""

    memory: torch.Tensor
    offset: int
    nbytes: int
    padded_bytes: int

    @property
    def tensor(self) -> torch.Tensor:
        """Its memory, uint8, of the size asked for."""
        return self.memory[self.offset : self.offset + self.nbytes]


class HostArena:
    """First fit over ``memory``, uint8 (None: an arena of nothing)."""

    def __init__(self, memory: torch.Tensor | None) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._holes: list[tuple[int, int]] = [] if self._memory is None else [(0, self._memory.numel())]

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def provide(self, memory: torch.Tensor) -> None:
        """``memory``, uint8, is what places are in. Only for an arena of nothing."""
        with self._lock:
            assert self._memory is None, "an arena has one stretch of memory"
            self._memory, self._holes = memory, [(0, memory.numel())]

    def take(self, nbytes: int, worth: Callable[[int, int], int] = lambda offset, nbytes: 0) -> Region | None:
        """A place of ``nbytes``, or None: of the holes with room for it the one of most ``worth(offset, bytes)``, the first of
        equal ones."""
        wanted = page_padded_bytes(nbytes)
        with self._lock:
            fitting = [index for index, (_, size) in enumerate(self._holes) if size >= wanted]
            if not fitting or self._memory is None:
                return None
            index = max(fitting, key=lambda i: worth(self._holes[i][0], wanted))
            offset, size = self._holes[index]
            self._holes[index : index + 1] = [(offset + wanted, size - wanted)] if size > wanted else []
            return Region(self._memory, offset, nbytes, wanted)

    def give_back(self, region: Region) -> None:
        """Free ``region`` again."""
        with self._lock:
            holes: list[tuple[int, int]] = []
            for offset, size in sorted([*self._holes, (region.offset, region.padded_bytes)]):
                if holes and sum(holes[-1]) == offset:
                    holes[-1] = (holes[-1][0], holes[-1][1] + size)
                else:
                    holes.append((offset, size))
            self._holes = holes

    def holes(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what is free."""
        with self._lock:
            return list(self._holes)
