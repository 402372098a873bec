"""pinned_memory: host memory that a GPU copies from and to by itself, at the link's full speed.

It is pinned where it lies, as whole pages: torch's own ``pin_memory`` rounds up to a power of two.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import warnings
from typing import Any

import torch

from lohan_fx.errors import LohanError
from lohan_fx.runtime.huge_pages import PAGE_BYTES, map_memory

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every CUDA context, as torch's own are."""


class _Pages(mmap.mmap):
    """A mapping that is unpinned, once it was pinned, before its addresses go: with the last tensor that lies in it."""

    pinned_at: int | None = None

    def __del__(self) -> None:
        if self.pinned_at is not None and not sys.is_finalizing():
            # Nobody could be told; and in a forked child, where CUDA raises, nothing is pinned.
            with contextlib.suppress(LohanError, RuntimeError):
                unpin(self.pinned_at)


def pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of zeros in pinned memory of its own, which is given back with the last view of it.

    Where the driver refuses (it may have a limit), a warning says so, and the memory is ordinary: a copy from it is staged by
    the driver while its thread waits.
    """
    nbytes = numel * dtype.itemsize
    padded = -(-max(nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
    region, begin = map_memory(padded, _Pages)
    assert isinstance(region, _Pages)
    pages = torch.frombuffer(region, dtype=torch.uint8, count=padded, offset=begin)
    try:
        pin(pages.data_ptr(), padded)
        region.pinned_at = pages.data_ptr()
    except LohanError as error:
        warnings.warn(f"{error}; copies from it will be slower than planned", RuntimeWarning, stacklevel=2)
    return pages[:nbytes].view(dtype)


def pin(address: int, nbytes: int) -> None:
    """Pin ``nbytes`` of host memory at ``address``. Raises ``LohanError`` where the driver refuses."""
    cudart: Any = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(address, nbytes, PORTABLE))
    if status != 0:
        raise LohanError(
            f"pinning host memory: cudaHostRegister of {nbytes} bytes failed with CUDA error {status}; promise less "
            "host_memory, or raise the system's limit of pinned memory"
        )


def unpin(address: int) -> None:
    """Undo ``pin``. Raises ``LohanError`` where the driver refuses."""
    cudart: Any = torch.cuda.cudart()
    status = int(cudart.cudaHostUnregister(address))
    if status != 0:
        raise LohanError(
            f"unpinning host memory: cudaHostUnregister failed with CUDA error {status}, perhaps of an earlier asynchronous "
            "call; run with CUDA_LAUNCH_BLOCKING=1 to find that call"
        )
