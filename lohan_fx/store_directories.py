"""store_directories: where the store of a run goes: directories that were named, those of the profile, or one made for it."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from lohan_fx.hardware import HardwareProfile

Directories = str | Path | Sequence[str | Path]

_run_numbers = itertools.count()


def directories_for(nvme: Directories | None, hw: HardwareProfile) -> tuple[list[Path], Callable[[], None]]:
    """Where the store goes, and what removes what this call had to make."""
    if nvme is not None:
        given = [nvme] if isinstance(nvme, str | Path) else nvme
        if not isinstance(given, Sequence) or not all(isinstance(directory, str | Path) for directory in given):
            raise TypeError(f"nvme is {nvme!r}: expected a directory, or a list with a directory per drive")
        if not given:
            raise ValueError("nvme is an empty list: name at least one directory, or pass None for the default")
        directories = [Path(directory) for directory in given]
        if len({directory.resolve() for directory in directories}) < len(directories):
            raise ValueError(f"nvme names a directory twice: {', '.join(map(str, directories))}; name each drive once")
        return directories, lambda: None
    known = [Path(drive.directory) for drive in hw.nvme if drive.directory]
    if known:
        return known, lambda: None
    root = default_nvme_root()
    _remove_stale(root)
    directory = root / f"run-{os.getpid()}-{next(_run_numbers)}"
    directory.mkdir(parents=True, mode=0o700)
    return [directory], lambda: shutil.rmtree(directory, ignore_errors=True)


def is_temporary(nvme: Directories | None, hw: HardwareProfile) -> bool:
    """Whether the store goes to a directory that is made for this run alone."""
    return nvme is None and not any(drive.directory for drive in hw.nvme)


def default_nvme_root() -> Path:
    """``~/.cache/lohan_fx`` or its equivalent: unlike ``/tmp`` rarely in RAM."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lohan_fx"


def _remove_stale(root: Path) -> None:
    """Remove what runs that were killed have left in the default place."""
    for directory in root.glob("run-*-*"):
        pid = directory.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(directory, ignore_errors=True)


def bandwidths(directories: Sequence[Path], hw: HardwareProfile) -> list[float] | None:
    """The measured bandwidth of each directory, where the profile knows all of them."""
    rates = {Path(d.directory).resolve(): d.mixed_bytes_per_s for d in hw.nvme if d.directory}
    found = [rates.get(directory.resolve()) for directory in directories]
    return [rate for rate in found if rate is not None] if None not in found else None
