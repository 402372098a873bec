"""held_gradient: what ``parameter.grad`` is while the gradient of an offloaded parameter is held.

The gradient is in host RAM or on NVMe, and is touched once, when it is applied. What stands for it is a tensor without
memory that can do two things: tell its norm, and note that it is to be multiplied. With these torch's own functions work
on it, and compute what they compute in plain PyTorch: ``torch.nn.utils.clip_grad_norm_``, ``get_total_norm``,
``clip_grads_with_norm_`` and ``torch.amp.GradScaler``. Anything else raises; ``lohan_fx.grad`` reads a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never, Protocol

import torch

from lohan_fx.errors import OffloadedParameterError

_aten = torch.ops.aten
_NORM: Any = _aten.linalg_vector_norm.default
_MULTIPLY: Any = _aten.mul_.Tensor
_MULTIPLY_EACH: Any = _aten._foreach_mul_.Tensor
_UNSCALE: Any = _aten._amp_foreach_non_finite_check_and_unscale_.default


class Gradients(Protocol):
    """Where gradients are held."""

    def norm(self, slot: int, norm_type: float) -> torch.Tensor: ...
    def scale(self, slot: int, factor: torch.Tensor) -> None: ...


class HeldGradient(torch.Tensor):
    """The fp32 gradient of one parameter, of its shape. ``gradients()`` is where it is held, once all of it is there."""

    slot: int
    name_of_parameter: str
    gradients: Callable[[], Gradients]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, parameter: torch.Tensor, slot: int, name: str, gradients: Callable[[], Gradients]) -> HeldGradient:
        found: HeldGradient = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=torch.float32, device=parameter.device
        )
        found.slot, found.name_of_parameter, found.gradients = slot, name, gradients
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        if func is _NORM and len(args) <= 2 and not kwargs:
            return args[0]._norm(float(args[1]) if len(args) > 1 else 2.0)
        if func is _MULTIPLY and isinstance(args[0], cls) and _is_number(args[1]):
            return args[0]._multiply(args[1])
        if func is _MULTIPLY_EACH and all(isinstance(each, cls) for each in args[0]) and _is_number(args[1]):
            for each in args[0]:
                each._multiply(args[1])
            return None
        if func is _UNSCALE and all(isinstance(each, cls) for each in args[0]):
            return _unscale(*args)
        _refuse(func, args)

    def _norm(self, norm_type: float) -> torch.Tensor:
        return self.gradients().norm(self.slot, norm_type)

    def _multiply(self, factor: float | torch.Tensor) -> HeldGradient:
        self.gradients().scale(self.slot, torch.as_tensor(factor, dtype=torch.float32))
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"HeldGradient({self.name_of_parameter}, shape={tuple(self.shape)}, dtype={self.dtype}, held)"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _unscale(gradients: Sequence[HeldGradient], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """As torch's: multiply all, and set ``found_inf`` to 1 where any holds infinity or NaN, which then its norm is, too.

    A finite gradient whose squares exceed fp32 (beyond 1e19) counts as infinite: its step is skipped, and the scale halved.
    """
    norms = torch.stack([gradient._norm(2.0).to(found_inf.device) for gradient in gradients])
    finite = torch.isfinite(norms).all()
    found_inf.copy_(torch.where(finite, found_inf, torch.ones_like(found_inf)))
    for gradient in gradients:
        gradient._multiply(inverse_scale)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _refuse(func: Callable[..., Any], args: Sequence[Any]) -> Never:
    flat = [each for arg in args for each in (arg if isinstance(arg, list | tuple) else [arg])]
    names = ", ".join(each.name_of_parameter for each in flat if isinstance(each, HeldGradient))
    raise OffloadedParameterError(
        f"{func} was called on the gradient of {names}, which is held by the runtime, not in memory: it can be clipped "
        "(lohan_fx.clip_grad_norm_) and unscaled (lohan_fx.GradScaler); lohan_fx.grad(model, name) reads it"
    )
