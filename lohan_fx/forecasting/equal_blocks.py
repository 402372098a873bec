"""equal_blocks: the list of blocks that makes up most of a model, where all of them are built alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

# Numbers that say which block it is, not what it does.
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "idx"})
_PLAIN = (int, float, complex, str, bytes, range, slice, set, frozenset, torch.dtype, torch.device)


@dataclass(frozen=True)
class EqualBlocks:
    """``blocks``: all children of the ``nn.ModuleList`` at ``path``, which is ``name`` of the module ``owner``."""

    path: str
    owner: nn.Module
    name: str
    blocks: nn.ModuleList


def equal_blocks(model: nn.Module) -> tuple[EqualBlocks | None, str]:
    """The outermost ``nn.ModuleList`` with most parameters, if its modules are alike; else None and why not."""
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and path and not any(part.isdigit() for part in path.split("."))
    ]
    if not lists:
        return None, "the model has no list of blocks: all of it was traced"
    path, blocks = max(lists, key=lambda found: sum(p.numel() for p in found[1].parameters()))
    for number, block in enumerate(blocks):
        if not _Pair(block, blocks[0]).alike():
            return None, f"every block was traced: {path}.{number} is not built like {path}.0"
    if (shared := _shared(model, path)) is not None:
        return None, f"every block was traced: {shared} is a parameter of more than its block"
    parent, _, name = path.rpartition(".")
    return EqualBlocks(path, model.get_submodule(parent), name, blocks), ""


@contextmanager
def truncated(found: EqualBlocks, count: int) -> Iterator[None]:
    """Within, the model has only the first ``count`` of its blocks."""
    found.owner._modules[found.name] = nn.ModuleList(list(found.blocks)[:count])
    try:
        yield
    finally:
        found.owner._modules[found.name] = found.blocks


def _shared(model: nn.Module, path: str) -> str | None:
    """A parameter of a block at ``path`` that is another block's, too, or one outside of them."""
    owners: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = name.removeprefix(f"{path}.").partition(".")[0] if name.startswith(f"{path}.") else ""
        if owners.setdefault(parameter, block) != block:
            return name
    return None


class _Pair:
    """Two blocks that are compared: their modules, shapes, and what else the modules hold."""

    def __init__(self, block: nn.Module, first: nn.Module) -> None:
        self._modules = dict(block.named_modules()), dict(first.named_modules())
        self._paths = [{module: path for path, module in modules.items()} for modules in self._modules]

    def alike(self) -> bool:
        ours, theirs = self._modules
        return ours.keys() == theirs.keys() and all(self._module(ours[path], theirs[path]) for path in ours)

    def _module(self, one: nn.Module, other: nn.Module) -> bool:
        if type(one) is not type(other):
            return False
        held = [
            {name: value for name, value in vars(module).items() if name not in _NUMBERS} for module in (one, other)
        ]
        return self._value(*held)

    def _value(self, one: Any, other: Any) -> bool:
        """Whether two values that blocks hold are the same for both; where that cannot be told, they are not."""
        if isinstance(one, nn.Module) and isinstance(other, nn.Module):
            path = self._paths[0].get(one)
            return path == self._paths[1].get(other) and (path is not None or one is other)
        if one is other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, torch.Tensor):
            return (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        if isinstance(one, list | tuple):
            return len(one) == len(other) and all(map(self._value, one, other))
        if isinstance(one, dict):
            return list(one) == list(other) and all(map(self._value, one.values(), other.values()))
        if isinstance(one, MethodType):
            return one.__func__ is other.__func__ and self._value(one.__self__, other.__self__)
        if isinstance(one, functools.partial):
            parts = [(found.func, found.args, found.keywords) for found in (one, other)]
            return self._value(*parts)
        is_config = dataclasses.is_dataclass(one) or hasattr(one, "to_dict")
        if is_config and hasattr(one, "__dict__"):
            return self._value(vars(one), vars(other))
        return isinstance(one, _PLAIN) and bool(one == other)
