"""returned_tensors: what the caller still holds of what the model returned to it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

NOTICEABLE_BYTES = 1 << 20
"""A loss of each sample takes less, logits take more."""


class ReturnedTensors:
    """The tensors that the last call returned; holds none of them."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def returned(self, values: Any) -> None:
        """A call has returned ``values``: tensors in whatever ``torch.utils._pytree`` knows, Hugging Face's outputs among it."""
        self._tensors = [weakref.ref(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]

    def held_bytes(self) -> int:
        """Bytes of those that somebody still holds; 0 where they are not worth a word."""
        held = (found() for found in self._tensors)
        storages = (tensor.untyped_storage() for tensor in held if tensor is not None)
        nbytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        return nbytes if nbytes >= NOTICEABLE_BYTES else 0
