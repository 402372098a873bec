"""resuming: what of a checkpoint is the model's: written by ``checkpoint``, taken up by ``compile``.

Nothing is read from the store for it but what memory must hold: the compute-dtype copies that were only in memory
when the checkpoint was made are made anew from their masters, and every other byte is read when it is needed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan_fx.checkpoints.plain_json import decoded_tensor, encoded_tensor
from lohan_fx.errors import StoreError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Plan, Windows
from lohan_fx.runtime.engine import Engine, slots_by_name
from lohan_fx.runtime.generation_files import read_generations
from lohan_fx.runtime.manifest import MAX_SLOTS, Manifest
from lohan_fx.runtime.slots import ParameterSlot
from lohan_fx.runtime.store_arguments import check_directory
from lohan_fx.store_directories import Directories, directories_for, is_temporary

PARAMETERS = "parameters"
_LOG = logging.getLogger(__name__)


def checkpoint_of_model(model: nn.Module, engine: Engine) -> dict[str, Any]:
    """What a checkpoint says of the model, beside the bytes in the store."""
    return {
        "chunk_elements": engine.states.chunk_elements,
        PARAMETERS: [
            {**_described(parameter), "updates": engine.residency[slot].updates}
            for slot, parameter in engine.slots.items()
        ],
        "stale_copies": engine.states.stale_copies(),
        "buffers": {name: encoded_tensor(buffer, f"buffer {name}") for name, buffer in _buffers(model)},
    }


def to_resume(
    nvme: Directories | None, hw: HardwareProfile, resume: bool | Directories, checkpoints: int
) -> tuple[Directories | None, list[Manifest]]:
    """The directories for the store, and the checkpoints there that it is to begin with."""
    if not isinstance(resume, bool | str | Path | Sequence):
        raise TypeError(f"resume_from_checkpoint is {resume!r}: expected True, a directory, or one per drive")
    if not resume and not isinstance(resume, bool):
        raise ValueError(f"resume_from_checkpoint is {resume!r}, which names no directory: leave it out to begin anew")
    if type(checkpoints) is not int or not 0 <= checkpoints < MAX_SLOTS:
        raise ValueError(f"checkpoints is {checkpoints!r}: expected how many to keep, 0 to {MAX_SLOTS - 1}")
    if not resume and not checkpoints:
        return nvme, []
    named = not isinstance(resume, bool)
    if not isinstance(resume, bool):
        if nvme is not None:
            raise ValueError("both nvme and resume_from_checkpoint name directories: name them in one place")
        nvme = resume
    if is_temporary(nvme, hw):
        raise ValueError("checkpoints need directories that outlive this run: name them with nvme=")
    if not resume:
        return nvme, []
    directories, _ = directories_for(nvme, hw)
    for directory in directories:
        check_directory(directory)
    manifests = _manifests_in(directories, must_exist=named)
    if manifests and checkpoints not in (0, manifests[-1].keep):
        raise ValueError(
            f"checkpoints={checkpoints}, but the run that is resumed keeps {manifests[-1].keep}: leave it out, it is kept"
        )
    return directories, manifests


def _manifests_in(directories: Sequence[Path], *, must_exist: bool) -> list[Manifest]:
    """The checkpoints in ``directories``, oldest first. Raises ``StoreError`` where there are none and must be."""
    found = read_generations(directories)
    if not found and must_exist:
        raise StoreError(
            f"there is no checkpoint in {', '.join(map(str, directories))}: name the directories of the run"
        )
    if not found:
        _LOG.info("no checkpoint in %s: the training begins anew", ", ".join(map(str, directories)))
    return found


def as_on_disk(windows: Windows, manifest: Manifest, plan: Plan | None) -> Windows:
    """The windows, with chunks as the states on disk are cut."""
    chunk_elements = _chunk_elements_of(manifest)
    if plan is not None and plan.windows.chunk_elements != chunk_elements:
        raise ValueError(
            f"the plan has chunks of {plan.windows.chunk_elements} elements, the checkpoint of {chunk_elements}: leave the "
            "plan out, or make one with these chunks"
        )
    return dataclasses.replace(windows, chunk_elements=chunk_elements)


def _chunk_elements_of(manifest: Manifest) -> int:
    """How the states on disk are cut, which a run cannot change. Raises ``StoreError``."""
    found = manifest.state.get("chunk_elements")
    if type(found) is not int or not 0 < found <= 1 << 31 or found % 4096:
        raise StoreError(f"checkpoint {manifest.generation} says that chunks have {found!r} elements: it is damaged")
    return found


def take_up(model: nn.Module, engine: Engine, manifest: Manifest) -> None:
    """Make ``model`` that of ``manifest``, whose store is open. Raises ``ValueError`` where it is another model."""
    state = manifest.state
    try:
        _check_parameters(engine, manifest)
        buffers = {name: decoded_tensor(saved) for name, saved in state["buffers"].items()}
        _check_buffers(model, buffers)
        updates = {saved["name"]: saved["updates"] for saved in state[PARAMETERS]}
        slots = slots_by_name(engine.slots)
        stale = [slots[name] for name in state["stale_copies"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"checkpoint {manifest.generation} lacks what a model needs ({error!r}): it is damaged"
        ) from error
    # Absent where an earlier lohan_fx wrote it.
    engine.wear.earlier_bytes = saved_count(state, "bytes_written", manifest.generation, absent=0)
    engine.wear.expect(saved_count(state, "step_bytes", manifest.generation, absent=0))
    for name, slot in slots.items():
        engine.residency[slot.slot].updates = int(updates[name])
    with engine.states.many():
        for slot in stale:
            engine.states.renew_copy(slot.slot)
    with torch.no_grad():
        for name, buffer in _buffers(model):
            buffer.copy_(buffers[name])
    engine.resumed = state


def saved_count(state: Mapping[str, Any], name: str, checkpoint: int, *, absent: int | None = None) -> int:
    """A number of ``state``. Raises ``StoreError`` for anything that no training would have written there."""
    found = state.get(name, absent)
    if type(found) is not int or not 0 <= found < 1 << 63:
        raise StoreError(f"checkpoint {checkpoint} says that {name} is {found!r}: it is damaged")
    return found


def _check_parameters(engine: Engine, manifest: Manifest) -> None:
    saved = {entry["name"]: {**entry} for entry in manifest.state[PARAMETERS]}
    for slot in engine.slots.values():
        here, there = _described(slot), saved.pop(slot.name, {})
        updates = there.pop("updates", None)
        if here != there:
            raise ValueError(_difference(slot.name, here, there))
        if type(updates) is not int or updates < 0:
            raise StoreError(
                f"checkpoint {manifest.generation}: {slot.name} has had {updates!r} updates: it is damaged"
            )
    if saved:
        raise ValueError(f"the checkpoint is of another model: this one has no {', '.join(sorted(saved)[:3])}")
    wanted: dict[str, int] = {}
    for slot in engine.slots.values():
        wanted.update(slot.extents(_chunk_elements_of(manifest)))
    if wanted != {name: record.nbytes for name, record in manifest.extents.items()}:
        raise StoreError(f"checkpoint {manifest.generation} has other extents than its parameters need: it is damaged")


def _difference(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """What to say of a parameter that is another one in the checkpoint."""
    if not there:
        return f"the checkpoint is of another model: it has no parameter {name}"
    different = [field for field in here if here[field] != there.get(field)]
    if different == ["master_dtype"]:  # trained ones are float32 in any case
        return (
            f"{name} is frozen, so the checkpoint holds it in the dtype that it had, torch.{there['master_dtype']}, and this "
            f"model has it in torch.{here['master_dtype']}: build the model in the same dtype"
        )
    if different and {*different} <= {"compute_dtype", "master_dtype"}:
        was, now = (f"compute_dtype=torch.{one['compute_dtype']}" for one in (there, here))
        return (
            f"the checkpoint was made with {was}, and this model is compiled with {now}: compile({was}, ...) goes on; to change "
            "it, begin anew from the weights that lohan-fx export writes"
        )
    said = "; ".join(f"{field} is {here[field]} here and {there.get(field)} there" for field in different)
    return f"the checkpoint is of another model: of {name}, {said}"


def _check_buffers(model: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    here = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in _buffers(model)}
    there = {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in saved.items()}
    if here != there:
        different = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
        raise ValueError(f"the checkpoint is of another model: buffers {', '.join(different[:3])} differ")


def _described(slot: ParameterSlot) -> dict[str, Any]:
    return {
        "name": slot.name,
        "shape": list(slot.shape),
        "compute_dtype": str(slot.compute_dtype).removeprefix("torch."),
        "master_dtype": str(slot.master_dtype).removeprefix("torch."),
        "trainable": slot.trainable,
    }


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that ``state_dict`` would hold; the others are made anew with the model."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
