"""adam: one Adam or AdamW update of a piece of a parameter, with torch's own arithmetic.

The numbers are torch's because the code is: ``torch.optim.adam.adam`` on views of the piece. An update is
elementwise, so a piece gives the same bits as the whole, as long as pieces end where torch's vector loops do (a
multiple of 64 elements; only the last piece of a parameter may end elsewhere, and so does the whole).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adam import adam

LOOP_ELEMENTS = 1 << 18
"""The unfused update makes several passes; over pieces of this size they stay in cache (measured: 1.6x at 1 << 20)."""


@dataclass(frozen=True)
class AdamOptions:
    """The hyper-parameters of one update. ``decoupled``: AdamW's weight decay. ``fused`` as in ``torch.optim``."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool
    fused: bool


def update(
    options: AdamOptions,
    steps_done: int,
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
) -> None:
    """Update flat fp32 ``master``, ``exp_avg`` and ``exp_avg_sq`` in place; ``gradient`` is fp32, of the same size."""
    piece = master.numel() if options.fused else LOOP_ELEMENTS
    for start in range(0, master.numel(), max(piece, 1)):
        end = start + piece
        adam(
            [master[start:end]],
            [gradient[start:end]],
            [exp_avg[start:end]],
            [exp_avg_sq[start:end]],
            [],
            [torch.tensor(float(steps_done), dtype=torch.float32, device=master.device if options.fused else "cpu")],
            foreach=False,
            fused=options.fused,
            amsgrad=False,
            beta1=options.beta1,
            beta2=options.beta2,
            lr=options.lr,
            weight_decay=options.weight_decay,
            eps=options.eps,
            maximize=options.maximize,
            decoupled_weight_decay=options.decoupled,
        )
