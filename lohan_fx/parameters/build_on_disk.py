"""build_on_disk: build a model exactly as on the CPU, in memory that is a file.

A model's constructor draws random numbers in its own order, looks into tensors and overwrites them; only executing it
gives its numbers. So within ``with build_on_disk(folder):`` it is executed, and every tensor of a megabyte or more lies
in an unlinked file there: the numbers are the same bit for bit, and pages that were written leave RAM by and by.
``lohan_fx.compile`` takes the model over as any other. Costs the model's size on disk once, until it is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

LEAST_BYTES = 1 << 20
MOST_RESIDENT_BYTES = 256 << 20
"""When so much was made since pages were given up last, they are given up."""

Region = ctypes.Array[ctypes.c_uint8]

_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
"""Of the storages in files, by address: their memory, which they alone keep."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _OnDisk(TorchDispatchMode):
    def __init__(self, folder: Path, least_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folder = folder
        self._least_bytes = least_bytes
        self._made_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default) and _on_cpu(kwargs):
            # Memory is not needed to know the geometry.
            found = func(*args, **{**kwargs, "device": torch.device("meta"), "pin_memory": None})
            if found.untyped_storage().nbytes() >= self._least_bytes:
                return self._moved(found)
        known = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}

        def moved(out: Any) -> Any:
            large = isinstance(out, torch.Tensor) and out.device.type == "cpu" and out.layout == torch.strided
            if not large or _address(out) in known or out.untyped_storage().nbytes() < self._least_bytes:
                return out
            return self._moved(out)

        return tree_map(moved, func(*args, **kwargs))

    def _moved(self, t: torch.Tensor) -> torch.Tensor:
        """``t`` in a file; of one on ``meta`` only the geometry."""
        nbytes = t.untyped_storage().nbytes()
        with tempfile.TemporaryFile(dir=self._folder) as file:
            self._allocate(file.fileno(), nbytes)
            region = _mapped(file.fileno(), nbytes)
        storage = torch.frombuffer(region, dtype=torch.uint8).untyped_storage()
        value = torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())
        if t.device.type == "cpu":
            value.copy_(t)
        _regions[storage._cdata] = region
        self._made_bytes += nbytes
        if self._made_bytes > MOST_RESIDENT_BYTES:
            self._made_bytes = 0
            _forget_all_pages()
        return value

    def _allocate(self, fd: int, nbytes: int) -> None:
        # A sparse file's page that finds no room later ends the process by a signal.
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            asked = f"{error.strerror}: build_on_disk asked for {nbytes:,} bytes; name a folder with room for the model"
            raise OSError(error.errno, asked, str(self._folder)) from error


@contextlib.contextmanager
def build_on_disk(folder: str | Path, *, least_bytes: int = LEAST_BYTES) -> Iterator[None]:
    """Build a model in here, and its large tensors lie in files in ``folder`` instead of in RAM.

        torch.manual_seed(0)
        with lohan_fx.build_on_disk("/mnt/nvme0"):
            model = GPT2LMHeadModel(config)
        lohan_fx.compile(model, hw)

    The numbers, and the generator afterwards, are those of building it without this. ``folder`` must have room for the
    model's parameters as built; the files have no names, and their space is free again when the tensors are gone. What other
    threads make, and what ``from_pretrained`` loads, is not in them: ``compile(..., weights=...)`` reads weights in pieces.

    ``least_bytes``: smaller tensors stay in RAM. Raises ``ValueError`` if ``folder`` is not a directory or ``least_bytes`` is
    below 1, ``OSError`` if its disk is full.
    """
    if folder == "":
        raise ValueError("build_on_disk: the folder is an empty text: name one ('.' is where the process runs)")
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"build_on_disk: {folder} is not a directory: make it, on a drive with room for the model")
    if least_bytes < 1:  # a file cannot hold nothing
        raise ValueError(f"build_on_disk: least_bytes is {least_bytes}: expected at least 1")
    with _OnDisk(folder, least_bytes):
        yield
    _forget_all_pages()


def is_building() -> bool:
    """Whether this thread is in a ``with build_on_disk(...)``."""
    return any(isinstance(mode, _OnDisk) for mode in _get_current_dispatch_mode_stack())


def in_file(t: torch.Tensor) -> bool:
    """Whether ``t`` lies in a file."""
    return _address(t) in _regions


def forget_pages(t: torch.Tensor) -> None:
    """Give up the RAM of ``t`` if it is in a file; its values stay."""
    if (region := _regions.get(_address(t))) is not None:
        _forget(region)


def _forget_all_pages() -> None:
    for found in _regions.valuerefs():  # a list of its own: other threads build models, too
        if (region := found()) is not None:
            _forget(region)


def _forget(region: Region) -> None:
    # The file keeps what a shared mapping wrote.
    _libc.madvise(ctypes.addressof(region), len(region), mmap.MADV_DONTNEED)


def _mapped(fd: int, nbytes: int) -> Region:
    """Memory that is the file of ``fd``, until nothing refers to it. ``mmap.mmap`` would keep a descriptor each, and a process
    may have as few as 1024."""
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}: build_on_disk asked to map {nbytes:,} bytes")
    region = (ctypes.c_uint8 * nbytes).from_address(address)
    weakref.finalize(region, _libc.munmap, address, nbytes).atexit = False  # tensors may live on until the very end
    return region


def _address(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout == torch.strided else 0


def _on_cpu(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") in (None, torch.device("cpu")) and kwargs.get("layout") in (None, torch.strided)
