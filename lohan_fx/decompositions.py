"""decompositions: ops that are traced as others, because torch tells the strides of their results wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_aten = torch.ops.aten


def _native_dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> Any:
    """What the CPU's kernel computes, bit by bit, where ``grad`` is not contiguous; ``NotImplemented`` leaves the op as it is.

    Traced, the op is said to give a contiguous tensor, as CUDA's kernel does. The CPU's gives one with the strides of
    ``grad``, of which a view that was traced fails when it runs.
    """
    if grad.device.type != "cpu" or grad.is_contiguous():
        return NotImplemented
    return grad * mask * scale


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {_aten.native_dropout_backward.default: _native_dropout_backward}
