"""adam: one Adam or AdamW update of a piece of a parameter, with torch's own arithmetic.

The numbers are torch's because the code is: ``torch.optim.adam``'s on views of the piece. An update is
elementwise, so a piece gives the same bits as the whole, as long as pieces end where torch's vector loops do (a
multiple of 64 elements; only the last piece of a parameter may end elsewhere, and so does the whole).

Guarantees: the numbers do not depend on what other threads do. Torch rounds an update otherwise while ``torch.compile`` is
at work anywhere in the process (its flag for that is one for all threads), and updates run beside it.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import adam as torch_adam

LOOP_ELEMENTS = 1 << 18
"""What makes several passes stays in a core's share of the caches over pieces of this size: the unfused update (measured:
1.6x the time at 1 << 20), and the fused one with the casts before and after it (1.06 to 1.1x)."""


Number = float | torch.Tensor
"""A hyper-parameter; a tensor has one element."""


@dataclass(frozen=True)
class AdamOptions:
    """The hyper-parameters of one update. ``decoupled``: AdamW's weight decay. ``fused`` as in ``torch.optim``, which, not fused,
    computes with a tensor in that tensor's dtype."""

    lr: Number
    beta1: Number
    beta2: Number
    eps: Number
    weight_decay: Number
    decoupled: bool
    maximize: bool
    fused: bool


def part_elements() -> int:
    """How much of a parameter to cast, update and cast back at a time, by the threads of the calling one."""
    return LOOP_ELEMENTS * torch.get_num_threads()


def update(
    options: AdamOptions,
    steps_done: int,
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> None:
    """Update flat fp32 ``master``, ``exp_avg`` and ``exp_avg_sq`` in place; ``gradient`` is fp32, of the same size."""
    if options.fused and master.device.type == "cpu":
        # By itself: ``_fused_adam`` takes 75 microseconds of Python before it, of which a single tensor here needs none.
        kernel = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
        kernel(
            [master],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [torch.tensor(float(steps_done + 1), dtype=torch.float32)],
            lr=float(options.lr),
            beta1=float(options.beta1),
            beta2=float(options.beta2),
            weight_decay=float(options.weight_decay),
            eps=float(options.eps),
            amsgrad=False,
            maximize=options.maximize,
        )
        return
    piece = master.numel() if options.fused else LOOP_ELEMENTS
    # Any, because they take tensors also where they are annotated to take floats.
    function: Any = torch_adam._fused_adam if options.fused else _unfused
    for start in range(0, master.numel(), max(piece, 1)):
        end = start + piece
        function(
            [master[start:end]],
            [gradient[start:end]],
            [exp_avg[start:end]],
            [exp_avg_sq[start:end]],
            [],
            [torch.tensor(float(steps_done), dtype=torch.float32, device=master.device if options.fused else "cpu")],
            grad_scale=None,
            found_inf=None,
            amsgrad=False,
            has_complex=False,
            beta1=options.beta1,
            beta2=options.beta2,
            lr=options.lr,
            weight_decay=options.weight_decay,
            eps=options.eps,
            maximize=options.maximize,
            capturable=False,
            differentiable=False,
            decoupled_weight_decay=options.decoupled,
        )


def _never_compiling(function: Any) -> Any:
    """``function`` of ``torch.optim.adam``, with the number of steps always a Python number and not, at times, a tensor."""
    own = {**function.__globals__, "_get_value": torch.Tensor.item}
    found = types.FunctionType(function.__code__, own, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


_unfused = _never_compiling(torch_adam._single_tensor_adam)
