"""store_arguments: what a store may be asked for, and the words by which it refuses the rest."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from lohan_fx.runtime.file_backend import is_memory_backed
from lohan_fx.runtime.host_pool import PAGE_BYTES
from lohan_fx.runtime.store_file import StoreFile

_LOG = logging.getLogger(__name__)


def memory_of(buffer: torch.Tensor, length: int, what: str, *, aligned: bool, at: int = 0) -> memoryview:
    """``length`` bytes of ``buffer`` itself from byte ``at`` on; valid while the caller holds the tensor."""
    if buffer.dtype != torch.uint8 or buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise ValueError(
            f"{what}: the buffer is a {'' if buffer.is_contiguous() else 'non-'}contiguous {buffer.dtype} tensor on "
            f"{buffer.device}; pass a contiguous torch.uint8 tensor on cpu"
        )
    if not 0 <= at <= buffer.numel() - length:
        has = f"this one has {buffer.numel()}" + (f", from byte {at} on" if at else "")
        raise ValueError(f"{what}: whole pages need a buffer of {length} bytes, {has}")
    address = buffer.data_ptr() + at
    if aligned and address % PAGE_BYTES:
        raise ValueError(
            f"{what}: O_DIRECT needs a page-aligned buffer, this one is at {address:#x}; take it from the HostPool"
        )
    if length == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def check_striping(directories: Sequence[Path], weights: Sequence[float], stripe_bytes: int) -> None:
    if not directories:
        raise ValueError("NvmeStore: no directory was given; name at least one on a drive with free space")
    if len(weights) != len(directories) or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"NvmeStore: weights {list(weights)} for {len(directories)} directories; "
            "give each directory one finite weight above 0, such as its bytes per second"
        )
    if stripe_bytes <= 0 or stripe_bytes % PAGE_BYTES:
        raise ValueError(f"NvmeStore: stripe_bytes is {stripe_bytes}; use a positive multiple of {PAGE_BYTES}")


def check_directory(directory: Path) -> None:
    if not directory.is_dir():
        found = "not a directory" if directory.exists() else "missing"
        raise ValueError(f"NvmeStore: {directory} is {found}; create it (mkdir -p) or name an existing one")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ValueError(f"NvmeStore: {directory} is not writable for this process; chmod it or name another one")
    mode = directory.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        warnings.warn(
            f"NvmeStore: anybody may write to {directory} (mode {stat.S_IMODE(mode):04o}), and so remove or replace the files "
            "of a training there, which are this user's only: chmod o-w it",
            stacklevel=4,
        )
    if is_memory_backed(directory):
        warnings.warn(
            f"NvmeStore: {directory} is in memory (tmpfs), so what is stored there takes RAM; name one on a drive",
            stacklevel=4,
        )


def log_buffered(files: Sequence[StoreFile]) -> None:
    if files:
        _LOG.warning(
            "no O_DIRECT for %s: using the page cache, which copies every byte once more and takes memory outside the "
            "host budget; use a directory on ext4 or xfs to avoid this",
            ", ".join(str(file.path) for file in files),
        )
