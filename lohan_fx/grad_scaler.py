"""grad_scaler: dynamic loss scaling for models compiled with ``compute_dtype=torch.float16``."""

from __future__ import annotations

import torch


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` on the device that compiled models compute on.

    The loop is torch's: ``scaler.scale(loss).backward()``, ``scaler.unscale_(optimizer)`` before clipping,
    ``scaler.step(optimizer)``, ``scaler.update()``, ``optimizer.zero_grad()``. Gradients are held until ``step`` (what fp16
    models do from the start), so a step whose gradients overflowed changes nothing and writes nothing. ``state_dict`` goes
    into ``lohan_fx.checkpoint(..., extra=...)``.

    Args:
        device: "cpu" or "cuda"; None: "cuda" where this process sees one.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch. With powers of two, as the defaults
            are, scaling loses nothing but what fp16 cannot hold.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(chosen, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
