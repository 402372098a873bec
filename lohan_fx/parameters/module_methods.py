"""module_methods: what modules of a compiled model do otherwise, because shells are in them: save, load, move, drop gradients.

Guarantees: ``state_dict`` and ``load_state_dict`` are of one moment, whatever another thread trains meanwhile, and go parameter
by parameter; whoever reads or writes finds every update in place. ``undo`` leaves the modules' own methods.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lohan_fx.parameters.saved_dtype import note_dtype
from lohan_fx.parameters.shell import moving, streaming
from lohan_fx.runtime.engine import Engine

_ASSIGNS = "assign_to_params_buffers"
_NO_ASSIGNING = (
    "load_state_dict(assign=True) would replace offloaded parameters by tensors in memory: use assign=False, which writes the "
    "values where the parameters are"
)


class ModuleMethods:
    """Ours, in place of those of ``model`` and of ``holders``, its modules that parameters are registered with.

    ``compute_dtype``: what ``save_pretrained`` must not note as the dtype of the masters that it writes.
    """

    def __init__(self, engine: Engine, compute_dtype: str) -> None:
        self._engine = engine
        self._compute_dtype = compute_dtype
        self._replaced: list[tuple[nn.Module, str]] = []

    def replace(self, model: nn.Module, holders: Iterable[nn.Module]) -> None:
        for module in holders:
            self._replace(module, "_save_to_state_dict", self._save)
            self._replace(module, "_load_from_state_dict", self._load)
            self._replace(module, "_apply", self._move)
        for module in model.modules():
            self._replace(module, "state_dict", self._save_all)
            self._replace(module, "load_state_dict", self._load_all)
        self._replace(model, "zero_grad", self._zero_grad)
        if hasattr(model, "save_pretrained"):
            self._replace(model, "save_pretrained", self._save_pretrained)

    def undo(self) -> None:
        """The modules have their own methods again. Idempotent."""
        while self._replaced:
            module, name = self._replaced.pop()
            object.__delattr__(module, name)

    def _replace(self, module: nn.Module, name: str, ours: Callable[..., None]) -> None:
        """``module.name(...)`` is ``ours(its own method, ...)``."""
        object.__setattr__(module, name, functools.partial(ours, getattr(module, name)))
        self._replaced.append((module, name))

    def _save(self, original: Callable[..., None], *args: Any) -> None:
        self._engine.before_reading()
        with streaming():
            original(*args)

    def _load(
        self, original: Callable[..., None], state_dict: object, prefix: str, local_metadata: Any, *args: Any
    ) -> None:
        if local_metadata.get(_ASSIGNS):
            raise ValueError(_NO_ASSIGNING)
        self._engine.before_writing()
        with streaming():
            original(state_dict, prefix, local_metadata, *args)

    def _save_all(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._engine.one_call(), self._engine.states.many():
            return original(*args, **kwargs)

    def _load_all(
        self, original: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """PyTorch notes ``assign=True`` in the dictionary, where it is still found when that is loaded again without."""
        if assign:
            raise ValueError(_NO_ASSIGNING)
        if (noted := getattr(state_dict, "_metadata", None)) is not None:
            state_dict = OrderedDict(state_dict)
            cleared = {prefix: {k: v for k, v in local.items() if k != _ASSIGNS} for prefix, local in noted.items()}
            setattr(state_dict, "_metadata", cleared)  # noqa: B010  of which mypy knows nothing
        with self._engine.one_call(), self._engine.states.many():
            return original(state_dict, strict=strict)

    def _save_pretrained(self, original: Callable[..., Any], save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Transformers notes the dtype that the model computes in, and would load in it what is written, the masters."""
        if kwargs.get("push_to_hub"):
            raise ValueError(
                "save_pretrained(push_to_hub=True) would upload a config that names another dtype than the weights have: call "
                "model.push_to_hub(...) instead"
            )
        returned = original(save_directory, *args, **kwargs)
        given = kwargs.get("state_dict", args[1] if len(args) > 1 else None)
        saved = {value.dtype for value in (given or {}).values() if value.is_floating_point()}
        if given is None:
            saved = {slot.master_dtype for slot in self._engine.slots.values()}
        if saved:
            widest = max(saved, key=lambda dtype: dtype.itemsize)
            note_dtype(Path(save_directory), self._compute_dtype, str(widest).removeprefix("torch."))
        return returned

    def _move(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with moving():
            return original(*args, **kwargs)

    def _zero_grad(self, original: Callable[..., None], set_to_none: bool = True) -> None:
        self._engine.drop_gradients()
        self._engine.updates.unkept.clear()
        original(set_to_none)
