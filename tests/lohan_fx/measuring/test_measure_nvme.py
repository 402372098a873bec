"""Measuring drives: what cannot be measured is refused by name, a failing drive is named, and no file is left."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan_fx.errors import LaneTimeout, StoreError
from lohan_fx.hardware import HardwareProfile
from lohan_fx.measuring import machine, measure_nvme
from lohan_fx.runtime.file_backend import LOCK_NAME

# Where the tests run /tmp may be in RAM.
pytestmark = [pytest.mark.usefixtures("leak_check"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files: the tests check behaviour, not speed."""
    monkeypatch.setattr(measure_nvme, "_FILE_BYTES", 2**25)
    monkeypatch.setattr(measure_nvme, "_MIN_FILE_BYTES", 2**24)


@pytest.fixture
def no_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT, as some network and memory ones do."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("single", [str, Path])
def test_a_single_path_is_one_directory(tmp_path: Path, single: Callable[[Path], str | Path]) -> None:
    with pytest.raises(ValueError, match=r"nvme directory '.*/nowhere' does not exist or is not a directory"):
        HardwareProfile.measure(single(tmp_path / "nowhere"))


def test_what_is_no_directory_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expected a sequence of directories, such as \['/mnt/nvme0'\]"):
        HardwareProfile.measure(3)  # type: ignore[arg-type]
    for nothing in ("", [""]):  # as of a variable of the shell's that is not set: not where the process runs
        with pytest.raises(ValueError, match="nvme has an empty text: name a directory"):
            HardwareProfile.measure(nothing)


def test_a_missing_directory_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nvme directory '.*/nowhere' does not exist or is not a directory"):
        HardwareProfile.measure([tmp_path / "nowhere"])


def test_an_unwritable_directory_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=rf"nvme directory '{tmp_path}' is not writable"):
        HardwareProfile.measure([tmp_path])


def test_a_directory_that_refuses_files_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*where: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ValueError, match=rf"cannot write a file in the nvme directory '{tmp_path}': .*quota"):
        measure_nvme.measure_drives([str(tmp_path)], 0.1, lambda label: None)


def test_too_little_space_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two directories on one file system need twice the file.
    monkeypatch.setattr(measure_nvme, "_free_bytes", lambda directory: 3 * 2**24)
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=rf"/a' has {3 * 2**24} bytes free, and measuring it needs {2**26}: make room"):
        measure_nvme.checked_directories([tmp_path, tmp_path / "a"])
    (tmp_path / "a").rmdir()


def test_a_directory_counts_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"nvme directory '{tmp_path}' is given more than once"):
        measure_nvme.checked_directories([tmp_path, f"{tmp_path}/"])


def test_memory_file_systems_are_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "filesystem_type", lambda directory: "tmpfs")
    with pytest.warns(RuntimeWarning, match=r"is on tmpfs: what is measured there is RAM"):
        assert measure_nvme.checked_directories([tmp_path]) == [str(tmp_path)]


@pytest.mark.usefixtures("no_direct")
def test_without_direct_access_it_measures_through_the_page_cache_and_warns(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=rf"'{tmp_path}' refuses O_DIRECT: measured through the page cache"):
        (drive,) = measure_nvme.measure_drives([str(tmp_path)], 0.2, lambda label: None)
    assert len(drive.by_request) == len(measure_nvme.REQUEST_BYTES)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_an_error_of_the_drive_names_directory_and_request(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(os, call)

    def fail(fd: int, buffers: list[Any], offset: int) -> int:
        if offset >= 2**23:
            raise OSError(errno.EIO, "Input/output error")
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(os, call, fail)
    verb = "writing" if call == "pwritev" else "reading"
    with pytest.raises(StoreError, match=rf"{verb} \d+ bytes at \d+ .* in {tmp_path}/.* failed: Input/output"):
        measure_nvme.measure_drives([str(tmp_path)], 0.2, lambda label: None)
    assert not list(tmp_path.iterdir())


def test_a_drive_that_moves_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(StoreError, match=rf"reading \d+ bytes at \d+ .* in {tmp_path}/.*: nothing was moved"):
        measure_nvme.measure_drives([str(tmp_path)], 0.2, lambda label: None)


def test_a_slow_drive_is_measured_on_a_smaller_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with measure_nvme.open_drive(str(tmp_path)) as drive:
        assert measure_nvme.fill([drive], 1e-9) == [measure_nvme._MIN_FILE_BYTES]
        assert drive.store.bytes_written == measure_nvme._MIN_FILE_BYTES


def test_the_file_has_no_name(tmp_path: Path) -> None:
    with measure_nvme.open_drive(str(tmp_path)) as drive:
        (place,) = tmp_path.iterdir()
        assert [found.name for found in place.iterdir()] == [LOCK_NAME]
        assert drive.store.nbytes_allocated == measure_nvme._FILE_BYTES
    assert not list(tmp_path.iterdir())


def test_requests_are_page_aligned_and_stay_within_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []

    def recorded(call: str) -> Any:
        real = getattr(os, call)

        def record(fd: int, buffers: list[memoryview], offset: int) -> int:
            seen.append((call, len(buffers[0]), offset))
            return int(real(fd, buffers, offset))

        return record

    with measure_nvme.open_drive(str(tmp_path)) as drive:
        sizes = measure_nvme.fill([drive], 1.0)
        for call in ("preadv", "pwritev"):
            monkeypatch.setattr(os, call, recorded(call))
        (rate,) = measure_nvme.load([drive], sizes, measure_nvme.Access.MIXED, 2**23, 0.05)
    assert rate > 0 and {call for call, _, _ in seen} == {"preadv", "pwritev"}
    assert all(offset % mmap.PAGESIZE == 0 and offset + size <= sizes[0] for _, size, offset in seen)


def test_requests_use_all_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training no request finds what it moves in a cache; a single buffer would stay in one."""
    places: set[int] = set()
    with measure_nvme.open_drive(str(tmp_path)) as drive:
        sizes = measure_nvme.fill([drive], 1.0)
        real = drive.store.read

        def read(name: str, offset: int, buffer: torch.Tensor, nbytes: int) -> None:
            places.add(buffer.data_ptr())
            real(name, offset, buffer, nbytes)

        monkeypatch.setattr(drive.store, "read", read)
        measure_nvme.load([drive], sizes, measure_nvme.Access.READ, 2**20, 0.2)
    assert len(places) == measure_nvme._BUFFERS


def test_a_job_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_nvme, "_STALL_S", 0.05)
    release = threading.Event()
    jobs = [("/nvme0", lambda stop: True), ("/nvme1", lambda stop: release.wait(30))]
    with pytest.raises(LaneTimeout, match=r"a request to a file in '/nvme1' was not done 0.05 s after its time"):
        measure_nvme._together(jobs, 0.0)
    release.set()
    for thread in threading.enumerate():
        if thread.name.startswith("lohan-measure"):
            thread.join()
