"""original_parameters: a model's parameters as ``compile`` finds them: each once, tied or not, with all its places."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lohan_fx.parameters.build_on_disk import in_file
from lohan_fx.runtime.slots import ParameterSlot


@dataclass
class Original:
    """A parameter as it was: where the model holds it, in what dtype, the RAM it took (none on ``meta``), and the memory it
    gets back in the end (the CPU's, if it was on ``meta``).

    ``parameter``: itself, for as long as somebody else holds it.
    """

    parameter: weakref.ref[nn.Parameter]
    places: list[tuple[nn.Module, str]]
    dtype: torch.dtype
    bytes: int
    device: torch.device


def slots_of(
    model: nn.Module, compute_dtype: torch.dtype, first: Callable[[int], range]
) -> dict[int, tuple[ParameterSlot, Original]]:
    """One slot per distinct parameter of ``model``, in the order of ``named_parameters``; tied ones share it."""
    found: dict[int, tuple[nn.Parameter, str, Original]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{prefix}.{name}" if prefix else name
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                nbytes = 0 if parameter.device.type != "cpu" or in_file(parameter) else parameter.nbytes
                original = Original(weakref.ref(parameter), [], parameter.dtype, nbytes, device)
                entry = found.setdefault(id(parameter), (parameter, full, original))
                entry[2].places.append((module, name))
    slots: dict[int, tuple[ParameterSlot, Original]] = {}
    for slot, (parameter, name, original) in zip(first(len(found)) if found else (), found.values(), strict=True):
        trainable = parameter.requires_grad
        master = torch.float32 if trainable else parameter.dtype
        slots[slot] = (
            ParameterSlot(slot, name, parameter.shape, compute_dtype, master, trainable),
            original,
        )
    return slots
