"""Activations away and back through a real store: the same bits, every place free again, every failure told in time."""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lohan_fx import ops
from lohan_fx.errors import LohanError, StepError, StoreError
from lohan_fx.runtime.activation_swap import ActivationSwap
from lohan_fx.runtime.device_link import CpuLink, Moment
from lohan_fx.runtime.host_arena import HostArena
from lohan_fx.runtime.huge_pages import PAGE_BYTES
from lohan_fx.runtime.machine import Machine
from lohan_fx.runtime.room import LEAST_BYTES
from tests.runtime.faulty_backend import Claim, Fault, FaultyBackend, Short
from tests.runtime.rig import ARENA_BYTES, IO_BYTES, machine
from tests.runtime.test_in_time import interrupted_at, lines_of

pytestmark = pytest.mark.usefixtures("leak_check")

TIERS = ("host", "nvme")
PATIENCE_S = 30.0


class Rig:
    def __init__(self, machine: Machine, backend: FaultyBackend) -> None:
        self.machine = machine
        self.backend = backend
        self.arena = HostArena(machine.pool.acquire("activations").tensor)
        self.swap = ActivationSwap(machine, self.arena)

    def back(self, handle: torch.Tensor) -> torch.Tensor:
        value = self.swap.swap_in(handle)
        ops._wait(value)
        return value

    def whole(self) -> bool:
        """Whether nobody holds a place in host memory."""
        region = self.arena.take(ARENA_BYTES)
        if region is not None:
            self.arena.give_back(region)
        return region is not None


@pytest.fixture(params=[True, False], ids=["in place", "copied"])
def shares_memory(request: pytest.FixtureRequest) -> bool:
    """Whether what comes back is read to where it belongs, as on a CPU, or copied there, as beside a GPU."""
    return bool(request.param)


@pytest.fixture
def rig(tmp_path: Path, shares_memory: bool) -> Iterator[Rig]:
    backend = FaultyBackend()
    with machine(tmp_path, backend, shares_memory=shares_memory) as made:
        yield Rig(made, backend)
        gc.collect()
        assert not ops._expected.arrivals


VALUES: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: torch.randn(30, 40),
    "larger than a transfer": lambda: torch.randn(3 * IO_BYTES // 4 + 5),
    "scalar": lambda: torch.randn(()),
    "nothing": lambda: torch.empty(0, 7),
    "bfloat16": lambda: torch.randn(33, 5).bfloat16(),
    "bool": lambda: torch.rand(100) > 0.5,
    "int64": lambda: torch.arange(77),
    "transposed": lambda: torch.randn(8, 9, 10).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "every other row": lambda: torch.randn(20, 6)[::2],
    "expanded": lambda: torch.randn(1, 6).expand(20, 6),
    "a slice": lambda: torch.randn(50)[7:20],
    "an expanded slice": lambda: torch.randn(9, 1, 6)[::2].expand(5, 4, 6),
    "a row of ones": lambda: torch.ones(1, 1, 5).transpose(0, 2),
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", VALUES)
def test_the_same_bits_shape_and_strides_come_back(name: str, tier: str, rig: Rig) -> None:
    x = VALUES[name]()
    expected, stride = x.clone(), x.stride()
    handle = rig.swap.swap_out(x, tier)
    assert (handle.dtype, tuple(handle.shape), handle.untyped_storage().nbytes()) == (torch.uint8, (0,), 0)
    del x
    assert rig.swap.away == 1
    value = rig.back(handle)
    assert torch.equal(value, expected) and value.dtype == expected.dtype and value.stride() == stride
    assert rig.swap.away == 0 and rig.whole()


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_of_a_value_that_trains_is_recorded(tier: str, rig: Rig) -> None:
    x = torch.randn(30, 40, requires_grad=True)
    with torch.no_grad():
        value = rig.back(rig.swap.swap_out(x, tier))
    assert torch.equal(value, x) and not value.requires_grad
    assert rig.arena._memory is not None and not rig.arena._memory.requires_grad
    with rig.machine.pool.acquire("swap_out") as staging:
        assert not staging.tensor.requires_grad


@pytest.mark.parametrize("tier", TIERS)
def test_what_lies_in_another_memory_is_held(tier: str, rig: Rig) -> None:
    x = torch.empty(3, device="meta")
    handle = rig.swap.swap_out(x, tier)
    assert rig.swap.away == 1 and rig.whole()
    assert rig.back(handle) is x and rig.swap.away == 0
    with pytest.raises(StepError, match="asked for a second time"):
        rig.swap.swap_in(handle)
    held = weakref.ref(x)
    handle = rig.swap.swap_out(x, tier)
    del x, handle
    gc.collect()
    assert held() is None


def test_many_at_once_in_any_order(rig: Rig) -> None:
    values = [torch.full((500 + i,), float(i)) for i in range(20)]
    handles = [rig.swap.swap_out(value, TIERS[i % 2]) for i, value in enumerate(values)]
    assert rig.swap.away == 20
    for i in reversed(range(20)):
        assert torch.equal(rig.back(handles[i]), values[i])
    assert rig.swap.away == 0 and rig.whole()


def test_the_tensor_is_held_only_until_it_has_left(rig: Rig) -> None:
    x = torch.randn(1000)
    alive = threading.Event()
    finalizer = torch.utils.weak.WeakTensorKeyDictionary()
    finalizer[x] = alive
    handle = rig.swap.swap_out(x, "nvme")
    del x
    rig.machine.drain(PATIENCE_S)
    assert len(finalizer) == 0
    rig.back(handle)


def test_what_does_not_fit_in_host_memory_goes_to_the_store(rig: Rig) -> None:
    values = [torch.full((ARENA_BYTES // 8,), float(i)) for i in range(4)]
    handles = [rig.swap.swap_out(value, "host") for value in values]
    rig.machine.drain(PATIENCE_S)
    assert rig.machine.store.bytes_written == 2 * ARENA_BYTES // 2
    assert all(torch.equal(rig.back(handle), value) for handle, value in zip(handles, values, strict=True))
    assert rig.whole()


def test_places_in_the_store_are_used_again(rig: Rig) -> None:
    x = torch.randn(3000)
    rig.swap.prepare([x.nbytes, x.nbytes])
    allocated = rig.machine.store.nbytes_allocated
    for _ in range(5):
        handles = [rig.swap.swap_out(x, "nvme") for _ in range(2)]
        for handle in handles:
            assert torch.equal(rig.back(handle), x)
    rig.swap.prepare([x.nbytes])
    assert rig.machine.store.nbytes_allocated == allocated


def test_smaller_tensors_take_the_places_of_larger_ones(rig: Rig) -> None:
    """One plan serves inputs of many sizes: places for the largest are enough, in whatever order the others come."""
    planned = (4000, 1000, 1000, 7000, 2000)
    rig.swap.prepare([4 * elements for elements in planned])
    allocated = rig.machine.store.nbytes_allocated
    for percent in (100, 99, 50, 10, 100):
        for order in (planned, tuple(reversed(planned)), tuple(sorted(planned))):
            values = [torch.randn(elements * percent // 100) for elements in order]
            handles = [rig.swap.swap_out(x, "nvme") for x in values]
            for handle, x in zip(handles, values, strict=True):
                assert torch.equal(rig.back(handle), x)
    rig.swap.prepare([4 * elements - 40 for elements in planned])
    assert rig.machine.store.nbytes_allocated == allocated
    rig.swap.prepare([4 * elements for elements in (*planned, 6999)])
    assert rig.machine.store.nbytes_allocated == allocated + -(-4 * 6999 // PAGE_BYTES) * PAGE_BYTES


@pytest.mark.parametrize("tier", TIERS)
def test_an_abandoned_tensor_gives_its_place_back(tier: str, rig: Rig) -> None:
    x = torch.randn(2000)
    rig.swap.prepare([x.nbytes])
    allocated = rig.machine.store.nbytes_allocated
    for _ in range(5):
        handle = rig.swap.swap_out(x, tier)
        del handle
        assert rig.swap.away == 0
        rig.machine.drain(PATIENCE_S)
    assert torch.equal(rig.back(rig.swap.swap_out(x, tier)), x)
    assert rig.machine.store.nbytes_allocated == allocated
    rig.swap.prepare([])
    assert rig.whole()


def test_the_collector_may_abandon_a_tensor_at_any_moment(rig: Rig) -> None:
    """Also inside the locks of the arena and of the arrival, on the same thread: nothing there is taken again."""
    handle = rig.swap.swap_out(torch.randn(100), "host")
    (away,) = rig.swap._away.values()
    ended = threading.Event()

    def die() -> None:
        nonlocal handle
        with rig.arena._lock, away.left._lock:
            del handle
        ended.set()

    threading.Thread(target=die, daemon=True).start()
    assert ended.wait(PATIENCE_S)
    rig.machine.drain(PATIENCE_S)
    rig.swap.prepare([])
    assert rig.whole()


@pytest.mark.parametrize("tier", TIERS)
def test_a_handle_is_good_once(tier: str, rig: Rig) -> None:
    handle = rig.swap.swap_out(torch.randn(10), tier)
    rig.back(handle)
    with pytest.raises(StepError, match=r"second time.*retain_graph=True.*run the forward again"):
        rig.swap.swap_in(handle)


# --- Ctrl-C ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", TIERS)
def test_an_interrupt_at_any_line_of_a_swap_leaves_nothing_behind(tier: str, rig: Rig) -> None:
    x = torch.randn(3 * IO_BYTES // 4)
    rig.swap.prepare([x.nbytes])
    allocated = rig.machine.store.nbytes_allocated
    rig.swap.leaving.narrow(x.nbytes)
    code = ActivationSwap.swap_out.__code__
    lines = lines_of(code)
    came = 0
    for line in lines:
        with interrupted_at(code, line), contextlib.suppress(KeyboardInterrupt):
            rig.swap.swap_out(x, tier)
            came -= 1
        came += 1
        rig.machine.drain(PATIENCE_S)
    assert came > len(lines) // 2  # others are not reached by this tensor
    for _ in range(3):
        assert torch.equal(rig.back(rig.swap.swap_out(x, tier)), x)  # where a window leaked, this would wait
    rig.swap.prepare([x.nbytes])
    assert rig.whole() and rig.machine.store.nbytes_allocated == allocated


# --- failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault", [errno.EIO, errno.ENOSPC, Short(100), Claim(0)], ids=["EIO", "ENOSPC", "a part", "nothing"]
)
@pytest.mark.parametrize("piece", [0, 2])
def test_a_write_that_fails(fault: Fault, piece: int, rig: Rig) -> None:
    x = torch.randn(3 * IO_BYTES // 4)
    rig.backend.faults["pwritev"] = [None] * piece + [fault]
    handle = rig.swap.swap_out(x, "nvme")
    rig.machine.drain(PATIENCE_S)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"writing .* of extent 'activation:0'"):
            rig.swap.raise_failure()
    with pytest.raises(StoreError, match=r"writing .* of extent 'activation:0'"):
        rig.back(handle)
    rig.swap.raise_failure()
    allocated = rig.machine.store.nbytes_allocated
    assert torch.equal(rig.back(rig.swap.swap_out(x, "nvme")), x)
    assert rig.machine.store.nbytes_allocated == allocated  # in the same place


@pytest.mark.parametrize("fault", [errno.EIO, Short(100), Claim(0)], ids=["EIO", "a part", "nothing"])
@pytest.mark.parametrize("piece", [0, 2])
def test_a_read_that_fails(fault: Fault, piece: int, rig: Rig) -> None:
    x = torch.randn(3 * IO_BYTES // 4)
    handle = rig.swap.swap_out(x, "nvme")
    rig.machine.drain(PATIENCE_S)
    rig.backend.faults["preadv"] = [None] * piece + [fault]
    with pytest.raises(StoreError, match=r"reading .* of extent 'activation:0'"):
        rig.back(handle)
    assert torch.equal(rig.back(rig.swap.swap_out(x, "nvme")), x)


@pytest.mark.parametrize("shares_memory", [False], indirect=True)
@pytest.mark.parametrize("direction", ["copy_out", "copy_in"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_copy_that_fails(direction: str, tier: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise MemoryError("out of staging")

    x = torch.randn(3 * IO_BYTES // 4)
    with monkeypatch.context() as patch:
        patch.setattr(rig.machine.link, direction, fails, raising=True)
        handle = rig.swap.swap_out(x, tier)
        with pytest.raises(MemoryError):
            rig.back(handle)
    assert torch.equal(rig.back(rig.swap.swap_out(x, tier)), x)
    rig.swap.prepare([])
    assert rig.whole()


def test_a_graph_that_fails_while_a_tensor_is_on_its_way(rig: Rig) -> None:
    x = torch.randn(3000)
    handle = rig.swap.swap_out(x, "nvme")
    with pytest.raises(ZeroDivisionError), ops.expecting():
        rig.swap.swap_in(handle)
        raise ZeroDivisionError
    assert not ops._expected.arrivals
    assert torch.equal(rig.back(rig.swap.swap_out(x, "nvme")), x)


def test_no_space_for_another_place(rig: Rig) -> None:
    rig.backend.faults["fallocate"] = [errno.ENOSPC]
    with pytest.raises(StoreError, match="No space left"):
        rig.swap.swap_out(torch.randn(10), "nvme")
    assert rig.swap.away == 0
    assert rig.back(rig.swap.swap_out(torch.ones(10), "nvme")).sum() == 10


def test_closing_with_transfers_under_way(tmp_path: Path) -> None:
    with machine(tmp_path) as made:
        swap = ActivationSwap(made, HostArena(None))
        handles = [swap.swap_out(torch.randn(5000), "nvme") for _ in range(30)]
        value = swap.swap_in(handles.pop())
        started_s = time.monotonic()
        made.close()
        assert time.monotonic() - started_s < PATIENCE_S
        with pytest.raises(LohanError, match=r"lane 'd2h' is closed: cannot submit 'swap_out of \(3,\)'"):
            swap.swap_out(torch.randn(3), "host")
        ops._expected.arrivals.pop(value._cdata)


# --- how much may be leaving ----------------------------------------------------------------------------------


class SlowLink(CpuLink):
    """Lets each copy out go on only when it is told to."""

    def __init__(self, *, shares_memory: bool) -> None:
        super().__init__(shares_memory=shares_memory)
        self.go = threading.Semaphore(0)

    def copy_out(self, destination: torch.Tensor, source: torch.Tensor, after: Moment) -> Moment:
        assert self.go.acquire(timeout=PATIENCE_S)
        return super().copy_out(destination, source, after)


@pytest.mark.parametrize("tier", TIERS)
def test_no_more_leaves_at_once_than_the_window_holds(tier: str, rig: Rig, shares_memory: bool) -> None:
    rig.machine.link = link = SlowLink(shares_memory=shares_memory)
    values = [torch.full((IO_BYTES // 4,), float(i)) for i in range(6)]
    rig.swap.leaving.narrow(2 * IO_BYTES)
    handles: list[torch.Tensor] = []
    ended = threading.Event()

    def send() -> None:
        handles.extend(rig.swap.swap_out(value, tier) for value in values)
        ended.set()

    threading.Thread(target=send, daemon=True).start()
    deadline_s = time.monotonic() + PATIENCE_S
    while rig.swap.away < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert not ended.wait(0.05) and rig.swap.away == 2  # the third waits for the first to leave
    link.go.release(len(values))
    assert ended.wait(PATIENCE_S)
    rig.machine.drain(PATIENCE_S)
    assert rig.swap.leaving.peak_bytes == 2 * IO_BYTES
    assert rig.machine.timeline.stall_s > 0
    assert all(torch.equal(rig.back(handle), value) for handle, value in zip(handles, values, strict=True))


def test_what_fails_to_leave_gives_its_room_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise MemoryError("out of staging")

    rig.swap.leaving.narrow(IO_BYTES)
    x = torch.randn(3 * IO_BYTES // 4)
    with monkeypatch.context() as patch:
        patch.setattr(rig.machine.link, "copy_out", fails, raising=True)
        handle = rig.swap.swap_out(x, "nvme")
        with pytest.raises(MemoryError):
            rig.back(handle)
    rig.backend.faults["fallocate"] = [errno.ENOSPC]
    with pytest.raises(StoreError, match="No space left"):
        rig.swap.swap_out(torch.randn(IO_BYTES), "nvme")
    for _ in range(3):
        assert torch.equal(rig.back(rig.swap.swap_out(x, "nvme")), x)


def test_a_part_of_a_tensor_counts_with_all_that_it_keeps_alive(rig: Rig) -> None:
    whole = torch.randn(100, 50)
    rig.swap.swap_out(whole[:3], "nvme")
    assert rig.swap.leaving.peak_bytes == whole.nbytes


@pytest.mark.parametrize("tier", TIERS)
def test_what_comes_back_in_place_has_a_place_of_its_own(rig: Rig, shares_memory: bool, tier: str) -> None:
    """The heap would hand the same pages out and take them back, a fault each time."""
    x = torch.randn(ARENA_BYTES // 4)
    assert x.nbytes >= LEAST_BYTES and rig.whole()
    value = rig.back(rig.swap.swap_out(x, tier))
    address, nbytes = rig.machine.landing.place()
    assert (address <= value.data_ptr() < address + nbytes) is shares_memory
    assert torch.equal(value, x) and rig.whole()
