"""Measures drives: what the runtime's own reads and writes reach in a directory of each.

A request is what it is in training: a job of a lane with as many threads, served by the store, on the clock, from one of many
buffers. Bare system calls are faster beside compute: their threads wait for nothing between them (docs/0035).

Guarantees: all drives are loaded at once, so their rates add up even where they share lanes; the files lose their
names as soon as they are open, so that a killed process leaves no more behind than a lock; a request's error is raised in
the caller, with the directory.
Assumes: Linux, and that nothing else loads the drives meanwhile.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from lohan_fx.errors import LaneTimeout, StoreError
from lohan_fx.hardware import NvmeProfile, RequestRate
from lohan_fx.measuring import machine
from lohan_fx.runtime.file_backend import PosixBackend
from lohan_fx.runtime.host_pool import Buffer, HostPool, Reservation
from lohan_fx.runtime.lanes import Lane, Work
from lohan_fx.runtime.nvme_store import SSD_THREADS, NvmeStore
from lohan_fx.runtime.timeline import Timeline

SHARES = {256 * 2**10: 1, 2**20: 2, 4 * 2**20: 4, 8 * 2**20: 4}
"""Bytes of a request -> what part of the time it is measured for: most for the sizes that most plans use."""
REQUEST_BYTES = tuple(SHARES)
USUAL_BYTES = 4 * 2**20
"""Of the runtime's requests (``budgets.choose_windows``)."""

_FILE_BYTES = 2**30
_MIN_FILE_BYTES = 64 * 2**20  # a drive too slow to fill the file in its time is measured on less
_EXTENT = "measured"
_BUFFERS = 3 * SSD_THREADS
"""As many requests are served or wait for it."""
_STALL_S = 60.0
_CLOSE_S = 5.0
_FILL_SHARE = 0.16
_ROUNDS = 4  # a drive's speed drifts from one second to the next
STEPS = 1 + _ROUNDS  # calls of `announce`

T = TypeVar("T")


class Access(enum.Enum):
    READ = "reading"
    WRITE = "writing"
    MIXED = "reading and writing"


class _NamelessFiles(PosixBackend):
    """Files that no directory names any more once they are open, and of which nothing stays in the page cache."""

    def __init__(self) -> None:
        self.direct = True

    def open(self, path: Path, *, direct: bool) -> int:
        self.direct = direct
        fd = super().open(path, direct=direct)
        path.unlink()
        return fd

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        moved = super().preadv(fd, view, offset)
        if not self.direct:
            os.posix_fadvise(fd, offset, moved, os.POSIX_FADV_DONTNEED)
        return moved

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Drive:
    """A directory with what serves requests to it; ``direct`` if without the page cache."""

    directory: str
    direct: bool
    capacity_bytes: int
    drive_bytes: int
    store: NvmeStore
    lane: Lane
    pool: HostPool
    timeline: Timeline

    def request(self, write: bool, offset: int, nbytes: int) -> Work[None]:
        """Ask for one, as soon as there is a buffer for it. Raises ``LaneTimeout`` where there is none for long."""
        buffer = self.pool.acquire(_EXTENT, timeout_s=_STALL_S)
        label = f"a request to a file in {self.directory!r}"
        return self.lane.submit(partial(self._serve, buffer, write, offset, nbytes), label=label)

    def _serve(self, buffer: Buffer, write: bool, offset: int, nbytes: int) -> None:
        with buffer, self.timeline.span("ssd", _EXTENT, nbytes):
            (self.store.write if write else self.store.read)(_EXTENT, offset, buffer.tensor, nbytes)

    def settle(self) -> None:
        """Have everything written on the drive, and nothing in the page cache that a later read could come from."""
        self.store.flush()


def checked_directories(nvme: Sequence[str | Path]) -> list[str]:
    """The directories as absolute paths. ValueError for one that cannot be measured, before any time is spent."""
    if isinstance(nvme, str | bytes) or not isinstance(nvme, Sequence):
        raise TypeError(f"nvme is {nvme!r}: expected a sequence of directories, such as ['/mnt/nvme0']")
    if "" in nvme:
        raise ValueError("nvme has an empty text: name a directory ('.' is where the process runs)")
    directories = [os.path.abspath(os.fspath(directory)) for directory in nvme]
    per_filesystem: dict[int, int] = {}
    for directory in directories:
        if directories.count(directory) > 1:
            raise ValueError(f"nvme directory {directory!r} is given more than once: give one per drive")
        if not os.path.isdir(directory):
            raise ValueError(f"nvme directory {directory!r} does not exist or is not a directory: create it first")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ValueError(f"nvme directory {directory!r} is not writable: choose another or change its mode")
        filesystem = os.stat(directory).st_dev
        per_filesystem[filesystem] = needed = per_filesystem.get(filesystem, 0) + _FILE_BYTES
        if (free := _free_bytes(directory)) < needed:
            raise ValueError(
                f"nvme directory {directory!r} has {free} bytes free, and measuring it needs {needed}: make room there"
            )
        if (kind := machine.filesystem_type(directory)) in ("tmpfs", "ramfs"):
            _warn(f"nvme directory {directory!r} is on {kind}: what is measured there is RAM, not a drive")
    return directories


def measure_drives(
    directories: Sequence[str], seconds: float, announce: Callable[[str], None]
) -> tuple[NvmeProfile, ...]:
    """Rates of each directory's drive in about `seconds` altogether, for every size in `REQUEST_BYTES`.

    A drive's headline rates are those of ``USUAL_BYTES``: the best of several would be the one that chance favoured.
    """
    if not directories:
        return ()
    share_s = seconds * (1 - _FILL_SHARE) / (_ROUNDS * sum(SHARES.values()) * len(Access))
    samples: dict[tuple[int, Access], list[list[float]]] = defaultdict(list)
    with contextlib.ExitStack() as files:
        devices = [os.stat(directory).st_dev for directory in directories]
        drives = [
            files.enter_context(open_drive(directory, sharing=devices.count(device)))
            for directory, device in zip(directories, devices, strict=True)
        ]
        announce("drives: writing a file on each")
        sizes = fill(drives, seconds * _FILL_SHARE)
        # Rounds over all sizes, not all of one size at once: a drive's speed drifts, and sizes are to be compared.
        for number in range(1, _ROUNDS + 1):
            announce(f"drives: round {number} of {_ROUNDS}")
            for request_bytes, access in itertools.product(REQUEST_BYTES, Access):
                each_s = share_s * SHARES[request_bytes]
                samples[request_bytes, access].append(load(drives, sizes, access, request_bytes, each_s))
    by_request = []
    for request_bytes in REQUEST_BYTES:
        columns = [map(statistics.median, zip(*samples[request_bytes, access], strict=True)) for access in Access]
        by_request.append([RequestRate(request_bytes, *map(rounded, row)) for row in zip(*columns, strict=True)])
    usual = by_request[REQUEST_BYTES.index(USUAL_BYTES)]
    return tuple(
        NvmeProfile(
            directory=drive.directory,
            read_bytes_per_s=usual[index].read_bytes_per_s,
            write_bytes_per_s=usual[index].write_bytes_per_s,
            mixed_bytes_per_s=usual[index].mixed_bytes_per_s,
            capacity_bytes=drive.capacity_bytes,
            drive_bytes=drive.drive_bytes,
            by_request=tuple(rates[index] for rates in by_request),
        )
        for index, drive in enumerate(drives)
    )


def rounded(rate: float) -> float:
    """Four digits of a measured rate: more would be noise, and would make the file hard to read."""
    return float(f"{rate:.4g}")


def _free_bytes(directory: str) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


@contextlib.contextmanager
def open_drive(directory: str, *, sharing: int = 1) -> Iterator[Drive]:
    """``sharing``: how many of the directories are on its file system, which all may fill."""
    stat = os.statvfs(directory)
    capacity_bytes, drive_bytes = _free_bytes(directory) // sharing, stat.f_blocks * stat.f_frsize // sharing
    files, timeline = _NamelessFiles(), Timeline()
    with contextlib.ExitStack() as taken:
        try:
            place = taken.enter_context(tempfile.TemporaryDirectory(prefix=".lohan-fx-measure-", dir=directory))
            store = NvmeStore([Path(place)], backend=files)
            taken.callback(_unless_stuck, store.close)
            store.allocate({_EXTENT: _FILE_BYTES})
        except (OSError, StoreError) as error:
            raise ValueError(f"cannot write a file in the nvme directory {directory!r}: {error}") from error
        if not files.direct:
            _warn(f"{directory!r} refuses O_DIRECT: measured through the page cache, which costs a copy of every byte")
        pool = taken.enter_context(HostPool({_EXTENT: Reservation(_BUFFERS, REQUEST_BYTES[-1])}))
        _fill_with_noise(pool)
        lane = Lane("measured drive", threads=SSD_THREADS)
        taken.callback(_unless_stuck, lane.close)
        yield Drive(directory, files.direct, capacity_bytes, drive_bytes, store, lane, pool, timeline)


def _unless_stuck(close: Callable[..., None]) -> None:
    """What the drive keeps in a request ends with that; who asked for it has been told."""
    with contextlib.suppress(LaneTimeout):
        close(timeout_s=_CLOSE_S)


def _fill_with_noise(pool: HostPool) -> None:
    """Some file systems and drives compress."""
    with contextlib.ExitStack() as taken:
        noise = torch.frombuffer(bytearray(os.urandom(REQUEST_BYTES[-1])), dtype=torch.uint8)
        for _ in range(_BUFFERS):
            taken.enter_context(pool.acquire(_EXTENT)).tensor.copy_(noise)


def fill(drives: Sequence[Drive], seconds: float) -> list[int]:
    """Write every file once and return the sizes: reads of what was only allocated would not touch the drive."""
    deadline = time.perf_counter() + seconds
    nbytes = REQUEST_BYTES[-1]

    def written(drive: Drive, stop: threading.Event) -> int:
        offset = 0
        while offset < _FILE_BYTES and not stop.is_set():
            if offset >= _MIN_FILE_BYTES and time.perf_counter() > deadline:
                break
            drive.request(True, offset, nbytes).wait(_STALL_S)
            offset += nbytes
        drive.settle()
        return offset

    return _together([(drive.directory, partial(written, drive)) for drive in drives], seconds)


def load(
    drives: Sequence[Drive], sizes: Sequence[int], access: Access, request_bytes: int, seconds: float
) -> list[float]:
    """Bytes/s that each drive moves while all are loaded for `seconds`, each by a lane whose queue is never empty."""
    begin = time.perf_counter()

    def loaded(drive: Drive, file_bytes: int, stop: threading.Event) -> float:
        asked: deque[Work[None]] = deque()
        for turn in itertools.count():
            write = access is Access.WRITE or (access is Access.MIXED and turn % 2 == 1)
            asked.append(drive.request(write, turn * request_bytes % file_bytes, request_bytes))
            over = stop.is_set() or time.perf_counter() - begin >= seconds
            while asked and (over or asked[0].done()):
                asked.popleft().wait(_STALL_S)
            if over:
                break
        if not drive.direct:
            drive.settle()
        return (turn + 1) * request_bytes / (time.perf_counter() - begin)

    return _together(
        [(drive.directory, partial(loaded, drive, nbytes)) for drive, nbytes in zip(drives, sizes, strict=True)],
        seconds,
    )


def _together(jobs: Sequence[tuple[str, Callable[[threading.Event], T]]], seconds: float) -> list[T]:
    """Run each (directory, job) in a thread of its own; the results, or the first job's error.

    The event a job gets is set when another has failed. No thread asks for anything after this has returned or raised; what
    is asked for is over when the lane is closed, except a request that the drive keeps.
    """
    stop = threading.Event()
    pool = ThreadPoolExecutor(len(jobs), thread_name_prefix="lohan-measure")
    futures = [pool.submit(job, stop) for _, job in jobs]
    try:
        wait(futures, seconds + _STALL_S, FIRST_EXCEPTION)
    finally:
        stop.set()
        stuck = wait(futures, _STALL_S).not_done
        pool.shutdown(wait=not stuck)
    for (directory, _), future in zip(jobs, futures, strict=True):
        if future in stuck:
            raise LaneTimeout(f"a request to a file in {directory!r} was not done {_STALL_S:g} s after its time")
    return [future.result() for future in futures]
