"""filling: the first bytes of the store: parameters from the model, from its own initialisation, or from files.

Guarantees: memory beside the model's is the largest module's, once (initialisation), or one piece (files). The model is
unchanged; what its buffers on ``meta`` become is returned, for the caller to put in place once nothing can fail.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from lohan_fx.errors import LohanError
from lohan_fx.parameters.build_on_disk import forget_pages
from lohan_fx.parameters.meta_init import Buffers, Initialize, has_meta, initialized
from lohan_fx.parameters.original_parameters import Original
from lohan_fx.parameters.weight_files import StoredTensor
from lohan_fx.runtime.engine import Engine
from lohan_fx.runtime.slots import ParameterSlot
from lohan_fx.runtime.staging import requests_bytes

Found = Mapping[int, tuple[ParameterSlot, Original]]
Files = Mapping[str, StoredTensor]
_SHOWN = 3


def allocate(engine: Engine, found: Found, checkpoints: int, chunk_elements: int) -> None:
    """Take the disk space for all parameters, which checkpoints keep in pieces of ``chunk_elements``; moments are zeros,
    which is what unwritten extents read as."""
    extents: dict[str, int] = {}
    chunk_bytes: dict[str, int] = {}
    for slot, _ in found.values():
        extents.update(slot.extents(chunk_elements))
        chunk_bytes.update(slot.chunk_bytes(chunk_elements))
    engine.wear.refuse_to_store(sum(_stored_bytes(slot) for slot, _ in found.values()))
    if checkpoints:
        engine.store.keep_generations(checkpoints)
    engine.store.allocate(extents, chunk_bytes=chunk_bytes)


def _stored_bytes(slot: ParameterSlot) -> int:
    return slot.numel * slot.master_dtype.itemsize + (0 if slot.is_master else slot.compute_bytes)


def fill(
    engine: Engine,
    model: nn.Module,
    found: Found,
    initialize: Initialize | None,
    files: Files | None = None,
    *,
    most_bytes: float = math.inf,
) -> Buffers:
    """Put all parameters into the store, from ``files`` where there are any; the buffers that come with them.

    Raises ``InfeasiblePlan`` where what is on ``meta`` takes more than ``most_bytes`` to be initialised, beside staging.
    """
    most_bytes -= requests_bytes(engine.store.drives)
    with engine.states.many(behind=True):
        if files is not None:
            return _fill_from(engine, model, found, files, initialize, most_bytes)
        return _fill(engine, model, found, initialize, most_bytes)


def _fill(engine: Engine, model: nn.Module, found: Found, initialize: Initialize | None, most_bytes: float) -> Buffers:
    """Put all parameters into the store as they are, or as the model initialises them; the buffers that come with them."""
    slots: dict[int, int] = {}
    for number, (_, original) in found.items():
        module, name = original.places[0]
        value = module._parameters[name]
        if value is None:
            raise LohanError(f"parameter {name} vanished while it was being stored")
        if value.is_meta:
            slots[id(value)] = number
            continue
        with torch.no_grad():
            engine.states.write_parameter(number, value.detach())
        forget_pages(value)

    def store(parameter: nn.Parameter, value: torch.Tensor) -> None:
        engine.states.write_parameter(slots[id(parameter)], value.detach())

    return initialized(model, initialize, store, most_bytes=most_bytes) if has_meta(model) else {}


def _fill_from(
    engine: Engine, model: nn.Module, found: Found, files: Files, initialize: Initialize | None, most_bytes: float
) -> Buffers:
    """Put all parameters into the store as ``files`` have them, which ``check_files`` has compared with the model; all
    buffers that the files hold or that were on ``meta``."""
    for number, (_, original) in found.items():
        first, *others = _stored(model, original, files)
        for start, piece in first.pieces():
            engine.states.write_piece(number, start, piece)
        for other in others:
            _check_equal(first, other)
    buffers = _buffers_only(model, initialize, frozenset(files), most_bytes)
    for name, buffer, module, key in _buffers(model):
        if name in files:
            buffers[module, key] = files[name].whole().to(buffer.dtype)
    return buffers


def _buffers_only(
    model: nn.Module, initialize: Initialize | None, skip: frozenset[str], most_bytes: float = math.inf
) -> Buffers:
    """The buffers on ``meta`` that do not come from elsewhere."""
    if not any(buffer.is_meta and name not in skip for name, buffer, *_ in _buffers(model, persistent=False)):
        return {}
    return initialized(
        model, initialize, lambda parameter, value: None, parameters=False, skip=skip, most_bytes=most_bytes
    )


def check_files(model: nn.Module, found: Found, files: Files) -> None:
    """Raise ``ValueError`` where ``files`` are not those of ``model``: names missing, left over, or of another shape."""
    problems: list[str] = []
    expected: dict[str, Sequence[int]] = {}
    missing: list[str] = []
    for slot, original in found.values():
        names = _names(model, original)
        expected.update(dict.fromkeys(names, slot.shape))
        if not any(name in files for name in names):
            missing.append(slot.name)
    for name, buffer, *_ in _buffers(model):
        expected[name] = buffer.shape
        if name not in files:
            missing.append(name)
    unexpected = [name for name in files if name not in expected]
    shapes = [
        f"{name} is {files[name].shape} there and {tuple(shape)} here"
        for name, shape in expected.items()
        if name in files and files[name].shape != tuple(shape)
    ]
    for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            problems.append(f"{what}: {', '.join(names[:_SHOWN])}{more}")
    if problems:
        raise ValueError(
            f"weights: the files are not those of this {type(model).__name__}: {'; '.join(problems)}. Names are those of "
            "model.state_dict(); a file of other names can be loaded by the library that wrote it, and saved again"
        )


def buffers_to_resume(model: nn.Module, initialize: Initialize | None, *, most_bytes: float = math.inf) -> Buffers:
    """Those on ``meta``; memory only, where a checkpoint has the values."""
    persistent = {name: (module, key, buffer) for name, buffer, module, key in _buffers(model)}
    found = _buffers_only(model, initialize, frozenset(persistent), most_bytes)
    for module, key, buffer in persistent.values():
        if buffer.is_meta:
            found[module, key] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return found


def install(buffers: Buffers) -> Callable[[], None]:
    """Put what was on ``meta`` in place; returns what undoes it."""
    before = {(module, name): module._buffers[name] for module, name in buffers}

    def put(values: Mapping[tuple[nn.Module, str], torch.Tensor | None]) -> None:
        for (module, name), value in values.items():
            module._buffers[name] = value

    put(buffers)
    return functools.partial(put, before)


def _stored(model: nn.Module, original: Original, files: Files) -> list[StoredTensor]:
    return [files[name] for name in _names(model, original) if name in files]


def _names(model: nn.Module, original: Original) -> list[str]:
    """All names of a parameter; tied ones have several."""
    prefixes = {module: prefix for prefix, module in model.named_modules()}
    return [f"{prefixes[module]}.{name}" if prefixes[module] else name for module, name in original.places]


def _check_equal(first: StoredTensor, other: StoredTensor) -> None:
    pieces = zip(first.pieces(), other.pieces(), strict=True)
    if first.dtype is not other.dtype or not all(_are_equal(here, there) for (_, here), (_, there) in pieces):
        raise ValueError(
            f"weights: {first.name} and {other.name} are one parameter in this model, and differ in the files: untie them in "
            "the model, or leave one out of the files"
        )


def _are_equal(here: torch.Tensor, there: torch.Tensor) -> bool:
    """NaN is what NaN is."""
    return bool(((here == there) | (here.isnan() & there.isnan())).all())


def _buffers(model: nn.Module, *, persistent: bool = True) -> Iterator[tuple[str, torch.Tensor, nn.Module, str]]:
    """(name, buffer, its module, its name there); ``persistent``: those that ``state_dict`` holds."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not (persistent and name in module._non_persistent_buffers_set):
                yield f"{prefix}.{name}" if prefix else name, buffer, module, name
