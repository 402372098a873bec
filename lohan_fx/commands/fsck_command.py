"""``lohan-fx fsck`` and ``lohan-fx export``: what people do with a checkpoint outside a training.

    lohan-fx fsck /mnt/nvme0 /mnt/nvme1                    compare every byte with its checksum; 1 if any is damaged
    lohan-fx export /mnt/nvme0 --output model.safetensors  the weights, by streaming: memory is one chunk

The directories are those of the run, in its order. Neither changes anything in them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from lohan_fx.checkpoints.plain_json import DTYPES, decoded_tensor
from lohan_fx.errors import StoreError
from lohan_fx.runtime.generation_files import CHECKPOINTS
from lohan_fx.runtime.manifest import ExtentRecord, Manifest
from lohan_fx.runtime.nvme_store import requests_at_once
from lohan_fx.runtime.store_file import STORE_NAME, reported_as_store_error
from lohan_fx.runtime.stored_extents import StoredExtents

SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32",
               "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32",
               "uint64": "U64", "bool": "BOOL", "complex64": "C64"}  # fmt: skip
Add = Callable[..., argparse.ArgumentParser]
T = TypeVar("T")
R = TypeVar("R")


def add_checkpoint_commands(add_parser: Add) -> None:
    """Add both to the commands of ``lohan-fx``."""
    fsck = add_parser("fsck", help="check a checkpoint", description="Compare every byte with its checksum.")
    export = add_parser("export", help="write a checkpoint's weights", description="Write the weights as safetensors.")
    for parser in (fsck, export):
        parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="those of the run, in its order")
    export.add_argument("--output", type=Path, required=True, metavar="FILE.safetensors")
    export.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="(as trained: float32 masters)")
    fsck.set_defaults(run=_fsck)
    export.set_defaults(run=_export)


def _fsck(arguments: argparse.Namespace) -> int:
    with StoredExtents(arguments.directories) as stored:
        for number, error in stored.damaged.items():
            print(f"checkpoint {number}: {error}")
        whole = [manifest.generation for manifest in stored.manifests if not _check(stored, manifest)]
        every = sorted([*stored.damaged, *(manifest.generation for manifest in stored.manifests)])
    if whole == every:
        return 0
    if not whole:
        print(
            "no checkpoint is whole; what is not listed above is, and a damaged compute copy can be made from its master"
        )
    elif whole[-1] == every[-1]:
        print(f"checkpoint {whole[-1]}, the newest, is whole: a resume continues from it")
    else:
        print(f"checkpoint {whole[-1]} is whole: move the files of later ones away to resume from it")
    return 1


def _check(stored: StoredExtents, manifest: Manifest) -> list[str]:
    """Print what is damaged of a checkpoint; the names of the extents."""
    damaged: list[str] = []
    nbytes, chunks = sum(record.padded_bytes for record in manifest.extents.values()), 0
    every = ((name, record, chunk) for name, record in manifest.extents.items() for chunk in range(len(record.sums)))
    largest_bytes = max((min(r.chunk_bytes, r.padded_bytes) for r in manifest.extents.values()), default=0)
    problems = _in_order(functools.partial(_problem, stored), every, requests_at_once(stored.drives, largest_bytes))
    for (name, _, chunk), problem in problems:
        chunks += 1
        if problem is not None:
            damaged.append(name)
            print(f"checkpoint {manifest.generation}: chunk {chunk} of {name!r} {problem}")
    verdict = f"{len(damaged)} of {chunks} chunks are damaged" if damaged else f"all {chunks} chunks are whole"
    step = manifest.state.get("step")
    print(f"checkpoint {manifest.generation} (after step {step}): {nbytes:,} bytes, {verdict}")
    return damaged


def _in_order(call: Callable[[T], R], values: Iterable[T], threads: int) -> Iterator[tuple[T, R]]:
    """Each value with what ``call`` says of it, found for so many at a time."""
    with ThreadPoolExecutor(threads) as pool:
        under_way: deque[tuple[T, Future[R]]] = deque()
        for value in values:
            under_way.append((value, pool.submit(call, value)))
            if len(under_way) > threads:
                first, found = under_way.popleft()
                yield first, found.result()
        for first, found in under_way:
            yield first, found.result()


def _problem(stored: StoredExtents, where: tuple[str, ExtentRecord, int]) -> str | None:
    """What is wrong with a chunk of an extent, if anything."""
    _, record, chunk = where
    try:
        _, good = stored.read(record, chunk)
    except StoreError as error:
        return f"cannot be read: {error}"
    return None if good else f"({stored.place(record, chunk)}) is not what was written"


# --- export -----------------------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> None:
    output: Path = arguments.output
    if output.exists() and not output.is_file():
        raise ValueError(
            f"--output: {output} is no file, and an export ends by taking its place: name a new file, or one to replace"
        )
    if not output.parent.is_dir():
        raise ValueError(f"--output: there is no folder {output.parent}: create it (mkdir -p), or name an existing one")
    folder = output.parent.resolve()
    if folder.name == CHECKPOINTS or ((folder / CHECKPOINTS).is_dir() and output.name == STORE_NAME):
        raise ValueError(f"--output: {output} is, or lies among, the files of a checkpoint: name a file elsewhere")
    # Not by the process's id: an export that was killed in a container has left a file of the one that all have there.
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:12]}.tmp")
    with StoredExtents(arguments.directories) as stored:
        manifest = stored.manifests[-1]
        if max(stored.damaged, default=0) > manifest.generation:
            raise stored.damaged[max(stored.damaged)]
        try:
            with reported_as_store_error(f"writing {output}"):
                with temporary.open("xb") as file:
                    nbytes = write_safetensors(
                        stored, manifest, file, arguments.dtype, free_bytes=shutil.disk_usage(folder).free
                    )
                    os.fsync(file.fileno())
                temporary.replace(output)
        finally:
            temporary.unlink(missing_ok=True)
    print(f"{output}: checkpoint {manifest.generation}, after step {manifest.state.get('step')}, {nbytes:,} bytes")


def write_safetensors(
    stored: StoredExtents, manifest: Manifest, file: BinaryIO, dtype: str | None, *, free_bytes: int | None = None
) -> int:
    """Header, then the tensors one after the other, each a chunk at a time; the bytes written. Raises ``StoreError`` where
    what is read is damaged, or describes no model, and before anything is written where it needs more than ``free_bytes``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    try:
        parameters = [
            (_checked(manifest, entry), dtype or entry["master_dtype"]) for entry in manifest.state["parameters"]
        ]
        buffers = {name: decoded_tensor(saved) for name, saved in manifest.state["buffers"].items()}
        for entry, kind in parameters:
            end = _describe(header, entry["name"], kind, entry["shape"], end)
        for name, buffer in buffers.items():
            end = _describe(header, name, str(buffer.dtype).removeprefix("torch."), list(buffer.shape), end)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StoreError(f"checkpoint {manifest.generation} does not describe a model ({error!r})") from error
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    needed = 8 + len(text) + end
    if free_bytes is not None and needed > free_bytes:
        raise StoreError(
            f"an export of {needed:,} bytes was asked for, and {free_bytes:,} are free there: free {needed - free_bytes:,} "
            "bytes, or name an --output on another drive"
        )
    file.write(len(text).to_bytes(8, "little") + text)
    for entry, kind in parameters:
        for piece in _pieces(stored, manifest, entry):
            file.write(piece.to(DTYPES[kind]).view(torch.uint8).numpy().data)
    for buffer in buffers.values():
        file.write(buffer.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    file.flush()  # or the caller's sync leaves out the end of it, which Python still has
    return needed


def _checked(manifest: Manifest, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """``entry``, which describes a parameter. Raises ``StoreError`` where its master has not the bytes for that."""
    name, shape = entry["name"], entry["shape"]
    nbytes = math.prod(_size(size) for size in shape) * DTYPES[entry["master_dtype"]].itemsize
    record = manifest.extents.get(f"{name}:master")
    if nbytes != (0 if record is None else record.nbytes):
        raise StoreError(f"checkpoint {manifest.generation}: {name!r} is not of the shape {shape}: it is damaged")
    return entry


def _size(size: object) -> int:
    if type(size) is not int or size < 0:
        raise TypeError(f"{size!r} is not a size")
    return size


def _describe(header: dict[str, Any], name: str, dtype: str, shape: list[int], start: int) -> int:
    if dtype not in SAFETENSORS:
        raise StoreError(f"{name!r} is of {dtype}, which safetensors cannot hold: resume, and save it your own way")
    end = start + math.prod(shape) * DTYPES[dtype].itemsize
    header[name] = {"dtype": SAFETENSORS[dtype], "shape": shape, "data_offsets": [start, end]}
    return end


def _pieces(stored: StoredExtents, manifest: Manifest, entry: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The master of a parameter, flat, chunk by chunk. Raises ``StoreError`` where one is damaged."""
    name, dtype = f"{entry['name']}:master", DTYPES[entry["master_dtype"]]
    record = manifest.extents.get(name)
    for chunk in range(len(record.sums)) if record is not None else ():
        assert record is not None
        data, good = stored.read(record, chunk)
        if not good:
            raise StoreError(f"chunk {chunk} of {name!r} is damaged ({stored.place(record, chunk)}): see lohan-fx fsck")
        used = min(len(data), record.nbytes - chunk * record.chunk_bytes)
        yield torch.frombuffer(data, dtype=torch.uint8)[:used].view(dtype)
