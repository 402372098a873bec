"""generation_files: the names of checkpoints in a directory, and how one is written so that it is there or not.

``DIR/lohan_fx.checkpoints/`` (its owner's only) holds in each directory of a store ``identity.json``, and in the first
one a manifest ``generation-<number>`` per checkpoint.

Guarantees: no symbolic link is followed; a manifest under its name is complete, on the drive, and was read back from
there.
Assumes: the directory is locked by the caller, but for reading.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lohan_fx.errors import StoreError
from lohan_fx.runtime.file_backend import FileBackend
from lohan_fx.runtime.manifest import Manifest
from lohan_fx.runtime.store_file import reported_as_store_error

CHECKPOINTS = "lohan_fx.checkpoints"
TEMPORARY = "generation.tmp"
IDENTITY = "identity.json"
MAX_MANIFEST_BYTES = 1 << 32

_NAME = re.compile(r"generation-([0-9]{12})")


def generation_path(directory: Path, number: int) -> Path:
    """The manifest of checkpoint ``number`` of the store whose first directory this is."""
    return directory / CHECKPOINTS / f"generation-{number:012d}"


def generations_in(directory: Path) -> list[int]:
    """The numbers of the checkpoints there, oldest first. Raises ``StoreError`` where that cannot be found out."""
    with reported_as_store_error(f"looking for checkpoints in {directory / CHECKPOINTS}"):
        try:
            names = os.listdir(directory / CHECKPOINTS)
        except FileNotFoundError:
            return []
    return sorted(int(found.group(1)) for found in map(_NAME.fullmatch, names) if found)


def refuse_checkpoints(directories: Sequence[Path]) -> str | None:
    """Raises ``StoreError`` where a new store in ``directories`` would overwrite checkpoints.

    Returns the name of a store that was prepared for checkpoints here and never made one, for the new one to take.
    """
    first = directories[0]
    if generations_in(first):
        raise StoreError(
            f"{first} holds a checkpoint (number {generations_in(first)[-1]}), which was left as it is: "
            "lohan_fx.compile(..., resume_from_checkpoint=True) continues from it; remove "
            f"{first / CHECKPOINTS} to begin anew there, or name another directory"
        )
    unused: str | None = None
    for index, directory in enumerate(directories):
        if not os.path.lexists(directory / CHECKPOINTS / IDENTITY):
            continue
        found = identity_of(directory)
        if index == 0 and found["index"] == 0:
            unused = found["run"]
        if found["run"] != unused:
            raise StoreError(
                f"{directory} belongs to a store that may have checkpoints in another directory: it was left as it is; "
                f"remove {directory / CHECKPOINTS} to begin anew there, or name another directory"
            )
    return unused


def make_checkpoint_directory(directory: Path, backend: FileBackend) -> None:
    """Make the directory for manifests. Raises ``StoreError`` where others than its owner could change it."""
    place = directory / CHECKPOINTS
    with suppress(FileExistsError):
        os.mkdir(place, 0o700)
    check_private(place)
    backend.sync_directory(directory)


def check_private(place: Path) -> None:
    """Raises ``StoreError`` unless ``place`` is a directory of this user alone, and no link to one."""
    status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StoreError(
            f"{place} is not a directory of this user alone (mode {stat.S_IMODE(status.st_mode):04o}, owner "
            f"{status.st_uid}): checkpoints are neither read nor written there; chown it and chmod 700, or move it away"
        )


def write_generation(directory: Path, number: int, data: bytes, backend: FileBackend) -> None:
    """Put the manifest ``data`` on the drive under its name: all of it, or nothing. Raises ``StoreError``."""
    target = generation_path(directory, number)
    if len(data) > MAX_MANIFEST_BYTES:
        raise StoreError(
            f"writing the checkpoint {target}: beside parameters and states it has {len(data)} bytes, and no more than "
            f"{MAX_MANIFEST_BYTES} would be read again: keep large buffers, and what is large of extra, in a file of your own"
        )
    with reported_as_store_error(f"writing the checkpoint {target}"):
        _write_file(target, data, backend)


def remove_generation(directory: Path, number: int, backend: FileBackend) -> None:
    """Remove a manifest; may raise ``OSError``."""
    backend.remove(generation_path(directory, number))
    backend.sync_directory(directory / CHECKPOINTS)


def write_identity(directory: Path, run: str, index: int, count: int, backend: FileBackend) -> None:
    """Say in ``directory`` which of the directories of which store it is; may raise ``OSError``."""
    data = json.dumps({"run": run, "index": index, "count": count}).encode()
    _write_file(directory / CHECKPOINTS / IDENTITY, data, backend)


def _write_file(target: Path, data: bytes, backend: FileBackend) -> None:
    temporary = target.parent / TEMPORARY
    with suppress(FileNotFoundError):  # of a run that was killed
        backend.remove(temporary)
    fd = backend.open(temporary, direct=False)
    try:
        if _moved(backend.pwritev, fd, memoryview(data)) < len(data):
            raise OSError(errno.EIO, "nothing was written")
        backend.fdatasync(fd)
        _check_written(fd, data, target, backend)
    finally:
        backend.close(fd)
    backend.rename(temporary, target)
    backend.sync_directory(target.parent)


def _check_written(fd: int, data: bytes, target: Path, backend: FileBackend) -> None:
    """Raises ``StoreError`` unless the drive gives back ``data``: the file that this one replaces may be the last good one."""
    backend.forget(fd)
    found = bytearray(len(data))
    _moved(backend.preadv, fd, memoryview(found))
    if found != data:
        raise StoreError(
            f"writing {target}: the drive gives back other bytes than were written, and nothing is replaced by them; move the "
            "store to another drive"
        )


def _moved(call: Callable[[int, memoryview, int], int], fd: int, view: memoryview) -> int:
    """How many bytes ``call`` moves, asked until it has moved all of ``view`` or moves none."""
    done = 0
    while done < len(view):
        with suppress(InterruptedError):
            count = call(fd, view[done:], done)
            if count <= 0:
                break
            done += count
    return done


def read_generation(directory: Path, number: int) -> Manifest:
    """The manifest of checkpoint ``number``, checked. Raises ``StoreError``."""
    path = generation_path(directory, number)
    manifest = Manifest.from_bytes(_read_file(path, MAX_MANIFEST_BYTES), str(path))
    if manifest.generation != number:
        raise StoreError(f"{path} says that it is checkpoint {manifest.generation}: it was renamed or damaged")
    return manifest


@dataclass(frozen=True)
class Kept:
    """The checkpoints kept in the directories of a store: ``whole`` manifests, oldest first, and by number why others cannot
    be read."""

    whole: tuple[Manifest, ...] = ()
    damaged: Mapping[int, StoreError] = field(default_factory=dict)


def read_generations(directories: Sequence[Path]) -> list[Manifest]:
    """The checkpoints kept in ``directories``, oldest first; none where there are none.

    Raises ``StoreError`` where they are not the directories of one store in their order, or the newest is damaged. An
    older one that is damaged is left out, with a warning: nothing depends on it.
    """
    found = survey(directories)
    newest = max((*found.damaged, *(manifest.generation for manifest in found.whole)), default=0)
    for number, error in found.damaged.items():
        if number == newest:
            raise error
        warnings.warn(f"lohan_fx: checkpoint {number} is lost, later ones are not: {error}", stacklevel=2)
    return list(found.whole)


def survey(directories: Sequence[Path]) -> Kept:
    """All checkpoints kept in ``directories``, also those that cannot be read.

    Raises ``StoreError`` where these are not the directories, in their order, of the store whose checkpoint is the newest
    whole one.
    """
    numbers = generations_in(directories[0])
    if not numbers:
        for other in directories[1:]:
            if generations_in(other):
                raise StoreError(
                    f"the checkpoints are in {other}, not in {directories[0]}: name the directories of the run that wrote them, "
                    f"in its order, {other} first"
                )
        return Kept()
    check_private(directories[0] / CHECKPOINTS)
    read: dict[int, Manifest] = {}
    damaged: dict[int, StoreError] = {}
    for number in numbers:
        try:
            read[number] = read_generation(directories[0], number)
        except StoreError as error:
            damaged[number] = error
    if not read:
        return Kept(damaged=damaged)
    newest = read[max(read)]
    _check_directories(directories, newest)
    # Older ones than are kept are only still there.
    first = numbers[-1] - newest.keep + 1
    whole = [_of_store(directories[0], manifest, newest) for number, manifest in read.items() if number >= first]
    return Kept(tuple(whole), {number: error for number, error in damaged.items() if number >= first})


def _check_directories(directories: Sequence[Path], newest: Manifest) -> None:
    if len(newest.file_bytes) != len(directories):
        raise StoreError(
            f"the checkpoint in {directories[0]} is of {len(newest.file_bytes)} directories; {len(directories)} were "
            "given: name those of the run that wrote it, in its order"
        )
    for index, directory in enumerate(directories):
        _check_identity(directory, newest.run, index)


def _of_store(directory: Path, manifest: Manifest, newest: Manifest) -> Manifest:
    same = manifest.run == newest.run and manifest.extents.keys() == newest.extents.keys()
    if not same or any(manifest.extents[name].slots != extent.slots for name, extent in newest.extents.items()):
        raise StoreError(
            f"{generation_path(directory, manifest.generation)} is of another store than the newest: move it away"
        )
    return manifest


def _check_identity(directory: Path, run: str, index: int) -> None:
    path = directory / CHECKPOINTS / IDENTITY
    known = os.path.lexists(path)
    found = identity_of(directory) if known else {}
    if not known or found["run"] != run or found["index"] != index:
        why = "" if known else f" (there is no {path})"
        raise StoreError(
            f"{directory} is not directory {index} of the store that wrote the checkpoint{why}: name the directories of that "
            "run, in its order"
        )


def identity_of(directory: Path) -> dict[str, Any]:
    """What ``write_identity`` said. Raises ``StoreError`` where that cannot be read."""
    path = directory / CHECKPOINTS / IDENTITY
    with reported_as_store_error(f"looking at {path.parent}"):
        check_private(path.parent)
    try:
        found = json.loads(_read_file(path, 4096))
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path} is damaged ({error}): the directory cannot be recognised") from error
    good = isinstance(found, dict) and isinstance(found.get("run"), str) and isinstance(found.get("index"), int)
    if not good or not re.fullmatch(r"[0-9a-f]{32}", found["run"]):
        raise StoreError(f"{path} is damaged: the directory cannot be recognised")
    return dict(found)


def _read_file(path: Path, limit_bytes: int) -> bytes:
    with reported_as_store_error(f"reading {path}"):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > limit_bytes:
                raise StoreError(f"{path} is not a file of at most {limit_bytes} bytes: it was left as it is")
            data: bytes = file.read(status.st_size)
            return data
