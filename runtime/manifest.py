"""manifest: the file that is a checkpoint: which slot of each chunk is of it, checksums, and the training's own state.

One line (``lohan_fx.checkpoint <version> <XXH3-128 of the rest>``), then JSON; arrays of numbers in it are base64 of
little-endian integers. Nothing is executed or unpickled. Pure: bytes in, bytes out.

Guarantees: ``Manifest.from_bytes`` returns a manifest whose places all lie in the files it names, do not overlap and
cover their extents, or raises ``StoreError``; whatever the bytes.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from lohan_fx.errors import StoreError
from lohan_fx.runtime.host_pool import PAGE_BYTES, page_padded_bytes
from lohan_fx.runtime.striping import Piece
from lohan_fx.runtime.versions import SlotNumbers, Sums

MAGIC = "lohan_fx.checkpoint"
VERSION = 1
MAX_BYTES = 1 << 60
MAX_SLOTS = 17

_HEADER = re.compile(rb"lohan_fx\.checkpoint ([0-9]{1,9}) ([0-9a-f]{32})")


@dataclass(frozen=True, eq=False)
class ExtentRecord:
    """One extent: its size, and per chunk the slot and the checksum; ``slots`` are the pieces of each slot."""

    nbytes: int
    chunk_bytes: int
    slots: tuple[tuple[Piece, ...], ...]
    current: SlotNumbers
    sums: Sums

    @property
    def padded_bytes(self) -> int:
        return page_padded_bytes(self.nbytes)


@dataclass(frozen=True)
class Manifest:
    """``run`` names the store (all generations of one have the same); ``file_bytes`` is the size of each of its files.

    ``state`` is the training's: plain JSON, which the runtime does not look into.
    """

    run: str
    generation: int
    keep: int
    file_bytes: tuple[int, ...]
    extents: Mapping[str, ExtentRecord]
    state: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file's contents."""
        body = {
            "run": self.run,
            "generation": self.generation,
            "keep": self.keep,
            "file_bytes": list(self.file_bytes),
            "extents": {name: _encoded(extent) for name, extent in self.extents.items()},
            "state": self.state,
        }
        return sealed(json.dumps(body, separators=(",", ":")).encode())

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Raises ``StoreError``, which names ``where``, for anything that is not a manifest this version can read."""
        body = _opened(data, where)
        try:
            return _manifest(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where} is damaged: {error}; lohan-fx fsck says which checkpoint is whole") from error


def sealed(body: bytes) -> bytes:
    """``body`` under the line that names the format and its checksum."""
    return f"{MAGIC} {VERSION} {xxhash.xxh3_128_hexdigest(body)}\n".encode() + body


def _opened(data: bytes, where: str) -> bytes:
    header, _, body = data.partition(b"\n")
    found = _HEADER.fullmatch(header)
    if found is None:
        raise StoreError(f"{where} is not a checkpoint of lohan_fx: it was left as it is; name another directory")
    if int(found.group(1)) != VERSION:
        raise StoreError(
            f"{where} is of format {int(found.group(1))}, this lohan_fx reads format {VERSION}: it was left as it is; "
            "install the version that wrote it"
        )
    if xxhash.xxh3_128_hexdigest(body).encode() != found.group(2):
        raise StoreError(
            f"{where} is damaged: its checksum does not match; lohan-fx fsck says which checkpoint is whole"
        )
    return body


def _encoded(extent: ExtentRecord) -> dict[str, Any]:
    rows = [[(p.start_bytes, p.nbytes, p.file_index, p.file_offset_bytes) for p in slot] for slot in extent.slots]
    return {
        "nbytes": extent.nbytes,
        "chunk_bytes": extent.chunk_bytes,
        "slots": [_text(np.array(slot, "<i8").reshape(-1, 4)) for slot in rows],
        "current": _text(extent.current.astype("<u1")),
        "sums": _text(extent.sums.astype("<u8")),
    }


def _text(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


# --- reading: everything is checked, since nothing says who wrote it --------------------------------------------


def _manifest(body: object) -> Manifest:
    fields = _object(body, "the manifest")
    run, state = fields.get("run"), _object(fields.get("state"), "state")
    if not isinstance(run, str) or not re.fullmatch(r"[0-9a-f]{32}", run):
        raise ValueError("run is not 32 hexadecimal digits")
    sizes = fields.get("file_bytes")
    if not isinstance(sizes, list) or not 1 <= len(sizes) <= 1024:
        raise ValueError("file_bytes is not a list of sizes")
    file_bytes = tuple(_number(size, "file_bytes", 0, MAX_BYTES) for size in sizes)
    keep = _number(fields.get("keep"), "keep", 1, MAX_SLOTS - 1)
    found = _object(fields.get("extents"), "extents")
    extents = {name: _extent(_object(record, name), name, keep + 1) for name, record in found.items()}
    _check_places([slot for extent in extents.values() for slot in extent.slots], file_bytes)
    return Manifest(
        run, _number(fields.get("generation"), "generation", 1, 10**12 - 1), keep, file_bytes, extents, state
    )


def _extent(fields: Mapping[str, Any], name: str, slot_count: int) -> ExtentRecord:
    nbytes = _number(fields.get("nbytes"), f"{name}: nbytes", 1, MAX_BYTES)
    chunk_bytes = _number(fields.get("chunk_bytes"), f"{name}: chunk_bytes", PAGE_BYTES, MAX_BYTES)
    if chunk_bytes % PAGE_BYTES:
        raise ValueError(f"{name}: chunk_bytes is {chunk_bytes}, not whole pages")
    slots = fields.get("slots")
    if not isinstance(slots, list) or len(slots) != slot_count:
        raise ValueError(f"{name}: it does not have {slot_count} slots")
    padded = page_padded_bytes(nbytes)
    chunks = -(-padded // chunk_bytes)
    current = _array(fields.get("current"), "<u1", f"{name}: current")
    sums = _array(fields.get("sums"), "<u8", f"{name}: sums")
    if len(current) != chunks or len(sums) != chunks:
        raise ValueError(f"{name}: {len(current)} slot numbers and {len(sums)} checksums for {chunks} chunks")
    if current.max() >= slot_count:
        raise ValueError(f"{name}: a chunk is in slot {current.max()} of {slot_count}")
    pieces = tuple(_pieces(slot, padded, name) for slot in slots)
    return ExtentRecord(nbytes, chunk_bytes, pieces, current.astype(np.uint8), sums.astype(np.uint64))


def _pieces(text: object, padded_bytes: int, name: str) -> tuple[Piece, ...]:
    numbers = _array(text, "<i8", f"{name}: slots")
    if len(numbers) % 4:
        raise ValueError(f"{name}: a slot is not rows of four numbers")
    pieces = tuple(Piece(*map(int, row)) for row in numbers.reshape(-1, 4))
    end = 0
    for piece in pieces:
        if piece.start_bytes != end or piece.nbytes <= 0 or piece.nbytes > MAX_BYTES:
            raise ValueError(f"{name}: the pieces of a slot do not follow each other")
        end += piece.nbytes
    if end != padded_bytes:
        raise ValueError(f"{name}: a slot has {end} bytes, the extent {padded_bytes}")
    return pieces


def _check_places(slots: Sequence[tuple[Piece, ...]], file_bytes: Sequence[int]) -> None:
    pieces = sorted((piece for slot in slots for piece in slot), key=lambda p: (p.file_index, p.file_offset_bytes))
    for piece in pieces:
        if not 0 <= piece.file_index < len(file_bytes):
            raise ValueError(f"a piece is in file {piece.file_index} of {len(file_bytes)}")
        start = piece.file_offset_bytes
        if start % PAGE_BYTES or piece.nbytes % PAGE_BYTES or start < 0:
            raise ValueError(f"a piece of {piece.nbytes} bytes at {start} is not whole pages")
        if start + piece.nbytes > file_bytes[piece.file_index]:
            raise ValueError(f"a piece of {piece.nbytes} bytes at {start} is beyond the end of its file")
    for one, other in pairwise(pieces):
        if one.file_index == other.file_index and one.file_offset_bytes + one.nbytes > other.file_offset_bytes:
            raise ValueError(f"two pieces overlap at {other.file_offset_bytes} of file {one.file_index}")


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return value


def _number(value: object, what: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{what} is not a number from {least} to {most}")
    return value


def _array(text: object, dtype: str, what: str) -> npt.NDArray[Any]:
    if not isinstance(text, str):
        raise ValueError(f"{what} is not text")
    data = base64.b64decode(text, validate=True)
    if not data or len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{what} has {len(data)} bytes")
    return np.frombuffer(data, dtype)
