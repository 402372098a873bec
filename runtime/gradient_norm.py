"""gradient_norm: the norm of a flat gradient as ``torch.nn.utils.get_total_norm`` takes it of ``parameter.grad``.

In fp32 it is torch's own reduction over the whole, on a GPU that of its multi-tensor kernels. Of other dtypes the norm is that
of the fp32 values, taken piece by piece: torch's own reduction of bf16 is 15 times slower, and a fp32 copy of the whole would
need memory. Up to ``PIECE_ELEMENTS`` the bits are those of the fp32 copy's norm; above that the pieces' norm is the more exact
of the two, which differ by less than 1e-4 (torch sums the squares of all elements in few fp32 numbers).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

PIECE_ELEMENTS = 1 << 20


def norm_of(flat: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """The fp32 norm of ``flat``, shape (n,): a tensor of shape () on its device."""
    if flat.dtype == torch.float32:
        whole: torch.Tensor = torch._foreach_norm([flat], norm_type)[0]  # on a CPU: vector_norm
        return whole
    # One copy, again and again: of many the heap keeps a hole beside each norm, together as large as the whole in fp32.
    copy = torch.empty(min(PIECE_ELEMENTS, flat.numel()), dtype=torch.float32, device=flat.device)
    pieces = (copy[: piece.numel()].copy_(piece) for piece in flat.split(PIECE_ELEMENTS))
    return combined((torch.linalg.vector_norm(piece, norm_type) for piece in pieces), norm_type)


def combined(norms: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of pieces laid end to end, from the norms of the pieces, of which there is at least one."""
    found = list(norms)
    if len(found) == 1:
        return found[0]
    stacked = torch.stack(found)
    # A 0-norm counts; the norm of counts would count the pieces.
    return stacked.sum() if norm_type == 0.0 else torch.linalg.vector_norm(stacked, norm_type)
