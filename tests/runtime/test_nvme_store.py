"""The NVMe store against a model in memory, with every fault injected and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_fx.errors import LaneTimeout, StoreError
from lohan_fx.runtime import file_backend
from lohan_fx.runtime.file_backend import LOCK_NAME, PosixBackend, file_system_type
from lohan_fx.runtime.host_pool import PAGE_BYTES, page_padded_bytes
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.store_file import STORE_NAME
from tests.runtime.faulty_backend import Claim, Fault, FaultyBackend, Short

pytestmark = pytest.mark.usefixtures("leak_check")

PAGE = PAGE_BYTES
PATIENCE_S = 10.0


def page_aligned(nbytes: int, fill: int | None = None) -> torch.Tensor:
    room = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    skip = -room.data_ptr() % PAGE
    buffer = room[skip : skip + nbytes]
    return buffer if fill is None else buffer.fill_(fill)


def patterned(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return page_aligned(nbytes).copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))


def contents(store: NvmeStore, name: str, nbytes: int, offset: int = 0) -> torch.Tensor:
    buffer = page_aligned(page_padded_bytes(nbytes), fill=0xEE)
    store.read(name, offset, buffer, nbytes)
    return buffer[:nbytes]


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    found = [tmp_path / name for name in ("nvme0", "nvme1")]
    for directory in found:
        directory.mkdir()
    return found


@pytest.fixture
def clean(directories: list[Path]) -> Iterator[None]:
    """Whatever happened, the directories are empty and can be used again."""
    yield
    assert [list(directory.iterdir()) for directory in directories] == [[], []]
    NvmeStore(directories).close()


# Round trips


@settings(max_examples=30)
@given(data=st.data())
def test_any_sequence_of_writes_reads_back_as_the_model_says(data: st.DataObject) -> None:
    files = data.draw(st.integers(1, 3))
    weights = data.draw(st.lists(st.floats(0.5, 4.0), min_size=files, max_size=files))
    sizes = data.draw(st.lists(st.integers(0, 9 * PAGE), min_size=1, max_size=4))
    with tempfile.TemporaryDirectory() as root:
        directories = [Path(root) / str(i) for i in range(files)]
        for directory in directories:
            directory.mkdir()
        with NvmeStore(directories, weights=weights, stripe_bytes=2 * PAGE) as store:
            model: dict[str, bytearray] = {}
            for i, size in enumerate(sizes):
                store.allocate({f"e{i}": size})
                model[f"e{i}"] = bytearray(page_padded_bytes(size))
            for seed in range(data.draw(st.integers(0, 8))):
                name = f"e{data.draw(st.integers(0, len(sizes) - 1))}"
                size = sizes[int(name[1:])]
                offset = data.draw(st.integers(0, size // PAGE)) * PAGE
                nbytes = data.draw(st.integers(0, size - offset))
                buffer = patterned(page_padded_bytes(nbytes), seed)
                store.write(name, offset, buffer, nbytes)
                model[name][offset : offset + buffer.numel()] = bytes(buffer.tolist())
            for i, size in enumerate(sizes):
                assert bytes(contents(store, f"e{i}", size).tolist()) == bytes(model[f"e{i}"][:size])
                offset = data.draw(st.integers(0, size // PAGE)) * PAGE
                tail = contents(store, f"e{i}", size - offset, offset)
                assert bytes(tail.tolist()) == bytes(model[f"e{i}"][offset:size])


def test_many_threads_at_once_do_not_mix_anything_up(directories: list[Path], clean: None) -> None:
    names = [f"w{i}" for i in range(8)]
    nbytes = 5 * PAGE + 17
    with NvmeStore(directories, stripe_bytes=PAGE) as store:
        store.allocate(dict.fromkeys(names, nbytes))

        def round_trip(seed: int) -> bool:
            name = names[seed]
            for turn in range(5):
                written = patterned(page_padded_bytes(nbytes), seed * 100 + turn)
                store.write(name, 0, written, nbytes)
                if not torch.equal(contents(store, name, nbytes), written[:nbytes]):
                    return False
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(round_trip, range(8)))
        assert store.bytes_read == store.bytes_written == 8 * 5 * 6 * PAGE


def test_later_allocations_add_and_read_as_zeros(directories: list[Path], clean: None) -> None:
    with NvmeStore(directories, stripe_bytes=PAGE) as store:
        store.allocate({"a": 3 * PAGE})
        store.write("a", 0, page_aligned(3 * PAGE, fill=1), 3 * PAGE)
        store.allocate({"b": 2 * PAGE + 1, "empty": 0})
        assert store.nbytes_allocated == 6 * PAGE
        assert contents(store, "a", 3 * PAGE).eq(1).all()
        assert contents(store, "b", 2 * PAGE + 1).eq(0).all()
        store.read("empty", 0, torch.empty(0, dtype=torch.uint8), 0)
        store.flush()


def test_weights_put_the_bytes_where_the_bandwidth_is(directories: list[Path], clean: None) -> None:
    with NvmeStore(directories, weights=[3e9, 1e9], stripe_bytes=PAGE) as store:
        store.allocate({"a": 40 * PAGE})
        sizes = [(directory / STORE_NAME).stat().st_size for directory in directories]
        assert sizes == [30 * PAGE, 10 * PAGE]


def test_files_are_preallocated_and_their_owners_only(directories: list[Path], clean: None) -> None:
    with NvmeStore(directories) as store:
        store.allocate({"a": 2**20})
        found = (directories[0] / STORE_NAME).stat()
        assert found.st_size == 2**20
        assert found.st_blocks * 512 >= 2**20
        assert stat.S_IMODE(found.st_mode) == 0o600


def test_files_are_direct_where_the_file_system_can(directories: list[Path], clean: None, tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        possible = True
    except OSError:
        possible = False
    probe.unlink()
    with NvmeStore(directories) as store:
        for file in store._files:
            assert file.direct == possible
            assert bool(fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT) == possible


# Short counts and errors


@pytest.mark.parametrize("direct", [True, False])
def test_short_and_interrupted_transfers_are_continued(directories: list[Path], clean: None, direct: bool) -> None:
    script: list[Fault] = [errno.EINTR, Short(PAGE), Short(2 * PAGE), errno.EINTR, None]
    backend = FaultyBackend({"pwritev": script, "preadv": script}, direct=direct)
    with NvmeStore(directories[:1], backend=backend) as store:
        store.allocate({"a": 5 * PAGE})
        written = patterned(5 * PAGE, 1)
        store.write("a", 0, written, 5 * PAGE)
        assert torch.equal(contents(store, "a", 5 * PAGE), written)
        assert backend.calls.count("pwritev") == backend.calls.count("preadv") == 5
        assert (store.bytes_written, store.bytes_read) == (5 * PAGE, 5 * PAGE)


def test_without_o_direct_any_short_count_is_continued(directories: list[Path], clean: None) -> None:
    backend = FaultyBackend({"pwritev": [Short(100), Short(1)], "preadv": [Short(PAGE + 7)]}, direct=False)
    with NvmeStore(directories[:1], backend=backend) as store:
        store.allocate({"a": 2 * PAGE})
        written = patterned(2 * PAGE, 1)
        store.write("a", 0, written, 2 * PAGE)
        assert torch.equal(contents(store, "a", 2 * PAGE), written)


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (errno.EIO, r"Input/output error \(errno 5\); the drive reported a failure"),
        (errno.ENOSPC, r"No space left on device \(errno 28\); free disk space"),
        (errno.EINVAL, r"Invalid argument \(errno 22\); check that drive"),
        (Claim(0), "nothing was moved"),
        (Claim(100), "only 100 moved, not whole pages"),
    ],
)
def test_a_failed_transfer_names_everything_and_the_store_lives_on(
    directories: list[Path], clean: None, call: str, fault: int | Claim, said: str
) -> None:
    backend = FaultyBackend({call: [Short(PAGE), fault]}, direct=True)
    with NvmeStore(directories[:1], backend=backend) as store:
        store.allocate({"layer 3": 8 * PAGE})
        buffer = page_aligned(4 * PAGE, fill=1)
        transfer = store.read if call == "preadv" else store.write
        with pytest.raises(StoreError, match=said) as caught:
            transfer("layer 3", 2 * PAGE, buffer, 3 * PAGE + 5)
        verb = "reading" if call == "preadv" else "writing"
        path = directories[0] / STORE_NAME
        assert str(caught.value).startswith(
            f"{verb} {3 * PAGE + 5} bytes at {2 * PAGE} of extent 'layer 3': {3 * PAGE} bytes at {3 * PAGE} in {path}"
        )
        assert (store.bytes_read, store.bytes_written) == (0, 0)
        transfer("layer 3", 2 * PAGE, buffer, 3 * PAGE + 5)


def test_a_file_cut_by_somebody_else_is_noticed(directories: list[Path], clean: None) -> None:
    with NvmeStore(directories[:1]) as store:
        store.allocate({"a": 4 * PAGE})
        os.truncate(directories[0] / STORE_NAME, PAGE)
        with pytest.raises(StoreError, match="nothing was moved"):
            contents(store, "a", 4 * PAGE)


def test_a_failing_flush_is_a_store_error(directories: list[Path], clean: None) -> None:
    backend = FaultyBackend({"fdatasync": [None, errno.EIO]})
    with (
        NvmeStore(directories, backend=backend) as store,
        pytest.raises(StoreError, match=r"flushing .*nvme1/lohan_fx\.store failed: .*errno 5"),
    ):
        store.flush()


# Allocation failures


def test_too_little_space_is_found_before_anything_is_written(directories: list[Path], clean: None) -> None:
    backend = FaultyBackend(free_bytes={directories[1]: 10 * PAGE})
    with NvmeStore(directories, stripe_bytes=PAGE, backend=backend) as store:
        # Both directories are on one file system here, so it must have room for both halves.
        said = rf"nvme1: {12 * PAGE} bytes are needed .* {10 * PAGE} are free; free {2 * PAGE} bytes"
        with pytest.raises(StoreError, match=said):
            store.allocate({"a": 12 * PAGE})
        assert "fallocate" not in backend.calls
        assert store.nbytes_allocated == 0
        store.allocate({"a": 10 * PAGE})
        assert store.nbytes_allocated == 10 * PAGE


def test_directories_on_different_drives_need_room_for_their_own_part_only(
    directories: list[Path], clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FaultyBackend(free_bytes={directories[0]: 6 * PAGE, directories[1]: 5 * PAGE})
    with NvmeStore(directories, stripe_bytes=PAGE, backend=backend) as store:
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", lambda path: SimpleNamespace(st_dev=directories.index(path)))
            with pytest.raises(StoreError, match=rf"nvme1: {6 * PAGE} bytes are needed .* {5 * PAGE} are free"):
                store.allocate({"a": 12 * PAGE})
            store.allocate({"a": 10 * PAGE})
        assert store.nbytes_allocated == 10 * PAGE


@pytest.mark.parametrize("fault", [errno.ENOSPC, Short(PAGE)])
def test_a_preallocation_that_fails_half_way_gives_everything_back(
    directories: list[Path], clean: None, fault: int | Short
) -> None:
    backend = FaultyBackend({"fallocate": [None, None, None, fault]})
    with NvmeStore(directories, stripe_bytes=PAGE, backend=backend) as store:
        store.allocate({"a": 2 * PAGE})
        store.write("a", 0, page_aligned(2 * PAGE, fill=1), 2 * PAGE)
        with pytest.raises(StoreError, match=rf"preallocating {4 * PAGE} bytes in .*nvme1.*No space left"):
            store.allocate({"b": 8 * PAGE})
        assert store.nbytes_allocated == 2 * PAGE
        assert [(directory / STORE_NAME).stat().st_size for directory in directories] == [PAGE, PAGE]
        with pytest.raises(ValueError, match="no such extent"):
            contents(store, "b", PAGE)
        store.allocate({"b": 8 * PAGE})
        assert contents(store, "b", 8 * PAGE).eq(0).all()
        assert contents(store, "a", 2 * PAGE).eq(1).all()


def test_impossible_extents_are_refused_and_add_nothing(directories: list[Path], clean: None) -> None:
    with NvmeStore(directories) as store:
        store.allocate({"a": PAGE})
        with pytest.raises(ValueError, match=r"'a', which exists with 4096 bytes"):
            store.allocate({"b": PAGE, "a": 2 * PAGE})
        with pytest.raises(ValueError, match=r"-1 bytes asked for extent 'c'"):
            store.allocate({"b": PAGE, "c": -1})
        store.allocate({"b": PAGE})
        assert store.nbytes_allocated == 2 * PAGE


# Callers' mistakes


@pytest.mark.parametrize(
    ("name", "offset", "nbytes", "said"),
    [
        ("b", 0, 1, "no such extent"),
        ("a", 1, 1, "multiple of 4096"),
        ("a", -PAGE, 1, "stay inside"),
        ("a", PAGE, 101, "has 4196 bytes: stay inside"),
        ("a", 2 * PAGE, 1, "stay inside"),
        ("a", 0, -1, "stay inside"),
    ],
)
def test_places_outside_the_extent_are_refused(
    directories: list[Path], clean: None, name: str, offset: int, nbytes: int, said: str
) -> None:
    with NvmeStore(directories) as store:
        store.allocate({"a": PAGE + 100})
        for transfer in (store.read, store.write):
            with pytest.raises(ValueError, match=said):
                transfer(name, offset, page_aligned(2 * PAGE), nbytes)


def test_unsuitable_buffers_are_refused(directories: list[Path], clean: None) -> None:
    unsuitable = [
        (page_aligned(PAGE), r"whole pages need a buffer of 8192 bytes, this one has 4096"),
        (page_aligned(4 * PAGE)[::2], "non-contiguous"),
        (torch.empty(2 * PAGE, dtype=torch.float32), r"torch\.float32 tensor on cpu"),
        (torch.empty(2 * PAGE, dtype=torch.uint8, device="meta"), "tensor on meta"),
        (page_aligned(3 * PAGE)[1:], "O_DIRECT needs a page-aligned buffer"),
    ]
    with NvmeStore(directories, backend=FaultyBackend(direct=True)) as store:
        store.allocate({"a": 2 * PAGE})
        for buffer, said in unsuitable:
            for transfer in (store.read, store.write):
                with pytest.raises(ValueError, match=said):
                    transfer("a", 0, buffer, PAGE + 1)


def test_without_o_direct_any_address_will_do_and_the_cost_is_logged_once(
    directories: list[Path], clean: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), NvmeStore(directories, backend=FaultyBackend(direct=False)) as store:
        store.allocate({"a": PAGE})
        store.write("a", 0, page_aligned(2 * PAGE, fill=5)[1:], PAGE)
        assert contents(store, "a", PAGE).eq(5).all()
    (record,) = caplog.records
    assert "no O_DIRECT" in record.message and "copies every byte once more" in record.message


def test_striping_arguments_are_checked(directories: list[Path], clean: None) -> None:
    with pytest.raises(ValueError, match="no directory"):
        NvmeStore([])
    for weights in ([1.0], [1.0, 0.0], [1.0, float("inf")], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="one finite weight above 0"):
            NvmeStore(directories, weights=weights)
    for stripe_bytes in (0, -PAGE, 1000):
        with pytest.raises(ValueError, match="positive multiple of 4096"):
            NvmeStore(directories, stripe_bytes=stripe_bytes)


# Directories and locks


def test_unusable_directories_are_refused_and_the_others_given_back(
    directories: list[Path], clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"nvme9 is missing; create it \(mkdir -p\)"):
        NvmeStore([directories[0], tmp_path / "nvme9"])
    plain_file = tmp_path / "plain"
    plain_file.touch()
    with pytest.raises(ValueError, match="plain is not a directory"):
        NvmeStore([directories[0], plain_file])
    plain_file.unlink()
    # root may write everywhere, so the answer is faked rather than the directory's mode changed
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != directories[1])
    with pytest.raises(ValueError, match="nvme1 is not writable"):
        NvmeStore(directories)
    monkeypatch.undo()


def test_a_store_file_is_never_opened_through_a_link(directories: list[Path], clean: None, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"data")
    link = directories[0] / STORE_NAME
    link.symlink_to(precious)
    with pytest.raises(FileExistsError):
        PosixBackend().open(link, direct=False)
    with NvmeStore(directories) as store:
        store.allocate({"a": PAGE})
        store.write("a", 0, page_aligned(PAGE, fill=1), PAGE)
    assert precious.read_bytes() == b"data"
    precious.unlink()


def test_a_failing_open_gives_the_rest_back(directories: list[Path], clean: None) -> None:
    backend = FaultyBackend({"open": [None, errno.EACCES]})
    with pytest.raises(StoreError, match=r"creating .*nvme1/lohan_fx\.store failed: Permission denied"):
        NvmeStore(directories, backend=backend)


def test_a_second_store_in_one_directory_is_refused(directories: list[Path], clean: None) -> None:
    with NvmeStore(directories[1:]) as store:
        store.allocate({"a": PAGE})
        me = os.getpid()
        with pytest.raises(StoreError, match=rf"nvme1 is used by a store of this very process, process {me}"):
            NvmeStore(directories)
        assert list(directories[0].iterdir()) == []
        assert contents(store, "a", PAGE).eq(0).all()


def test_a_directory_given_twice_is_refused(directories: list[Path], clean: None) -> None:
    with pytest.raises(StoreError, match="nvme0 is used by"):
        NvmeStore([directories[0], directories[0]])


HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
os.write(fd, str(os.getpid()).encode())
print("locked", flush=True)
sys.stdin.read()
"""


def test_another_processs_lock_holds_while_it_lives_and_what_it_left_is_cleared(
    directories: list[Path], clean: None, caplog: pytest.LogCaptureFixture
) -> None:
    left = directories[0] / STORE_NAME
    left.write_bytes(b"old" * PAGE)
    command = [sys.executable, "-S", "-c", HOLDER, str(directories[0] / LOCK_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StoreError, match=rf"process {holder.pid} "):
            NvmeStore(directories)
        assert left.stat().st_size == 3 * PAGE
        holder.kill()
    with caplog.at_level(logging.WARNING), NvmeStore(directories) as store:
        assert f"removing {left} (12288 bytes)" in caplog.text
        store.allocate({"a": 6 * PAGE})
        assert contents(store, "a", 6 * PAGE).eq(0).all()


def test_a_holder_of_the_same_process_id_elsewhere_is_not_taken_for_this_process(
    directories: list[Path], clean: None
) -> None:
    """In containers that share a drive all runs may have the id 1."""
    source = HOLDER.replace("os.getpid()", str(os.getpid()))
    command = [sys.executable, "-S", "-c", source, str(directories[0] / LOCK_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        expected = rf"another lohan_fx run, process {os.getpid()} of another container or host"
        with pytest.raises(StoreError, match=expected):
            NvmeStore(directories)
        holder.kill()
    with NvmeStore(directories):
        pass


def test_a_lock_on_a_file_that_lost_its_name_does_not_count(
    directories: list[Path], clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last holder removes its lock file between our open and our flock: the lock is then tried anew.
    path = directories[0] / LOCK_NAME
    flock = fcntl.flock
    locked: list[int] = []

    def remove_then_flock(fd: int, operation: int) -> None:
        if not locked:
            path.unlink()
        locked.append(fd)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_then_flock)
    with NvmeStore(directories[:1]):
        assert len(locked) == 2
        assert path.read_text() == str(os.getpid())
        with pytest.raises(StoreError, match="is used by"):
            NvmeStore(directories[:1])


def test_a_directory_in_memory_is_warned_about(
    directories: list[Path], clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where the tests' own directory is in memory
        NvmeStore(directories[:1]).close()
    monkeypatch.setattr(file_backend, "MEMORY_FILE_SYSTEMS", {file_backend.file_system_type(directories[0], mounts())})
    with pytest.warns(UserWarning, match=r"nvme0 is in memory .* takes RAM"):
        NvmeStore(directories[:1]).close()
    monkeypatch.undo()


def test_a_directory_that_anybody_may_write_to_is_warned_of(directories: list[Path], clean: None) -> None:
    directories[0].chmod(0o777)
    with pytest.warns(UserWarning, match=r"anybody may write to .*nvme0 \(mode 0777\)"):
        NvmeStore(directories[:1]).close()
    directories[0].chmod(0o1777)  # as /tmp: only the owner of a file may remove it
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*anybody")
        NvmeStore(directories[:1]).close()


def mounts() -> str:
    return Path("/proc/mounts").read_text()


def test_the_file_system_is_that_of_the_deepest_and_latest_mount(tmp_path: Path) -> None:
    inner = tmp_path / "a dir" / "x"
    blank = str(inner.parent).replace(" ", "\\040")
    table = f"/dev/vda / ext4 rw 0 0\ntmpfs {blank} tmpfs rw 0 0\nproc /proc proc rw 0 0\n"
    assert file_system_type(inner, table) == "tmpfs"
    assert file_system_type(tmp_path / "a dirt", table) == "ext4"
    assert file_system_type(inner, table + f"/dev/vdb {blank} xfs rw 0 0\n") == "xfs"
    assert file_system_type(inner, "") == "unknown"


def test_a_mount_point_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Latin-1, or with blanks that are none to the kernel."""
    table = tmp_path / "mounts"
    table.write_bytes(
        b"/dev/sdb /media/Schl\xfcssel vfat rw 0 0\n" + f"tmpfs {tmp_path}/a\u00a0b\u2028c tmpfs rw 0 0\n".encode()
    )
    monkeypatch.setattr(file_backend, "MOUNTS", str(table))
    assert not file_backend.is_memory_backed(tmp_path)
    assert file_backend.is_memory_backed(tmp_path / "a\u00a0b\u2028c" / "d")
    table.unlink()


# Forked children


@contextmanager
def living_child() -> Iterator[int]:
    """A forked child, as a data loader's worker, that lives within; its process id."""
    (told, tell), (seen, see) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        os.write(see, b"!")
        os.read(told, 1)
        os._exit(0)
    try:
        assert os.read(seen, 1)  # what is done in a child before it goes on is done
        yield child
    finally:
        for end in (told, tell, seen, see):
            os.close(end)
        os.waitpid(child, 0)


def test_a_forked_child_has_none_of_the_files(directories: list[Path], clean: None) -> None:
    """It would keep the disk space of those that are removed, and the locks of a parent that is killed."""
    store = NvmeStore(directories)
    store.allocate({"a": 4 * PAGE})
    with living_child() as child:
        links = [os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()]
        assert not [link for link in links if any(link.startswith(str(directory)) for directory in directories)]
        store.write("a", 0, page_aligned(4 * PAGE, fill=3), 4 * PAGE)
        assert contents(store, "a", 4 * PAGE).eq(3).all()
        store.close()


def test_a_number_that_is_another_file_s_by_now_stays_with_a_child(tmp_path: Path, directories: list[Path]) -> None:
    NvmeStore(directories).close()
    others = [(tmp_path / str(index)).open("w") for index in range(16)]
    with living_child() as child:
        links = {os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()}
        assert {other.name for other in others} <= links
    for other in others:
        other.close()
        Path(other.name).unlink()


def test_a_killed_run_s_directory_is_free_while_its_children_live(directories: list[Path], clean: None) -> None:
    program = """
import os, sys
from pathlib import Path
from lohan_fx.runtime.nvme_store import NvmeStore

store = NvmeStore([Path(sys.argv[1])])
if os.fork() == 0:
    print("forked", flush=True)
sys.stdin.read()
os._exit(0)
"""
    command = [sys.executable, "-c", program, str(directories[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None and run.stdout is not None
        assert run.stdout.readline() == "forked\n"
        run.kill()
        run.wait()
        NvmeStore(directories[:1]).close()
        run.stdin.close()
        assert run.stdout.read() == ""  # once the child has ended


# Closing


def test_close_is_final_and_idempotent(directories: list[Path], clean: None) -> None:
    store = NvmeStore(directories)
    store.allocate({"a": PAGE})
    store.close()
    store.close()
    for call in (
        lambda: contents(store, "a", PAGE),
        lambda: store.write("a", 0, page_aligned(PAGE), PAGE),
        lambda: store.allocate({"b": PAGE}),
        store.flush,
    ):
        with pytest.raises(StoreError, match="is closed"):
            call()


def test_close_may_keep_the_store_files_but_never_the_locks(directories: list[Path], clean: None) -> None:
    store = NvmeStore(directories[:1])
    store.allocate({"a": PAGE})
    store.write("a", 0, page_aligned(PAGE, fill=9), PAGE)
    store.close(remove=False)
    kept = directories[0] / STORE_NAME
    assert list(directories[0].iterdir()) == [kept]
    assert kept.read_bytes() == b"\x09" * PAGE
    kept.unlink()


def test_close_waits_for_calls_under_way(directories: list[Path], clean: None) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class SlowBackend(FaultyBackend):
        def preadv(self, fd: int, view: memoryview, offset: int) -> int:
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return super().preadv(fd, view, offset)

    store = NvmeStore(directories[:1], backend=SlowBackend())
    store.allocate({"a": PAGE})
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(contents, store, "a", PAGE)
        assert entered.wait(PATIENCE_S)
        with pytest.raises(LaneTimeout, match=r"reading 4096 bytes at 0 of extent 'a'"):
            store.close(timeout_s=0)
        go_on.set()
        store.close(timeout_s=PATIENCE_S)
        assert reading.result(PATIENCE_S).eq(0).all()


def test_a_call_that_hung_does_not_go_on_in_the_next_store_s_file(directories: list[Path], clean: None) -> None:
    """A preallocation left behind cuts its file back when it fails at last; others may have its descriptor's number by then."""
    store = NvmeStore(directories[:1])
    store.allocate({"a": PAGE})
    (hung,) = store._files
    store.close()
    with NvmeStore(directories[:1]) as following:
        following.allocate({"a": PAGE})
        following.write("a", 0, page_aligned(PAGE, fill=9), PAGE)
        with pytest.raises(StoreError, match="preallocating"):
            hung.grow(4 * PAGE)
        hung.cut_back(0)
        assert contents(following, "a", PAGE).eq(9).all()


def test_what_cannot_be_removed_is_closed_all_the_same(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a failing drive's file system has become read-only; ``leak_check`` looks for the descriptors."""
    store = NvmeStore(directories[:1])
    store.allocate({"a": PAGE})

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patched, pytest.raises((StoreError, OSError), match="Read-only"):
        patched.setattr(Path, "unlink", refuse)
        store.close()
    with NvmeStore(directories[:1]):  # nobody holds the lock
        pass
    assert list(directories[0].iterdir()) == []
