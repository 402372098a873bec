"""store_space: disk space for the files of a store: checked, then taken; all of it or none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from lohan_fx.errors import StoreError
from lohan_fx.runtime.file_backend import FileBackend
from lohan_fx.runtime.store_file import StoreFile, reported_as_store_error


def take_space(
    directories: Sequence[Path], files: Sequence[StoreFile], ends: Sequence[int], backend: FileBackend
) -> None:
    """Grow each file to its size in ``ends``. Raises ``StoreError`` if the space is not there; then nothing grew."""
    _check_free_space(directories, files, ends, backend)
    before = [file.nbytes for file in files]
    try:
        for file, end in zip(files, ends, strict=True):
            file.grow(end)
    except BaseException:
        for file, nbytes in zip(files, before, strict=True):
            file.cut_back(nbytes)
        raise


def _check_free_space(
    directories: Sequence[Path], files: Sequence[StoreFile], ends: Sequence[int], backend: FileBackend
) -> None:
    """Directories on one file system share its free space, so their needs are added up."""
    devices = [os.stat(directory).st_dev for directory in directories]
    added = [end - file.nbytes for end, file in zip(ends, files, strict=True)]
    for directory, device in zip(directories, devices, strict=True):
        needed = sum(nbytes for nbytes, other in zip(added, devices, strict=True) if other == device)
        with reported_as_store_error(f"asking for the free space of {directory}"):
            free = backend.free_bytes(directory)
        if needed > free:
            raise StoreError(
                f"allocating in {directory}: {needed} bytes are needed on its file system and {free} are free; "
                f"free {needed - free} bytes there or add a directory on another drive"
            )
