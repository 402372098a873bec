"""Checkpoints of a store: what is committed is there again after any end, and damage of any kind is noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lossy_drive import LossyDrive
from lohan_fx.errors import StoreError
from lohan_fx.runtime import generation_files, generations, nvme_store
from lohan_fx.runtime.file_backend import FileBackend, PosixBackend
from lohan_fx.runtime.generation_files import CHECKPOINTS, IDENTITY, generation_path, generations_in, read_generations
from lohan_fx.runtime.in_time import several
from lohan_fx.runtime.manifest import VERSION, Manifest, sealed
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.store_file import STORE_NAME
from lohan_fx.runtime.versions import Span, Versions
from tests.runtime.faulty_backend import FaultyBackend
from tests.runtime.test_in_time import interrupt_main_thread, interrupted_at, interruptible, lines_of
from tests.runtime.test_nvme_store import PAGE, contents, page_aligned, patterned

pytestmark = pytest.mark.usefixtures("leak_check")

SIZES = {"a": 5 * PAGE + 100, "b": PAGE, "scratch": 3 * PAGE}
CHUNKS = {"a": 2 * PAGE, "b": 4 * PAGE}
KEPT = tuple(CHUNKS)


def begin(*directories: Path, keep: int = 1, backend: FileBackend | None = None) -> NvmeStore:
    store = NvmeStore(directories, backend=backend, stripe_bytes=PAGE)
    store.keep_generations(keep)
    store.allocate(SIZES, chunk_bytes=CHUNKS)
    return store


def resume(*directories: Path, backend: FileBackend | None = None) -> NvmeStore:
    return NvmeStore(directories, backend=backend, stripe_bytes=PAGE, resume=read_generations(directories))


def fill(store: NvmeStore, seed: int) -> dict[str, bytes]:
    """Write all that is kept anew; what was written."""
    written = {}
    for name in KEPT:
        data = patterned(-(-SIZES[name] // PAGE) * PAGE, seed)
        store.write(name, 0, data, SIZES[name])
        written[name] = bytes(data[: SIZES[name]].numpy())
    return written


def everything(store: NvmeStore) -> dict[str, bytes]:
    return {name: bytes(contents(store, name, SIZES[name]).numpy()) for name in KEPT}


def flip(directory: Path, place: int) -> None:
    """Change a bit of the store's file."""
    with (directory / STORE_NAME).open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


class Dead(Exception):
    pass


def die() -> None:
    raise Dead


# --- commit and resume -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 3])
def test_what_was_committed_is_there_again_and_nothing_else(directory: Path, keep: int) -> None:
    with begin(directory, keep=keep) as store:
        for seed in range(keep + 2):
            expected = fill(store, seed)
            assert store.commit({"seed": seed}) == seed + 1
        fill(store, 99)
    assert generations_in(directory) == list(range(3, keep + 3))
    manifests = read_generations([directory])
    assert [m.state["seed"] for m in manifests] == list(range(2, keep + 2))
    with resume(directory) as store:
        assert everything(store) == expected
        assert (store.committed, store.keeps) == (keep + 2, keep)


def test_scratch_is_not_kept_and_its_room_used_again(directory: Path) -> None:
    with begin(directory) as store:
        store.write("scratch", 0, page_aligned(3 * PAGE, 7), 3 * PAGE)
        fill(store, 0)
        store.commit({})
    sizes = set()
    for _ in range(3):
        with resume(directory) as store:
            store.allocate({"scratch": 3 * PAGE})
            assert not contents(store, "scratch", 3 * PAGE).any()
            sizes.add(store.nbytes_allocated)
            store.commit({})
    assert len(sizes) == 1


def test_disk_space_is_twice_the_states_and_taken_when_asked_for(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lohan_fx")
    with NvmeStore([directory]) as store:
        store.allocate(SIZES, chunk_bytes=CHUNKS)
        assert store.nbytes_allocated == (6 + 1 + 3) * PAGE
        before = everything(store) if fill(store, 5) else {}
        store.keep_generations(1)
        assert store.nbytes_allocated == (6 + 1 + 3 + 6 + 1) * PAGE
        assert f"{7 * PAGE} bytes of states in {directory}, and {7 * PAGE} more to keep the last 1" in caplog.text
        assert everything(store) == before
        store.commit({})
    with resume(directory) as store:
        assert everything(store) == before


def test_too_little_space_for_checkpoints_is_found_before_anything_is_written(directory: Path) -> None:
    backend = FaultyBackend(free_bytes={directory: 11 * PAGE})
    with NvmeStore([directory], backend=backend) as store:
        store.allocate(SIZES, chunk_bytes=CHUNKS)
        backend._free_bytes[directory] = 6 * PAGE
        with pytest.raises(StoreError, match=rf"{7 * PAGE} bytes are needed .* {6 * PAGE} are free"):
            store.keep_generations(1)
        assert store.nbytes_allocated == 10 * PAGE
    assert not list(directory.iterdir())


def test_without_a_commit_nothing_is_left_behind(directory: Path) -> None:
    with begin(directory) as store:
        fill(store, 0)
    assert not list(directory.iterdir())


def test_a_resumed_store_reads_nothing_by_itself(directory: Path) -> None:
    with begin(directory) as store:
        fill(store, 0)
        store.commit({})
    with resume(directory) as store:
        assert (store.bytes_read, store.bytes_written) == (0, 0)


def test_first_write_goes_elsewhere_and_later_ones_stay(directory: Path) -> None:
    with begin(directory) as store:
        fill(store, 0)
        store.commit({})
        assert store._extents["a"].versions is not None
        versions = store._extents["a"].versions
        before = versions.current.copy()
        for _ in range(3):
            store.write("a", 0, patterned(2 * PAGE, 1), 2 * PAGE)
            assert versions.current[0] != before[0]
            assert (versions.current[1:] == before[1:]).all()


def test_the_first_write_after_a_commit_leaves_the_rest_of_its_chunk(directory: Path) -> None:
    with begin(directory) as store:
        expected = fill(store, 0)
        store.commit({})
        part, before = patterned(PAGE, 1), expected["a"]
        store.write("a", PAGE, part, PAGE)
        expected["a"] = before[:PAGE] + bytes(part.numpy()) + before[2 * PAGE :]
        assert everything(store) == expected
        store.commit({})
    with resume(directory) as store:
        assert everything(store) == expected


def test_neighbouring_chunks_are_one_request_while_they_are_in_one_slot(directory: Path) -> None:
    backend = FaultyBackend()

    def requests(call: str, access: Callable[[], object]) -> int:
        backend.calls.clear()
        access()
        return backend.calls.count(call)

    with begin(directory, backend=backend) as store:
        assert requests("pwritev", lambda: fill(store, 0)) == len(KEPT)
        assert requests("preadv", lambda: everything(store)) == len(KEPT)
        store.commit({})
        store.write("a", 2 * PAGE, patterned(2 * PAGE, 1), 2 * PAGE)  # the second of three goes elsewhere
        assert requests("preadv", lambda: contents(store, "a", SIZES["a"])) == 3
        store.commit({})
        store.write("a", 0, patterned(6 * PAGE, 2), SIZES["a"])  # each to the slot that it is not in
        expected = everything(store)
        assert bytes(patterned(6 * PAGE, 2).numpy())[: SIZES["a"]] == expected["a"]
        store.commit({})
    with resume(directory) as store:
        assert everything(store) == expected


def test_of_a_write_that_fails_half_way_the_rest_counts_as_unwritten(directory: Path) -> None:
    backend = FaultyBackend()
    with begin(directory, backend=backend) as store:
        fill(store, 0)
        store.commit({})
        store.write("a", 2 * PAGE, patterned(2 * PAGE, 1), 2 * PAGE)
        store.commit({})
        backend.faults["pwritev"] = [None, errno.EIO]
        with pytest.raises(StoreError):
            store.write("a", 0, patterned(6 * PAGE, 2), SIZES["a"])
        versions = store._extents["a"].versions
        assert versions is not None and sorted(versions.lost) == [1, 2]
        with pytest.raises(StoreError, match="a write to 'a' failed"):
            store.commit({})
        store.write("a", 2 * PAGE, patterned(4 * PAGE, 3), SIZES["a"] - 2 * PAGE)
        expected = everything(store)
        store.commit({})
    with resume(directory) as store:
        assert everything(store) == expected


def test_parts_that_failed_are_written_again_in_parts(directory: Path) -> None:
    """As both moments of a parameter, which share a chunk, are."""
    backend = FaultyBackend()
    with begin(directory, backend=backend) as store:
        fill(store, 0)
        store.commit({})
        backend.faults["pwritev"] = [None, errno.EIO]  # the rest of the chunk is copied first
        with pytest.raises(StoreError):
            store.write("a", 0, patterned(PAGE, 1), PAGE)
        versions = store._extents["a"].versions
        assert versions is not None and versions.lost == {0: (0, PAGE)}
        store.write("a", PAGE, patterned(PAGE, 2), PAGE)
        with pytest.raises(StoreError, match="a write to 'a' failed"):
            store.commit({})
        store.write("a", 0, patterned(PAGE, 2), PAGE)
        expected = everything(store)
        store.commit({})
    with resume(directory) as store:
        assert everything(store) == expected


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("failed", [(0,), (1,), (0, 1)])
def test_what_failed_counts_as_unwritten_until_the_last_part_of_it_is_written(
    failed: tuple[int, ...], order: tuple[int, ...]
) -> None:
    """And no longer: no commit would come after it any more."""
    versions = Versions(2 * PAGE, 2 * PAGE, [(), ()])
    halves = Span(0, 0, PAGE, False), Span(0, PAGE, 2 * PAGE, False)
    versions.write_failed(versions.span_of(0) if len(failed) == 2 else halves[failed[0]])
    left = set(failed)
    for half in order:
        versions.end_write(halves[half], None)
        left.discard(half)
        assert bool(versions.lost) == bool(left)


def test_each_unknown_checksum_is_a_call_of_its_own(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that did not keep generations from the start reads all of it at its first commit, which may take hours."""
    store = NvmeStore([directory], stripe_bytes=PAGE)
    store.allocate(SIZES, chunk_bytes=CHUNKS)
    fill(store, 0)
    store.keep_generations(1)
    asked: list[str] = []

    def noted(calls: Iterable[tuple[Callable[[], None], str]], threads: int) -> None:
        made = list(calls)
        asked.extend(what for _, what in made)
        several(made, threads)

    monkeypatch.setattr(nvme_store, "several", noted)
    expected = everything(store)
    assert store.commit({}) == 1
    assert asked == [
        *(f"reading chunk {chunk} of 'a' for its checksum" for chunk in range(3)),
        *(f"reading chunk {chunk} of 'b' for its checksum" for chunk in range(len(asked) - 3)),
    ]
    assert len(asked) > 3
    store.close()
    with resume(directory) as store:
        assert everything(store) == expected


def test_a_commit_reads_no_more_at_once_than_there_is_memory_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of drives."""
    threads: list[int] = []

    def noted(calls: Iterable[tuple[Callable[[], None], str]], at_once: int) -> None:
        threads.append(at_once)
        several(calls, at_once)

    monkeypatch.setattr(nvme_store, "several", noted)
    drives = [directory / str(number) for number in range(4)]
    for drive in drives:
        drive.mkdir()
    with begin(*drives) as store:
        for most_bytes in (64 << 20, 5 * 2 * PAGE, PAGE):
            monkeypatch.setattr(nvme_store, "MOST_BYTES", most_bytes)
            fill(store, most_bytes)
            store.commit({}, verify=True)
    assert threads == [12, 12, 5, 5, 1, 1]


# --- any sequence of writes, commits and ends --------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sequence_of_writes_commits_and_power_losses(data: st.DataObject, tmp_path_factory: Any) -> None:
    directories = [tmp_path_factory.mktemp("store", numbered=True) for _ in range(data.draw(st.integers(1, 2)))]
    keep = data.draw(st.integers(1, 2))
    possible: list[dict[str, bytes] | None] = [None]
    for life in range(data.draw(st.integers(1, 4))):
        drive = LossyDrive(data.draw(st.integers(1, 60)), seed=life, loses=data.draw(st.booleans()), on_death=die)
        store: NvmeStore | None = None
        try:
            if read_generations(directories):
                store = resume(*directories, backend=drive)
                assert everything(store) in possible
                possible = [everything(store)]
            else:
                assert None in possible
                store = begin(*directories, keep=keep, backend=drive)
            _live(store, data, possible)
        except Dead:
            pass
        finally:
            if store is not None:
                store.close(remove=False)
    if read_generations(directories):
        with resume(*directories) as store:
            assert everything(store) in possible


def _live(store: NvmeStore, data: st.DataObject, possible: list[dict[str, bytes] | None]) -> None:
    """Write parts and commit, for as long as the drive lives; ``possible`` is what a resume may find."""
    now = fill(store, data.draw(st.integers(0, 9)))
    for _ in range(data.draw(st.integers(1, 8))):
        name = data.draw(st.sampled_from(KEPT))
        pages = -(-SIZES[name] // PAGE)
        first = data.draw(st.integers(0, pages - 1))
        nbytes = min(data.draw(st.integers(1, pages)) * PAGE, SIZES[name] - first * PAGE)
        start, part = first * PAGE, patterned(pages * PAGE, data.draw(st.integers(0, 99)))
        store.write(name, start, part, nbytes)
        before = now[name]
        now = {**now, name: before[:start] + bytes(part[:nbytes].numpy()) + before[start + nbytes :]}
        if data.draw(st.booleans()):
            assert everything(store) == now
            possible.append(now)  # the commit may succeed although its process never hears of it
            store.commit({})
            possible[:] = [now]


# --- faults during a commit --------------------------------------------------------------------------------------


class Failing(PosixBackend):
    """The ``call`` of that name fails, from the ``skip``-th on, ``times`` times."""

    def __init__(self) -> None:
        self.call, self.times = "", 0

    def _maybe(self, call: str) -> None:
        if call == self.call and self.times > 0:
            self.times -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def fdatasync(self, fd: int) -> None:
        self._maybe("fdatasync")
        super().fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._maybe("rename")
        super().rename(source, target)

    def sync_directory(self, directory: Path) -> None:
        self._maybe("sync_directory")
        super().sync_directory(directory)


@pytest.mark.parametrize(("call", "times", "goes_on"), [("rename", 1, True), ("sync_directory", 1, True),
                         ("sync_directory", 2, False), ("fdatasync", 1, False)])  # fmt: skip
def test_a_commit_that_fails_leaves_the_last_in_force(directory: Path, call: str, times: int, goes_on: bool) -> None:
    backend = Failing()
    with begin(directory, backend=backend) as store:
        expected = fill(store, 0)
        store.commit({})
        later = fill(store, 1)
        backend.call, backend.times = call, times
        with pytest.raises(StoreError, match=r"Input/output error"):
            store.commit({})
        if goes_on:
            later = fill(store, 2)
            assert store.commit({}) == 2
            expected = later
        else:
            with pytest.raises(StoreError, match=r"resume from the last checkpoint"):
                store.commit({})
            with pytest.raises(StoreError, match=r"resume from the last checkpoint"):
                fill(store, 3)
    with resume(directory) as store:
        assert everything(store) == expected


class Interrupting(PosixBackend):
    """Once armed, SIGINT comes in the middle of the next flush, or as the next file grows, which then ``hangs`` or goes on."""

    def __init__(self, *, hangs: bool) -> None:
        self.armed = False
        self.released = threading.Event()
        self._hangs = hangs

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        if self.armed:
            self.armed = False
            interrupt_main_thread()
            self.released.wait(60.0 if self._hangs else 0.05)
            if self._hangs:
                threading.current_thread().name = "left behind"
        super().fallocate(fd, offset, nbytes)

    def fdatasync(self, fd: int) -> None:
        if self.armed:
            self.armed = False
            interrupt_main_thread()
            self.released.wait(60.0 if self._hangs else 0.05)
            if self._hangs:
                threading.current_thread().name = "left behind"  # a daemon that nobody waits for
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(fd)


@pytest.mark.parametrize("hangs", [False, True])
def test_an_interrupted_commit_is_a_checkpoint_or_none(
    directory: Path, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan_fx.runtime.in_time.INTERRUPT_S", 0.3 if hangs else 10.0)
    backend = Interrupting(hangs=hangs)
    with begin(directory, backend=backend) as store:
        fill(store, 0)
        backend.armed = True
        with interruptible(), pytest.raises(KeyboardInterrupt):
            store.commit({})
        expected = everything(store)
        if hangs:
            with pytest.raises(StoreError, match=r"resume from the last checkpoint"):
                fill(store, 1)
            backend.released.set()
        else:
            expected = fill(store, 1)
            assert store.commit({}) == 2
    assert (directory / STORE_NAME).exists()  # a commit that hangs may yet come to its end
    if hangs:
        assert not read_generations([directory])
        begin(directory).close()
    else:
        with resume(directory) as store:
            assert everything(store) == expected


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("call", ["keep_generations", "allocate"])
def test_an_interrupt_as_space_is_taken_leaves_nothing_half_done(
    directory: Path, call: str, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lohan_fx.runtime.in_time.INTERRUPT_S", 0.1 if hangs else 60.0)
    backend = Interrupting(hangs=hangs)
    with NvmeStore([directory], backend=backend, stripe_bytes=PAGE) as store:
        steps = [lambda: store.allocate(SIZES, chunk_bytes=CHUNKS), lambda: store.keep_generations(1)]
        before, interrupted = steps if call == "keep_generations" else reversed(steps)
        before()
        backend.armed = True
        with interruptible(), pytest.raises(KeyboardInterrupt):
            interrupted()
        backend.released.set()
        store.keep_generations(1)  # and behind what hung
        assert store.nbytes_allocated == (6 + 1 + 3 + 6 + 1) * PAGE == (directory / STORE_NAME).stat().st_size
        for seed in (1, 2):
            expected = fill(store, seed)
            store.commit({})
    with resume(directory) as store:
        assert everything(store) == expected


def test_an_interrupt_at_any_line_as_checkpoints_are_prepared_does_all_or_nothing(directory: Path) -> None:
    """Whoever calls again gets checkpoints of all extents, and no more disk space is taken than for them."""
    codes = [
        NvmeStore.keep_generations.__code__,
        NvmeStore._keep_generations.__code__,
        generations.Generations.add.__code__,
    ]
    for code in codes:
        for line in lines_of(code):
            with NvmeStore([directory], stripe_bytes=PAGE) as store:
                store.allocate(SIZES, chunk_bytes=CHUNKS)
                with interrupted_at(code, line), contextlib.suppress(KeyboardInterrupt):
                    store.keep_generations(1)
                store.keep_generations(1)
                assert store.nbytes_allocated == (6 + 1 + 3 + 6 + 1) * PAGE
                assert store._generations is not None and store._generations._extents.keys() == set(KEPT)


def test_a_checkpoint_that_would_lack_extents_is_refused(directory: Path) -> None:
    with begin(directory) as store:
        fill(store, 0)
        assert store._generations is not None
        del store._generations._extents["b"]
        with pytest.raises(StoreError, match=r"it would lack 1 extents, of them 'b'"):
            store.commit({})
    assert not read_generations([directory])


def test_a_verified_commit_reads_back_what_is_new_and_refuses_what_the_drive_changed(directory: Path) -> None:
    with begin(directory) as store:
        expected = fill(store, 0)
        store.commit({}, verify=True)
        before = store.bytes_read
        store.write("a", 0, patterned(2 * PAGE, 1), 2 * PAGE)
        store.commit({}, verify=True)
        assert store.bytes_read == before + 2 * PAGE
        expected = everything(store)
        store.write("a", 0, patterned(2 * PAGE, 2), 2 * PAGE)
        found = read_generations([directory])[-1].extents["a"]
        (other,) = {0, 1} - {int(found.current[0])}
        flip(directory, found.slots[other][0].file_offset_bytes + 5)
        with pytest.raises(StoreError, match=rf"reading back 'a'.*bytes 0 to {2 * PAGE} of it are damaged"):
            store.commit({}, verify=True)
    with resume(directory) as store:
        assert everything(store) == expected


class Cached(FaultyBackend):
    """Without O_DIRECT; ``asked``: what of flushing, forgetting and reading was asked of the store's file, in order."""

    def __init__(self) -> None:
        super().__init__(direct=False)
        self.asked: list[str] = []
        self._fd: int | None = None

    def open(self, path: Path, *, direct: bool) -> int:
        fd = super().open(path, direct=direct)
        self._fd = fd if path.name == STORE_NAME else self._fd
        return fd

    def _note(self, call: str, fd: int) -> None:
        if fd == self._fd and self.asked[-1:] != [call]:
            self.asked.append(call)

    def fdatasync(self, fd: int) -> None:
        self._note("flush", fd)
        super().fdatasync(fd)

    def forget(self, fd: int) -> None:
        self._note("forget", fd)
        super().forget(fd)

    def preadv(self, fd: int, view: memoryview, offset: int) -> int:
        self._note("read", fd)
        return super().preadv(fd, view, offset)


def test_a_verified_commit_reads_from_the_drive_and_not_from_the_page_cache(directory: Path) -> None:
    backend = Cached()
    with begin(directory, backend=backend) as store:
        expected = fill(store, 0)
        store.commit({}, verify=True)
        assert backend.asked == ["flush", "forget", "read", "flush"]
        fill(store, 1)
        backend.faults["fdatasync"] = [errno.EIO]
        with pytest.raises(StoreError, match="Input/output error"):
            store.commit({}, verify=True)
        with pytest.raises(StoreError, match="resume from the last checkpoint"):
            store.commit({})
    with resume(directory) as store:
        assert everything(store) == expected


class Flipping(PosixBackend):
    """Once armed, a bit of the next manifest is another on its way to the drive."""

    armed = False

    def pwritev(self, fd: int, view: memoryview, offset: int) -> int:
        if self.armed and bytes(view[:8]) == b"lohan_fx":
            self.armed = False
            view = memoryview(bytes([view[0] ^ 1]) + bytes(view[1:]))
        return super().pwritev(fd, view, offset)


def test_a_manifest_that_the_drive_changed_replaces_none(directory: Path) -> None:
    """With one checkpoint kept, it is all there is."""
    backend = Flipping()
    with begin(directory, backend=backend) as store:
        expected = fill(store, 0)
        store.commit({})
        fill(store, 1)
        backend.armed = True
        with pytest.raises(StoreError, match=r"writing .*2: the drive gives back other bytes than were written"):
            store.commit({})
        assert generations_in(directory) == [1]
    with resume(directory) as store:
        assert everything(store) == expected
        later = fill(store, 2)
        assert store.commit({}) == 2
    with resume(directory) as store:
        assert everything(store) == later


def test_a_manifest_that_could_not_be_read_again_replaces_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one of a model whose weights are buffers."""
    monkeypatch.setattr(generation_files, "MAX_MANIFEST_BYTES", 5000)
    with begin(directory) as store:
        expected = fill(store, 0)
        store.commit({})
        fill(store, 1)
        with pytest.raises(StoreError, match=r"and no more than 5000 would be read again"):
            store.commit({"buffers": "x" * 5000})
        assert generations_in(directory) == [1]
    with resume(directory) as store:
        assert everything(store) == expected


def test_a_commit_that_cannot_look_for_old_checkpoints_is_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path) -> list[str]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with begin(directory) as store:
        fill(store, 0)
        store.commit({})
        expected = fill(store, 1)
        with monkeypatch.context() as patched:
            patched.setattr(os, "listdir", failing)
            assert store.commit({}) == 2
        assert generations_in(directory) == [1, 2]
    with resume(directory) as store:
        assert everything(store) == expected
        assert store.commit({}) == 3
        assert generations_in(directory) == [3]


def test_checkpoints_that_cannot_be_looked_for_are_named(directory: Path) -> None:
    """As where another user's run has made them."""
    (directory / CHECKPOINTS).touch()
    for begin_anew_or_resume in (begin, resume):
        with pytest.raises(StoreError, match=rf"looking for checkpoints in .*{CHECKPOINTS} failed"):
            begin_anew_or_resume(directory)
    (directory / CHECKPOINTS).unlink()


def test_nothing_is_committed_over_a_write_that_failed(directory: Path) -> None:
    backend = FaultyBackend()
    with begin(directory, backend=backend) as store:
        fill(store, 0)
        store.commit({})
        backend.faults["pwritev"] = [errno.EIO]
        with pytest.raises(StoreError):
            fill(store, 1)
        with pytest.raises(StoreError, match="a write to 'a' failed"):
            store.commit({})
        expected = fill(store, 2)
        store.commit({})
    with resume(directory) as store:
        assert everything(store) == expected


# --- damage and strangers ----------------------------------------------------------------------------------------


def committed(directory: Path) -> Manifest:
    with begin(directory) as store:
        fill(store, 0)
        store.commit({})
    return read_generations([directory])[0]


@pytest.mark.parametrize("nbytes", [SIZES["a"], PAGE])
def test_a_flipped_bit_is_found_by_the_first_read(directory: Path, nbytes: int) -> None:
    record = committed(directory).extents["a"]
    flip(directory, record.slots[record.current[0]][0].file_offset_bytes + 5)
    with resume(directory) as store:
        with pytest.raises(StoreError, match=rf"extent 'a': bytes 0 to {2 * PAGE} of it are damaged.*fsck"):
            contents(store, "a", nbytes)
        assert contents(store, "b", PAGE).numel() == PAGE


def test_what_is_read_uncompared_is_compared_by_the_calls_that_it_returns(directory: Path) -> None:
    record = committed(directory).extents["a"]
    with resume(directory) as store:
        buffer = page_aligned(6 * PAGE)
        found = store.read_uncompared("a", 0, buffer, SIZES["a"])
        assert len(found) == 3
        for compare in found:
            compare()
        flip(directory, record.slots[record.current[1]][0].file_offset_bytes + 2 * PAGE + 5)
        first, second, third = store.read_uncompared("a", 0, buffer, SIZES["a"])
        first(), third()
        with pytest.raises(StoreError, match=rf"extent 'a': bytes {2 * PAGE} to {4 * PAGE} of it are damaged"):
            second()
    with (
        resume(directory) as store,  # which has seen nothing of the chunk, and is asked for a part
        pytest.raises(StoreError, match=rf"extent 'a': bytes {2 * PAGE} to {4 * PAGE} of it are damaged"),
    ):
        store.read_uncompared("a", 2 * PAGE, buffer, PAGE)


def test_checksums_that_are_known_before_a_write_are_kept_with_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found once; and what changes between them and the write is damage like any other."""
    buffers = {"a": patterned(6 * PAGE, 1), "scratch": patterned(3 * PAGE, 2)}
    with begin(directory) as store:
        fill(store, 0)
        for name, buffer in buffers.items():
            known = store.checksums(name, 0, buffer, SIZES[name])
            with monkeypatch.context() as patched:
                patched.setattr(generations, "checksum", lambda view: pytest.fail("found twice"))
                store.write(name, 0, buffer, SIZES[name], known)
            assert torch.equal(contents(store, name, SIZES[name]), buffer[: SIZES[name]])
        for name, buffer in buffers.items():
            known = store.checksums(name, 0, buffer, SIZES[name])
            buffer[5] += 1
            store.write(name, 0, buffer, SIZES[name], known)
            with pytest.raises(StoreError, match=r"are damaged|is not what was written"):
                contents(store, name, SIZES[name])
        assert store.checksums("a", PAGE, patterned(2 * PAGE, 1), 2 * PAGE) == (None, None)
    with NvmeStore([directory]) as store:  # without checkpoints nothing is summed
        store.allocate({"a": PAGE})
        assert store.checksums("a", 0, patterned(PAGE, 1), PAGE) is None


def test_a_new_store_leaves_checkpoints_alone(directory: Path) -> None:
    committed(directory)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=r"holds a checkpoint \(number 1\).*resume_from_checkpoint=True"):
        NvmeStore([directory])
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_directories_in_another_order_are_refused(directory: Path) -> None:
    one, two = directory / "one", directory / "two"
    one.mkdir(), two.mkdir()
    with begin(one, two) as store:
        fill(store, 0)
        store.commit({})
    for wrong in ([two], [one], [one, one]):
        with pytest.raises(StoreError, match=r"name|continues"):
            resume(*wrong)
    with pytest.raises(StoreError, match="belongs to a store"):
        NvmeStore([two])
    with resume(one, two) as store:
        everything(store)


def test_files_are_their_owners_only(directory: Path) -> None:
    committed(directory)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*")}
    assert modes == {STORE_NAME: 0o600, CHECKPOINTS: 0o700, IDENTITY: 0o600, "generation-000000000001": 0o600}


@pytest.mark.parametrize("place", [STORE_NAME, f"{CHECKPOINTS}/generation-000000000001", CHECKPOINTS])
def test_links_are_not_followed(directory: Path, place: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    committed(directory)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "moved"
    (directory / place).rename(elsewhere)
    (directory / place).symlink_to(elsewhere)
    with pytest.raises(StoreError):
        resume(directory)


@pytest.mark.parametrize("change", [lambda p: p.chmod(0o644), lambda p: os.truncate(p, PAGE), Path.unlink])
def test_a_store_file_that_is_not_ours_is_refused(directory: Path, change: Callable[[Path], None]) -> None:
    committed(directory)
    change(directory / STORE_NAME)
    with pytest.raises(StoreError):
        resume(directory)


def test_other_formats_are_refused_untouched(directory: Path) -> None:
    committed(directory)
    path = generation_path(directory, 1)
    body = path.read_bytes().partition(b"\n")[2]
    newer = sealed(body).replace(f"checkpoint {VERSION} ".encode(), f"checkpoint {VERSION + 1} ".encode(), 1)
    for data, word in (
        (newer, f"is of format {VERSION + 1}"),
        (b"PK\x03\x04 something", "not a checkpoint"),
        (sealed(body)[:-9], "checksum does not match"),
    ):
        path.write_bytes(data)
        with pytest.raises(StoreError, match=word):
            resume(directory)
        assert path.read_bytes() == data
    assert sorted(p.name for p in directory.iterdir()) == [CHECKPOINTS, STORE_NAME]


def test_an_older_checkpoint_that_is_damaged_costs_only_itself(directory: Path) -> None:
    with begin(directory, keep=3) as store:
        for seed in range(3):
            expected = fill(store, seed)
            store.commit({"seed": seed})
    path = generation_path(directory, 2)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match=rf"checkpoint 2 is lost, later ones are not: {path} is damaged"):
        store = resume(directory)
    with store:
        assert everything(store) == expected
        for seed in range(3, 6):
            expected = fill(store, seed)
            store.commit({"seed": seed})
    assert [m.state["seed"] for m in read_generations([directory])] == [3, 4, 5]
    with resume(directory) as store:
        assert everything(store) == expected
    path = generation_path(directory, 6)
    path.write_bytes(b"")
    with pytest.raises(StoreError, match=str(path)):
        resume(directory)


@pytest.mark.parametrize("commits", [0, 1])
def test_the_checkpoint_before_the_newest_is_whole_also_after_a_resume(directory: Path, commits: int) -> None:
    kept: list[dict[str, bytes]] = []
    with begin(directory, keep=2) as store:
        for seed in range(2):
            kept.append(fill(store, seed))
            store.commit({})
    with resume(directory) as store:
        for seed in range(2, 2 + commits):
            kept.append(fill(store, seed))
            store.commit({})
        fill(store, 99)
    generation_path(directory, len(kept)).unlink()
    with resume(directory) as store:
        assert everything(store) == kept[-2]


# --- manifests that somebody else wrote --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manifest]:
    directory = tmp_path_factory.mktemp("manifest")
    directory.chmod(0o700)
    with begin(directory) as store:
        fill(store, 0)
        store.commit({"step": 3})
    yield read_generations([directory])[0]


def good_places(found: Manifest) -> bool:
    """Judged anew, byte by byte of the pages: all inside, none twice, all covered."""
    pages: set[tuple[int, int]] = set()
    for record in found.extents.values():
        for slot in record.slots:
            covered = 0
            for piece in slot:
                assert piece.start_bytes == covered
                covered += piece.nbytes
                for offset in range(piece.file_offset_bytes, piece.file_offset_bytes + piece.nbytes, PAGE):
                    assert offset >= 0 and offset + PAGE <= found.file_bytes[piece.file_index]
                    assert (piece.file_index, offset) not in pages
                    pages.add((piece.file_index, offset))
            assert covered == record.padded_bytes
        assert all(number < len(record.slots) for number in record.current)
    return True


numbers = st.integers(-(2**70), 2**70) | st.sampled_from([0, 1, PAGE, -PAGE, 2**63, 2**31])
strange = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_manifest_leads_out_of_the_files(data: st.DataObject, manifest: Manifest) -> None:
    body = json.loads(manifest.to_bytes().partition(b"\n")[2])
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(data, body)
    try:
        found = Manifest.from_bytes(sealed(json.dumps(body).encode()), "here")
    except StoreError as error:
        assert str(error).startswith("here is damaged")
    else:
        if sum(found.file_bytes) < 1 << 24:
            assert good_places(found)


def _mutate(data: st.DataObject, body: Any) -> None:
    place = body
    while True:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        if not len(keys):
            return
        key = data.draw(st.sampled_from(list(keys)))
        inner = place[key]
        if isinstance(inner, dict | list) and data.draw(st.integers(0, 4)):
            place = inner
            continue
        if isinstance(inner, str) and inner and data.draw(st.booleans()):
            index = data.draw(st.integers(0, len(inner) - 1))
            place[key] = inner[:index] + data.draw(st.sampled_from("AB/+=z0")) + inner[index + 1 :]
        elif isinstance(inner, int) and data.draw(st.booleans()):
            place[key] = inner + data.draw(st.sampled_from([-1, 1, PAGE, -PAGE]))
        else:
            place[key] = data.draw(strange)
        return


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_bytes_are_a_manifest_or_a_store_error(data: st.DataObject, manifest: Manifest) -> None:
    raw = bytearray(manifest.to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    resealed = sealed(bytes(raw[cut:]))
    for candidate in (bytes(raw), bytes(raw[:cut]), resealed, data.draw(st.binary(max_size=64))):
        try:
            Manifest.from_bytes(candidate, "here")
        except StoreError:
            continue
        assert candidate in (resealed, manifest.to_bytes())


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(StoreError, match="damaged"):
        Manifest.from_bytes(sealed(b"[" * 200_000), "here")


def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    again = Manifest.from_bytes(manifest.to_bytes(), "here")
    assert again.to_bytes() == manifest.to_bytes()
    assert dataclasses.replace(again, extents={}) == dataclasses.replace(manifest, extents={})
    assert torch.equal(torch.tensor(again.extents["a"].current), torch.tensor(manifest.extents["a"].current))
