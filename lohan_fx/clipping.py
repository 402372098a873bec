"""clipping: ``clip_grad_norm_`` and ``grad`` for compiled models: gradients between the last backward and ``step``.

The arithmetic is torch's own (``held_gradient``). In fp32 the norm is bit-equal to plain PyTorch's while gradients are
held in memory, and where a step has one backward; a sum of several that lies on NVMe is measured chunk by chunk, as are
bf16 and fp16 gradients of more than a million elements: the norms then differ by less than 1e-4, most of it torch's own
rounding. Of gradients that were multiplied before by what is no power of two (clipped twice) it is the norm times that, whose
last bit may differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import torch
from torch import nn

from lohan_fx.compile import compiled
from lohan_fx.errors import StepError
from lohan_fx.parameters.shell import Shell
from lohan_fx.runtime.engine import slots_by_name


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients so that their norm, over all ``parameters`` together, is at most ``max_norm``.

    Call it between the step's last backward and ``optimizer.step()``. From its first call on, gradients of a compiled model
    are held until ``step``, and updates run beside the next forward; ``lohan_fx.compile(..., hold_gradients=True)`` says so
    beforehand. Parameters of ordinary models are clipped as by torch.

    Args:
        parameters: the model, or some of its parameters, as in ``torch.nn.utils.clip_grad_norm_``.
        norm_type: p of the p-norm; ``inf`` for the largest magnitude.

    Returns: the norm before, fp32, shape (), as torch does.

    Raises:
        StepError: this step's updates have run inside its backward already.
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``; nothing was scaled.
        ValueError: some of the parameters are trainable and not the optimizer's: their gradients, which torch would count, are
            dropped as they come.
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    trained = [p for p in parameters if isinstance(p, Shell) and p.requires_grad]
    if dropped := [s.parameter_name for s in trained if s.owner is not None and s.owner.drops_gradients(s.slot)]:
        raise ValueError(
            f"the norm would leave out {', '.join(dropped[:3])}{', ...' if len(dropped) > 3 else ''}, which the optimizer was "
            "not given, so that no gradient is kept: give it to the optimizer, freeze it by requires_grad_(False) before "
            "compile, or name the parameters to clip"
        )
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


def grad(model: nn.Module, name: str) -> torch.Tensor | None:
    """The gradient of parameter ``name`` between backward and ``step``, as it will be applied: fp32, of the parameter's
    shape, on the CPU. None where this step's backwards did not reach the parameter.

    Raises:
        ValueError: the model is not compiled, or has no such parameter, or a frozen one.
        StepError: there is no backward to ask about, or its updates have run inside it already.
    """
    engine = compiled(model).engine
    slots = slots_by_name(engine.slots)
    if name not in slots:
        close = difflib.get_close_matches(name, slots, n=3)
        hint = f"did you mean {', '.join(close)}?" if close else "model.named_parameters() lists them"
        raise ValueError(f"the model has no parameter {name!r}: {hint}")
    if not slots[name].trainable:
        raise ValueError(f"{name} was frozen when the model was compiled: it has no gradient")
    with engine.one_call():
        if not engine.updates.holds_any():
            raise StepError(
                f"the gradient of {name} was asked for, but none is held: ask between backward and optimizer.step()"
            )
        if not engine.updates.waits(slots[name].slot):
            return None
        return engine.updates.settled_gradients(hold_from_now_on=False).read(slots[name].slot)
