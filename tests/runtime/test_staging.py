"""Staging: parts of extents on their way to and from the store, several at a time, and what is left when one fails."""

from __future__ import annotations

import errno
import functools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lohan_fx.errors import LaneTimeout, StoreError
from lohan_fx.runtime import in_time, nvme_store, staging
from lohan_fx.runtime.host_pool import PAGE_BYTES, HostPool
from lohan_fx.runtime.lanes import Lane, Work
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.staging import Part, Staging
from tests.runtime.faulty_backend import FaultyBackend

pytestmark = pytest.mark.usefixtures("leak_check")

PARTS = 9


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend()


@pytest.fixture
def store(tmp_path: Path, backend: FaultyBackend) -> Iterator[NvmeStore]:
    with NvmeStore([tmp_path], backend=backend) as made:
        made.allocate({"x": PARTS * PAGE_BYTES, "large": 3 * PAGE_BYTES})
        yield made


def filling(extent: str, pages: int, value: int) -> list[Part]:
    return [
        Part(extent, page * PAGE_BYTES, PAGE_BYTES, functools.partial(_fill, value + page)) for page in range(pages)
    ]


def _fill(value: int, memory: torch.Tensor) -> None:
    memory.fill_(value)


def taken(staged: Staging, extent: str, pages: int, *, per_part: int = 1) -> list[int]:
    """What each page of ``extent`` is full of."""
    found: dict[int, int] = {}

    def take(first: int, memory: torch.Tensor) -> None:
        for page in range(per_part):
            (value,) = set(memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES].tolist())
            found[first + page] = value

    staged.read(
        [
            Part(extent, page * PAGE_BYTES, per_part * PAGE_BYTES, functools.partial(take, page))
            for page in range(0, pages, per_part)
        ]
    )
    return [found[page] for page in range(pages)]


@pytest.mark.parametrize(("kept", "behind"), [(False, False), (True, False), (True, True)])
def test_what_is_written_is_read(store: NvmeStore, kept: bool, behind: bool) -> None:
    staged = Staging(store)
    if kept:
        with staged.kept(behind=behind):
            staged.write(filling("x", PARTS, 1))
            staged.write([])
            staged.write(filling("x", 1, 77))
            assert taken(staged, "x", PARTS) == [77, *range(2, PARTS + 1)]
            # A larger part needs larger buffers, and nothing on its way is lost for that.
            staged.write(filling("x", PARTS, 11))
            staged.write([Part("large", 0, 3 * PAGE_BYTES, functools.partial(_fill, 5))])
    else:
        staged.write(filling("x", PARTS, 11))
        staged.write([Part("large", 0, 3 * PAGE_BYTES, functools.partial(_fill, 5))])
    assert taken(staged, "x", PARTS) == list(range(11, 11 + PARTS))
    assert taken(staged, "large", 3, per_part=3) == [5, 5, 5]


@pytest.mark.parametrize("call", ["write", "read"])
def test_requests_are_made_at_the_same_time(store: NvmeStore, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, met = getattr(store, call), threading.Barrier(3, timeout=60.0)

    def together(*args: Any) -> None:
        met.wait()
        made(*args)

    monkeypatch.setattr(store, call, together)
    getattr(Staging(store), call)(filling("x", PARTS, 0))


def test_memory_is_bounded(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_store, "MOST_BYTES", 2 * PAGE_BYTES)
    under_way, most, lock, write = 0, 0, threading.Lock(), store.write

    def counted(*args: Any) -> None:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.01)
        write(*args)
        with lock:
            under_way -= 1

    monkeypatch.setattr(store, "write", counted)
    staged = Staging(store)
    staged.write(filling("x", PARTS, 1))
    assert most == 2
    assert taken(staged, "x", PARTS) == list(range(1, PARTS + 1))


def test_threads_are_made_once_for_what_is_kept_together(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = []

    class Counted(Lane):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            lanes.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(staging, "Lane", Counted)
    staged = Staging(store)
    for number in range(3):
        staged.write(filling("x", 2, number))
    assert len(lanes) == 3
    with staged.kept(), staged.kept():
        for number in range(3):
            staged.write(filling("x", 1, number))
    assert len(lanes) == 4
    staged.write(filling("x", 1, 9))  # a single request needs none
    assert len(lanes) == 4


@pytest.mark.parametrize("earlier", range(PARTS))
@pytest.mark.parametrize("call", ["write", "read"])
def test_an_error_is_raised_when_nothing_is_under_way(
    store: NvmeStore, backend: FaultyBackend, call: str, earlier: int
) -> None:
    staged = Staging(store)
    with staged.kept():
        backend.faults["pwritev" if call == "write" else "preadv"] = [None] * earlier + [errno.EIO]
        with pytest.raises(StoreError, match="Input/output error"):
            getattr(staged, call)(filling("x", PARTS, 1))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("lohan-staging")]
        staged.write(filling("x", PARTS, 2))
        assert taken(staged, "x", PARTS) == list(range(2, 2 + PARTS))


def test_what_a_write_behind_raises_comes_at_the_end(store: NvmeStore, backend: FaultyBackend) -> None:
    staged, begun = Staging(store), 0
    backend.faults["pwritev"] = [None] * (PARTS - 1) + [errno.EIO]
    with pytest.raises(StoreError, match="Input/output error"), staged.kept(behind=True):
        for part in filling("x", PARTS, 1):
            staged.write([part])
            begun += 1
    assert begun >= PARTS - 1


def test_an_interrupt_does_not_wait_for_a_drive_that_hangs(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_time, "INTERRUPT_S", 0.1)
    hangs, write = threading.Event(), store.write

    def stuck(*args: Any) -> None:
        hangs.wait(60.0)
        write(*args)

    def interrupted(memory: torch.Tensor) -> None:
        del memory
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "write", stuck)
    staged = Staging(store)
    begun_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        staged.write([*filling("x", 2, 1), Part("x", 2 * PAGE_BYTES, PAGE_BYTES, interrupted)])
    assert time.monotonic() - begun_s < 30.0
    hangs.set()
    join_staging()
    monkeypatch.undo()
    staged.write(filling("x", PARTS, 3))
    assert taken(staged, "x", PARTS) == list(range(3, 3 + PARTS))


@dataclass
class SlowDrive:
    """It is ``asked`` to write, and ``answers`` later."""

    asked: threading.Event = field(default_factory=threading.Event)
    answers: threading.Event = field(default_factory=threading.Event)

    def interrupt(self, memory: torch.Tensor) -> None:
        """Ctrl-C, as the next part is copied."""
        del memory
        assert self.asked.wait(60.0)
        raise KeyboardInterrupt


@pytest.fixture
def slow(backend: FaultyBackend, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDrive]:
    """The first write is late; at the end it is over."""
    monkeypatch.setattr(in_time, "INTERRUPT_S", 0.1)
    drive, write = SlowDrive(), backend.pwritev

    def pwritev(fd: int, view: memoryview, offset: int) -> int:
        if drive.asked.is_set():
            return write(fd, view, offset)
        drive.asked.set()
        held = os.dup(fd)  # as the system does while a call is under way
        assert drive.answers.wait(60.0)
        try:
            return write(held, view, offset)
        finally:
            os.close(held)

    monkeypatch.setattr(backend, "pwritev", pwritev)
    yield drive
    drive.answers.set()
    join_staging()


def join_staging() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("lohan-staging"):
            thread.join(60.0)


def test_a_timeout_names_the_request_that_hangs(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_time, "INTERRUPT_S", 0.1)
    monkeypatch.setattr(Work.wait, "__defaults__", (0.2,))
    monkeypatch.setattr(HostPool.acquire, "__kwdefaults__", {"timeout_s": 0.2})
    answers = threading.Event()
    monkeypatch.setattr(store, "write", lambda *args: answers.wait(60.0))
    with pytest.raises(LaneTimeout, match="'write x' on lane 'staging': it is still running"):
        Staging(store).write(filling("x", PARTS, 1))
    answers.set()
    join_staging()


def test_the_store_closes_without_what_an_interrupt_left_behind(store: NvmeStore, slow: SlowDrive) -> None:
    with pytest.raises(KeyboardInterrupt):
        Staging(store).write([*filling("x", 1, 1), Part("x", PAGE_BYTES, PAGE_BYTES, slow.interrupt)])
    store.close(timeout_s=1.0)
    assert not slow.answers.is_set()


def test_what_an_interrupt_left_behind_keeps_its_memory(
    tmp_path: Path, backend: FaultyBackend, slow: SlowDrive
) -> None:
    """What is yet to be written of it are no zeros."""
    drives = [tmp_path / "0", tmp_path / "1"]
    for drive in drives:
        drive.mkdir()
    with NvmeStore(drives, stripe_bytes=PAGE_BYTES, backend=backend) as store:
        store.allocate({"x": 4 * PAGE_BYTES})
        both = Part("x", 0, 2 * PAGE_BYTES, functools.partial(_fill, 7))
        with pytest.raises(KeyboardInterrupt):
            Staging(store).write([both, Part("x", 2 * PAGE_BYTES, 2 * PAGE_BYTES, slow.interrupt)])
        slow.answers.set()
        join_staging()
        assert taken(Staging(store), "x", 2) == [7, 7]
