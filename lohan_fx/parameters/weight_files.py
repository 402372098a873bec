"""weight_files: the weights of a model in safetensors files, read piece by piece.

Guarantees: memory is one piece of ``PIECE_BYTES``, whatever the files hold; files are read, never mapped, so that they
do not count as the process's memory. Every name, shape and dtype is known, and every offset checked, before a byte of
weights is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PIECE_BYTES = 8 << 20
MOST_HEADER_BYTES = 100_000_000
"""What safetensors itself allows."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

Weights = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file: ``offset_bytes`` from its beginning."""

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, flat values), one piece after the other. Raises ``ValueError`` where the file got shorter."""
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset_bytes)
            for start in range(0, self.nbytes, PIECE_BYTES):
                piece = torch.empty(min(PIECE_BYTES, self.nbytes - start), dtype=torch.uint8)
                filled = 0
                while filled < piece.numel():
                    got = file.readinto(piece.numpy()[filled:])
                    if not got:
                        raise ValueError(f"{self.path} ended within {self.name}: it changed while it was read")
                    filled += got
                yield start // self.dtype.itemsize, piece.view(self.dtype)

    def whole(self) -> torch.Tensor:
        """The tensor in memory."""
        value = torch.empty(math.prod(self.shape), dtype=self.dtype)
        for start, piece in self.pieces():
            value[start : start + piece.numel()] = piece
        return value.view(self.shape)


def open_weights(weights: Weights) -> dict[str, StoredTensor]:
    """All tensors of ``weights`` by name: a .safetensors file, several, or a folder with one, or with shards and their
    index (``model.safetensors.index.json``). Raises ``ValueError`` that names what is missing or damaged."""
    found: dict[str, StoredTensor] = {}
    for path in _files(weights):
        for name, stored in _tensors(path).items():
            if name in found:
                raise ValueError(f"{name} is both in {found[name].path} and in {path}: name the files of one model")
            found[name] = stored
    return found


def _files(weights: Weights) -> list[Path]:
    if isinstance(weights, str | Path):
        weights = [weights]
    if not isinstance(weights, Sequence) or not weights or not all(isinstance(w, str | Path) for w in weights):
        raise TypeError(f"weights is {weights!r}: expected a .safetensors file, several, or a folder with them")
    if "" in weights:
        raise ValueError("weights has an empty text: name a file or a folder ('.' is where the process runs)")
    files: list[Path] = []
    for path in map(Path, weights):
        files += _of_folder(path) if path.is_dir() else [path]
    for path in files:
        if not path.is_file():
            raise ValueError(f"weights: there is no file {path}")
        if path.name.endswith(".safetensors.index.json"):
            raise ValueError(f"weights: {path} is the index of shards: name its folder, {path.parent}")
        if path.suffix != ".safetensors":
            raise ValueError(f"weights: {path} is not a .safetensors file: convert it (nothing is ever unpickled here)")
    return files


def _of_folder(folder: Path) -> list[Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if indices:
        index = folder / "model.safetensors.index.json" if len(indices) > 1 else indices[0]
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            shards = sorted(folder / str(name) for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"weights: {index} is not an index of safetensors shards ({error!r})") from error
        outside = [shard for shard in shards if shard.parent != folder]
        if outside:
            raise ValueError(f"weights: {index} leads out of its folder, to {outside[0]}")
        return shards
    whole = folder / "model.safetensors"
    found = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"weights: there is no .safetensors file in {folder}")
    return found


def _tensors(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(MOST_HEADER_BYTES, size - 8):
                raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
            header: Mapping[str, Any] = json.loads(file.read(header_bytes))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        other = {name: str(entry["dtype"]) for name, entry in entries.items() if entry["dtype"] not in DTYPES}
        found = {n: _tensor(n, entry, path, 8 + header_bytes, size) for n, entry in entries.items() if n not in other}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"weights: {path} is damaged or no safetensors file: {error}") from error
    if other:
        name, dtype = next(iter(other.items()))
        raise ValueError(
            f"weights: {path} has {name} in {dtype}, which is not supported: save the model in one of {', '.join(DTYPES)} "
            "(quantised weights dequantised first)"
        )
    return found


def _tensor(name: str, entry: Mapping[str, Any], path: Path, data_offset: int, size: int) -> StoredTensor:
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int and n >= 0 for n in (start, end, *shape)):
        raise ValueError(f"{name} has shape {shape} and offsets {start}, {end}")
    stored = StoredTensor(name, path, DTYPES[entry["dtype"]], shape, data_offset + start)
    if end - start != stored.nbytes or data_offset + end > size:
        raise ValueError(f"{name}, {entry['dtype']} {shape}, from byte {start} to {end} of {size - data_offset}")
    return stored
