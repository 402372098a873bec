"""model_source: the model that a command names: a preset, a Hugging Face config, or a function in a file."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lohan_fx.models import dit
from lohan_fx.models.model_families import Family, build, model_from_config
from lohan_fx.models.model_presets import MODELS, ModelDims, named

DEFAULT_TOKENS = 1024
LARGEST = {"num_hidden_layers": 10_000, "hidden_size": 1 << 20, "num_attention_heads": 1 << 14, "vocab_size": 1 << 26}
"""Beyond these a config is absurd, not large."""
LARGEST_OF_OTHERS = dict.fromkeys(
    ("intermediate_size", "num_key_value_heads", "max_position_embeddings", "n_positions", "head_dim"), 1 << 30
) | {"num_labels": 1 << 20}
"""Of settings that a config may leave out. Transformers makes a name for each label."""


_ASKING = {"batch": "--batch, --best-batch and --vary batch", "seq": "--seq and --vary seq"}
"""The options by which a function is given an argument."""


class UserCodeError(ValueError):
    """A function of the user's file raised; ``__cause__`` is what."""


@dataclass(frozen=True)
class Example:
    """A model on ``meta`` with inputs; ``unit``: what a step counts besides samples ("tokens", "images", "samples");
    ``notes``: what the user should know of the model."""

    model: nn.Module
    inputs: Mapping[str, Any]
    samples: int
    tokens: int
    unit: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelSource:
    """``make(batch, seq)`` builds the model anew; ``dims`` where it is a preset, ``is_code`` where the user's function
    makes it."""

    name: str
    make: Callable[[int | None, int | None], Example]
    dims: ModelDims | None = None
    is_code: bool = False


def source_of(spec: str) -> ModelSource:
    """What ``--model`` names. Raises ``ValueError`` that says what was expected."""
    if ".py:" in spec or spec.endswith((".py", ":")):
        return ModelSource(spec, lambda batch, seq: _of_function(spec, batch, seq), is_code=True)
    path = Path(spec)
    if path.is_dir() or (path.is_file() and path.suffix == ".json"):
        return _of_config(path / "config.json" if path.is_dir() else path)
    if path.is_file() and spec not in MODELS:
        raise ValueError(
            f"--model: {spec} is a file, but no .json: expected a folder with a config.json, a preset or FILE.py:FUNCTION"
        )
    if os.sep in spec and spec not in MODELS:
        raise ValueError(
            f"--model: there is no folder {spec}: expected one with a config.json, a preset or FILE.py:FUNCTION"
        )
    dims = named(spec)
    return ModelSource(spec, lambda batch, seq: _of_preset(dims, batch, seq), dims)


# --- presets and configs --------------------------------------------------------------------------------------


def _of_preset(dims: ModelDims, batch: int | None, seq: int | None) -> Example:
    if dims.family is not Family.DIT:
        return _language_model(lambda: build(dims), dims.name, batch, seq, dims.positions)
    if seq not in (None, dims.tokens):
        raise ValueError(
            f"--seq is {seq}: a sample of {dims.name} has {dims.tokens} tokens, which its image of {dims.image} x "
            f"{dims.image} pixels makes; leave --seq out"
        )
    batch = batch or 1
    inputs = dit.example_inputs(batch, dims.image // 8, dims.channels)
    return Example(build(dims), inputs, batch, batch * dims.tokens, "images")


def _language_model(
    make: Callable[[], nn.Module], name: str, batch: int | None, seq: int | None, positions: int | None
) -> Example:
    model = make()
    positions = min((places for places in (positions, _places(model)) if places), default=None)
    batch, seq = batch or 1, seq or min(DEFAULT_TOKENS, positions or DEFAULT_TOKENS)
    if positions and seq > positions:
        raise ValueError(f"--seq is {seq}: {name} has positions for {positions}; choose a shorter sequence")
    tokens = {key: torch.zeros(batch, seq, dtype=torch.long) for key in ("input_ids", "labels")}
    return Example(model, tokens, batch, batch * seq, "tokens")


def _places(model: nn.Module) -> int | None:
    """How many tokens a model of RoBERTa's kind has positions for: they are counted from the one after the padding's."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    return None


def _of_config(path: Path) -> ModelSource:
    raw = _read_config(path)
    config = _checked_config(path, raw)

    def make(batch: int | None, seq: int | None) -> Example:
        positions = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)  # MPT's
        positions = None if positions == -1 else positions  # XLNet's word for no limit
        example = _language_model(lambda: _built(path, config), str(path), batch, seq, positions)
        return dataclasses.replace(example, notes=_notes_on(raw))

    return ModelSource(path.resolve().parent.name if path.name == "config.json" else path.stem, make)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"--model: there is no {path}: expected the config.json of a Hugging Face model")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON of a config: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object with a model's settings, found {type(raw).__name__}")
    return raw


def _notes_on(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """That the weights beside the config are quantized, which says nothing of the model that is built from it."""
    quantized = raw.get("quantization_config") or raw.get("compression_config")
    if not quantized:
        return ()
    method = quantized.get("quant_method") if isinstance(quantized, dict) else None
    return (
        f"the config is of quantized weights{f' ({method})' if method else ''}, which this plan does not count: it trains every "
        "parameter of the same model unquantized",
    )


def _special_float(found: dict[str, Any]) -> Any:
    """Transformers saves infinity, as of Bamba's steps, as ``{"__float__": "Infinity"}``."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _checked_config(path: Path, raw: dict[str, Any]) -> Any:
    """The config, its main sizes checked before a model is built from them."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError as error:
        raise ImportError("a Hugging Face config needs transformers: pip install 'lohan-fx[hf]'") from error
    kind = raw.get("model_type")
    if kind is None or kind == "":
        raise ValueError(f'{path} has no "model_type": expected one such as "llama" or "gpt2"')
    if not isinstance(kind, str):
        raise ValueError(f'{path}: "model_type" is {kind!r}: expected a name such as "llama" or "gpt2"')
    if kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(kind, CONFIG_MAPPING.keys(), n=3, cutoff=0.6)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f'{path}: this version of transformers knows no "model_type" {kind!r}{hint}')
    kind_of_config = CONFIG_MAPPING[kind]
    for field, largest in LARGEST.items():
        name = field if field in raw else kind_of_config.attribute_map.get(field, field)
        if name not in raw:
            raise ValueError(f'{path} has no "{name}": {_remedy(raw, kind_of_config, field)}')
        _check_size(path, name, raw[name], largest)
    for name, largest in LARGEST_OF_OTHERS.items():
        for size in _each(raw.get(name)):
            _check_size(path, name, size, largest)
    for name, value in raw.items():
        if name.endswith(("dropout", "_pdrop")):
            _check_share(path, name, value)
    heads, groups = raw.get("num_attention_heads"), raw.get("num_key_value_heads")
    if heads is not None and isinstance(groups, int) and heads % groups:
        raise ValueError(
            f'{path}: "num_key_value_heads" is {groups}, which does not divide the {heads} of "num_attention_heads"'
        )
    try:
        config = kind_of_config.from_dict(raw)
    except Exception as error:
        raise ValueError(f"{path}: transformers refuses this config: {_one_line(error)}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{path}: {kind!r} has an encoder and a decoder, and from a config only causal language models are planned: give "
            "--model FILE.py:FUNCTION, which returns the model and its inputs"
        )
    return config


def _remedy(raw: Mapping[str, Any], kind_of_config: type, field: str) -> str:
    """What to do about a config that does not say how large its model is."""
    if isinstance(raw.get("text_config"), dict):
        return 'without it no model is planned; its "text_config", as a config.json of its own, can be'
    try:
        usual = getattr(kind_of_config(), field, None)
    except Exception:  # one that has no defaults
        usual = None
    if isinstance(usual, int) and not isinstance(usual, bool):
        return f"add it; transformers takes {usual} where it is missing"
    return "from a config only causal language models with attention are planned; give --model FILE.py:FUNCTION"


def _check_size(path: Path, name: str, value: object, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise ValueError(f'{path}: "{name}" is {value!r}: expected a whole number from 1 to {largest:,}')


def _each(value: object) -> list[Any]:
    """Some families have a size for each layer."""
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _check_share(path: Path, name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1):
        raise ValueError(f'{path}: "{name}" is {value!r}: expected a share from 0 to 1')


def _built(path: Path, config: Any) -> nn.Module:
    try:
        return model_from_config(config)
    except Exception as error:
        if "Unrecognized configuration class" in str(error):  # then comes a list of all that there are
            raise ValueError(
                f"{path}: {config.model_type!r} is no causal language model to transformers, and from a config only those are "
                "planned: give --model FILE.py:FUNCTION, which returns the model and its inputs"
            ) from error
        raise ValueError(
            f"{path}: transformers cannot build a causal language model from it: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    """What is wrong often stands below the first line; of a ``KeyError`` the text is only the key."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = f"{type(error).__name__}: " if isinstance(error, KeyError) or not lines else ""
    return f"{kind}{' '.join(lines[:3])}"[:300]


# --- functions ------------------------------------------------------------------------------------------------


def _of_function(spec: str, batch: int | None, seq: int | None) -> Example:
    with torch.device("meta"):
        model, inputs = example_of(spec, batch=batch, seq=seq)
    tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor) and value.dim()]
    if not tensors:
        raise ValueError(f"{spec} gave the model no tensor: expected inputs such as input_ids of shape (batch, seq)")
    first = tensors[0]
    if not first.numel():
        raise ValueError(f"{spec} gave the model a tensor of shape {tuple(first.shape)}: expected at least one sample")
    is_text = first.dim() == 2 and not first.is_floating_point()
    samples = first.shape[0]
    return Example(model, inputs, samples, first.numel() if is_text else samples, "tokens" if is_text else "samples")


def example_of(
    spec: str, *, batch: int | None = None, seq: int | None = None
) -> tuple[nn.Module, Mapping[str, object]]:
    """The model and its inputs, from ``FILE.py:FUNCTION``, which is given the ``batch`` and ``seq`` that it takes.

    Raises ``UserCodeError`` where the file or the function raises, ``ValueError`` or ``TypeError`` for the rest.
    """
    file, colon, function = spec.rpartition(":")
    if not colon or not file or not function:
        raise ValueError(f"--model is {spec!r}: expected FILE.py:FUNCTION")
    path = Path(file).resolve()
    if not path.is_file():
        raise ValueError(f"--model: there is no file {file}")
    make = _loaded(path, function)
    given = {name: value for name, value in (("batch", batch), ("seq", seq)) if value is not None}
    _check_call(spec, make, given)
    try:
        found = make(**given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        shape = f" with {', '.join(f'{name}={value}' for name, value in given.items())}" if given else ""
        raise UserCodeError(f"{spec}{shape} failed: {type(error).__name__}: {error}") from error
    if not (isinstance(found, tuple) and len(found) == 2):
        raise TypeError(f"{spec} returned {type(found).__name__}: expected a pair (model, inputs as dict)")
    model, inputs = found
    if not isinstance(model, nn.Module) or not isinstance(inputs, Mapping):
        raise TypeError(
            f"{spec} returned ({type(model).__name__}, {type(inputs).__name__}): expected (torch.nn.Module, dict)"
        )
    if not all(isinstance(name, str) for name in inputs):
        raise TypeError(f"{spec} returned inputs called {list(inputs)}: expected the names of the forward's arguments")
    return model, inputs


def _check_call(spec: str, make: Callable[..., object], given: Mapping[str, int]) -> None:
    """Refuse a function that cannot be called with just what is ``given``."""
    try:
        signature = inspect.signature(make)
    except ValueError:  # some that are written in C have none
        return
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for name, value in given.items():
        if name not in signature.parameters and not takes_all:
            raise ValueError(
                f"{name}={value} is asked for, but {spec} decides that itself: let the function take {name!r}, or leave out "
                f"{_ASKING[name]}"
            )
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ValueError(
            f"{spec} cannot be called: {error}; it is given 'batch' and 'seq' by name, where --batch and --seq are"
        ) from error


def _loaded(path: Path, function: str) -> Callable[..., object]:
    """``function`` of the Python file at ``path``, which may import its neighbours."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    if found is None or found.loader is None:
        raise ValueError(f"--model: {path} is not a Python file")
    module = importlib.util.module_from_spec(found)
    # Registered, as an import would: classes of the model are looked up by the name of their module.
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent))
    try:
        found.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserCodeError(f"--model: {path} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    make: object = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"--model: {path} has no function {function!r}")
    return make
