"""equal_blocks: the list of blocks that makes up most of a model, where all of them are built alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Numbers that say which block it is, not what it does.
_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "layer_index", "block_idx", "idx"})


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
    first = signature(blocks[0]) if len(blocks) else ()
    for number, block in enumerate(blocks):
        if signature(block) != first:
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


def signature(block: nn.Module) -> Hashable:
    """What a block is built like: modules, shapes, and the plain settings that they hold."""
    parts = []
    for path, module in block.named_modules():
        tensors = [*module._parameters.items(), *module._buffers.items()]
        shapes = [(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors if t is not None]
        settings = [(name, value) for name, value in vars(module).items() if _is_setting(name, value)]
        parts.append((path, type(module), tuple(shapes), tuple(settings)))
    return tuple(parts)


def _is_setting(name: str, value: Any) -> bool:
    if name in _NUMBERS:
        return False
    plain = (bool, int, float, str, type(None), torch.dtype)
    return isinstance(value, plain) or (isinstance(value, tuple) and all(isinstance(item, plain) for item in value))
