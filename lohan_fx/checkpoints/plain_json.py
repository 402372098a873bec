"""plain_json: Python values as JSON and back, exactly; nothing that is read is executed.

Numbers, text, booleans, None, lists and dicts with text keys are themselves. Tuples, other dicts, Counters and small
tensors are objects with one key that begins with "@". Everything else is refused by name.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.complex64,
                  torch.complex128)
}  # fmt: skip


_MOST_DEEP = 200
"""``decoded`` takes two frames of Python's for each, and who calls it some hundred."""


def encoded(value: object, what: str) -> Any:
    """``value`` as what ``json.dumps`` takes. Raises ``TypeError``, which names the place in ``what``, and ``ValueError`` for
    what contains itself."""
    with suppress(RecursionError):
        found = _encoded(value, what)
        if not _is_deeper(found, _MOST_DEEP):
            return found
    raise ValueError(f"{what} contains itself, or is nested too deep to be read again: a checkpoint cannot hold it")


def _is_deeper(value: Any, most: int) -> bool:
    """Whether what ``json.dumps`` takes has more than so many lists and objects in each other."""
    level = [value]
    for _ in range(most + 1):
        inside = [item for item in level if isinstance(item, list | dict)]
        level = [part for item in inside for part in (item if isinstance(item, list) else item.values())]
        if not inside:
            return False
    return True


def _encoded(value: object, what: str) -> Any:
    match value:
        case None | bool() | str():
            return value
        case int() | float():
            # Subclasses (enums, numpy's float64) would come back as something else than they look like.
            return float(value) if isinstance(value, float) else int(value)
        case np.generic() if not isinstance(value.item(), np.generic):  # as of longdouble, of which Python has none
            return _encoded(value.item(), what)
        case list():
            return [_encoded(item, f"{what}[{index}]") for index, item in enumerate(value)]
        case tuple():
            return {"@tuple": [_encoded(item, f"{what}[{index}]") for index, item in enumerate(value)]}
        case Mapping():
            return _encoded_dict(value, what)
        case np.ndarray() if value.dtype.name in DTYPES:
            # A copy: torch takes no negative strides, nor bytes of the other order.
            value = np.array(value, dtype=value.dtype.newbyteorder("="))
            return {"@tensor": encoded_tensor(torch.from_numpy(value), what)}
        case torch.Tensor():
            return {"@tensor": encoded_tensor(value, what)}
    raise TypeError(
        f"{what} is a {type(value).__name__}: a checkpoint holds numbers, text, booleans, None, and lists, tuples, dicts "
        "and tensors of them; keep anything else in a file of your own"
    )


def _encoded_dict(value: Mapping[Any, Any], what: str) -> dict[str, Any]:
    if type(value) is not Counter and all(isinstance(key, str) and not key.startswith("@") for key in value):
        return {key: _encoded(item, f"{what}.{key}") for key, item in value.items()}
    pairs = [[_encoded(key, f"a key of {what}"), _encoded(item, f"{what}[{key!r}]")] for key, item in value.items()]
    return {"@counter" if type(value) is Counter else "@dict": pairs}


def encoded_tensor(value: torch.Tensor, what: str) -> dict[str, Any]:
    """Dtype, shape, and the bytes as base64."""
    name = str(value.dtype).removeprefix("torch.")
    if name not in DTYPES or value.layout != torch.strided or value.is_meta:
        raise TypeError(
            f"{what} is a tensor of {value.dtype}, {value.layout}, on {value.device}: a checkpoint holds dense ones, in memory, "
            f"of {', '.join(DTYPES)}"
        )
    dense = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,))  # a single element counts as contiguous whatever its stride
    return {
        "dtype": name,
        "shape": list(value.shape),
        "data": base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode() if flat.numel() else "",
    }


def decoded(value: Any) -> Any:
    """What ``encoded`` was given. Raises ``ValueError`` for what it never returns."""
    if isinstance(value, list):
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key == "@tensor":
            return decoded_tensor(inner)
        if key.startswith("@") and isinstance(inner, list):
            items = [decoded(item) for item in inner]
            if key == "@tuple":
                return tuple(items)
            if key in ("@dict", "@counter"):
                return _decoded_pairs(items, Counter() if key == "@counter" else {})
    if any(key.startswith("@") for key in value):
        raise ValueError(f"unknown kind of value: {', '.join(value)}")
    return {key: decoded(item) for key, item in value.items()}


def _decoded_pairs(pairs: list[Any], found: dict[Any, Any]) -> dict[Any, Any]:
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError("a dict is not pairs of key and value")
        try:
            found[pair[0]] = pair[1]
        except TypeError as error:
            raise ValueError(f"{pair[0]!r} cannot be the key of a dict") from error
    return found


def decoded_tensor(value: Any) -> torch.Tensor:
    """A tensor on the CPU. Raises ``ValueError`` where dtype, shape and bytes do not agree."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, data = DTYPES.get(str(fields.get("dtype"))), fields.get("shape"), fields.get("data")
    good = isinstance(shape, list) and all(type(size) is int and 0 <= size < 1 << 40 for size in shape)
    if dtype is None or not good or not isinstance(data, str):
        raise ValueError("a tensor has no dtype, shape and data")
    assert isinstance(shape, list)
    raw = bytearray(base64.b64decode(data, validate=True))
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of {dtype} and shape {shape} has {len(raw)} bytes")
    try:
        return torch.frombuffer(raw, dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
    except (RuntimeError, OverflowError) as error:  # sizes beside a zero may be of any size
        raise ValueError(f"a tensor of shape {shape} cannot be: {error}") from error
