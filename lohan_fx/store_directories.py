"""store_directories: where the store of a run goes: directories that were named, those of the profile, or one made for it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lohan_fx.hardware import HardwareProfile

Directories = str | Path | Sequence[str | Path]


def directories_for(nvme: Directories | None, hw: HardwareProfile) -> tuple[list[Path], Callable[[], None]]:
    """Where the store goes, and what removes what this call had to make. Absolute: the process may change its directory later."""
    if nvme is not None:
        given = [nvme] if isinstance(nvme, str | Path) else nvme
        if not isinstance(given, Sequence) or not all(isinstance(directory, str | Path) for directory in given):
            raise TypeError(f"nvme is {nvme!r}: expected a directory, or a list with a directory per drive")
        if not given:
            raise ValueError("nvme is an empty list: name at least one directory, or pass None for the default")
        if "" in given:
            raise ValueError(
                "nvme is an empty text: name a directory ('.' is where the process runs), or pass None for the default"
            )
        directories = [Path(directory).absolute() for directory in given]
        if len({directory.resolve() for directory in directories}) < len(directories):
            raise ValueError(f"nvme names a directory twice: {', '.join(map(str, directories))}; name each drive once")
        return directories, lambda: None
    known = [Path(drive.directory).absolute() for drive in hw.nvme if drive.directory]
    if known:
        return known, lambda: None
    root = default_nvme_root()
    root.mkdir(parents=True, exist_ok=True)
    _remove_stale(root)
    directory, remove = made_for_this_run(root)
    return [directory], remove


def drives_of(nvme: Directories | None, hw: HardwareProfile) -> int:
    """In how many directories ``directories_for`` would put the store."""
    if nvme is None:
        return max(1, sum(bool(drive.directory) for drive in hw.nvme))
    return len(nvme) if isinstance(nvme, Sequence) and not isinstance(nvme, str) else 1


def is_temporary(nvme: Directories | None, hw: HardwareProfile) -> bool:
    """Whether the store goes to a directory that is made for this run alone."""
    return nvme is None and not any(drive.directory for drive in hw.nvme)


def default_nvme_root() -> Path:
    """``~/.cache/lohan_fx`` or its equivalent: unlike ``/tmp`` rarely in RAM."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lohan_fx"


def made_for_this_run(root: Path) -> tuple[Path, Callable[[], None]]:
    """A directory below ``root``, locked until the process ends, however that ends, and what removes it.

    It is locked before it gets a name by which it could be taken for a stale one. Process ids would not tell: those of
    other containers and hosts that share ``root`` mean nothing here, and in a container all runs have the same.
    """
    made = Path(tempfile.mkdtemp(prefix="new-", dir=root))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)
    directory = made.rename(root / f"run-{os.getpid()}-{made.name.removeprefix('new-')}")

    def remove() -> None:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)

    return directory, remove


def _remove_stale(root: Path) -> None:
    """Remove what runs that were killed have left in the default place: what nobody holds a lock of."""
    for directory in root.glob("run-*-*"):
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # another process was faster
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            pass  # it is in use, or on a file system that cannot tell
        finally:
            os.close(lock)


def bandwidths(directories: Sequence[Path], hw: HardwareProfile) -> list[float] | None:
    """The measured bandwidth of each directory, where the profile knows all of them."""
    rates = {Path(d.directory).resolve(): d.stripe_weight for d in hw.nvme if d.directory}
    found = [rates.get(directory.resolve()) for directory in directories]
    return [rate for rate in found if rate is not None] if None not in found else None
