"""The host pool: fixed reservations, aligned buffers, and memory that is taken lazily and really given back."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.errors import LaneTimeout, LohanError
from lohan_fx.runtime.host_pool import KEPT_VIEWS, PAGE_BYTES, Buffer, HostPool, Reservation, page_padded_bytes
from tests.runtime.rig import FakeCudart

PATIENCE_S = 10.0
MIB = 1024 * 1024


def resident_bytes_at(address: int) -> int | None:
    """RSS of the mapping that holds ``address``, or None if nothing is mapped there."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    return None


def event_of_waiting(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once somebody waits in ``acquire``: from then on a release or close can only come after the wait began."""
    waiting = threading.Event()
    wait = pool._changed.wait

    def wait_and_tell(timeout: float | None = None) -> bool:
        waiting.set()  # the waiter still holds the lock here and gives it up only inside wait()
        return wait(timeout)

    monkeypatch.setattr(pool._changed, "wait", wait_and_tell)
    return waiting


@given(st.integers(0, 10**12))
def test_page_padding_is_the_least_multiple_above(nbytes: int) -> None:
    padded = page_padded_bytes(nbytes)
    assert padded % PAGE_BYTES == 0
    assert 0 <= padded - nbytes < PAGE_BYTES


def test_buffers_are_aligned_whole_pages_and_do_not_overlap() -> None:
    with HostPool({"parameters": Reservation(3, 5000), "gradients": Reservation(2, 1)}) as pool:
        assert pool.nbytes == 3 * 8192 + 2 * 4096
        buffers = [pool.acquire("parameters") for _ in range(3)] + [pool.acquire("gradients") for _ in range(2)]
        for value, buffer in enumerate(buffers):
            assert buffer.tensor.dtype == torch.uint8 and buffer.tensor.dim() == 1
            assert buffer.tensor.data_ptr() % PAGE_BYTES == 0
            assert buffer.tensor.numel() == (8192 if buffer.purpose == "parameters" else 4096)
            buffer.tensor.fill_(value)
        for value, buffer in enumerate(buffers):
            assert buffer.tensor.eq(value).all()
            buffer.release()


def test_purposes_do_not_take_from_each_other() -> None:
    with HostPool({"a": Reservation(1, 1), "b": Reservation(1, 1)}) as pool:
        with pool.acquire("a"):
            assert pool.try_acquire("a") is None
            with pool.acquire("b", timeout_s=0):
                assert (pool.in_use("a"), pool.in_use("b")) == (1, 1)
        assert (pool.in_use("a"), pool.in_use("b")) == (0, 0)


def test_peak_in_use_is_the_most_ever_out_at_once() -> None:
    with HostPool({"a": Reservation(3, 1)}) as pool:
        first, second = pool.acquire("a"), pool.acquire("a")
        first.release()
        second.release()
        pool.acquire("a").release()
        assert (pool.in_use("a"), pool.peak_in_use("a")) == (0, 2)


def test_acquire_waits_for_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostPool({"a": Reservation(1, 1)}) as pool:
        waiting = event_of_waiting(pool, monkeypatch)
        held = pool.acquire("a")
        address = held.tensor.data_ptr()
        got: list[int] = []

        def take() -> None:
            with pool.acquire("a", timeout_s=3 * PATIENCE_S) as buffer:
                got.append(buffer.tensor.data_ptr())

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        assert waiting.wait(PATIENCE_S)
        held.release()
        thread.join(PATIENCE_S)
        assert got == [address]  # there before the acquire's own, longer timeout


def test_a_timeout_names_the_purpose() -> None:
    with HostPool({"activations": Reservation(2, 100)}) as pool:
        buffers = [pool.acquire("activations") for _ in range(2)]
        with pytest.raises(LaneTimeout, match=r"'activations' host buffer: all 2 of 4096 bytes"):
            pool.acquire("activations", timeout_s=0)
        for buffer in buffers:
            buffer.release()


def test_unknown_and_empty_purposes_are_refused_by_name() -> None:
    with HostPool({"b": Reservation(1, 1), "a": Reservation(0, 0)}) as pool:
        for call in (pool.acquire, pool.try_acquire, pool.in_use, pool.peak_in_use):
            with pytest.raises(ValueError, match=r"'c'; the purposes are \['a', 'b'\]"):
                call("c")
        with pytest.raises(ValueError, match="0 buffers"):
            pool.acquire("a")
        assert pool.try_acquire("a") is None


@pytest.mark.parametrize("reservation", [Reservation(-1, 1), Reservation(1, -1), Reservation(1, 0)])
def test_impossible_reservations_are_refused(reservation: Reservation) -> None:
    with pytest.raises(ValueError, match="reservation for 'a'"):
        HostPool({"a": reservation})


def test_an_empty_pool_is_a_pool() -> None:
    with HostPool({}) as pool:
        assert pool.nbytes == 0


def test_a_buffer_is_released_once_and_not_used_after() -> None:
    with HostPool({"a": Reservation(1, 1)}) as pool:
        buffer = pool.acquire("a")
        buffer.release()
        with pytest.raises(LohanError, match="released before"):
            buffer.release()
        with pytest.raises(LohanError, match="was released"):
            _ = buffer.tensor
        assert pool.try_acquire("a") is not None
        pool.close(force=True)


def test_views_of_a_buffer_are_made_once_and_are_few() -> None:
    """A tensor that is made or dies on a lane's thread lets the interpreter go, and waits for it (docs/0043)."""
    with HostPool({"a": Reservation(1, PAGE_BYTES)}) as pool:
        made = []

        def make(tensor: torch.Tensor) -> torch.Tensor:
            made.append(tensor)
            return tensor[:8]

        with pool.acquire("a") as buffer:
            tensor, view, typed = buffer.tensor, buffer.views("key", make), buffer.first(3, torch.float32)
            assert typed.numel() == 3 and typed.data_ptr() == tensor.data_ptr() == view.data_ptr()
        with pool.acquire("a") as buffer:
            assert buffer.tensor is tensor and buffer.views("key", make) is view and len(made) == 1
            assert buffer.first(3, torch.float32) is typed
            for key in range(2 * KEPT_VIEWS):
                buffer.views(key, make)
                assert buffer._memory is not None and len(buffer._memory.views) <= KEPT_VIEWS
        with pytest.raises(LohanError, match="was released"):
            buffer.views("key", make)


def test_close_refuses_while_buffers_are_out_and_changes_nothing() -> None:
    pool = HostPool({"a": Reservation(2, 1)})
    buffer = pool.acquire("a")
    with pytest.raises(LohanError, match=r"\{'a': 1\}"):
        pool.close()
    buffer.tensor.fill_(1)
    pool.acquire("a").release()
    buffer.release()
    pool.close()
    pool.close()
    with pytest.raises(LohanError, match="closed"):
        pool.acquire("a")
    with pytest.raises(LohanError, match="closed"):
        pool.try_acquire("a")


def test_close_wakes_a_waiter(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPool({"a": Reservation(1, 1)})
    waiting = event_of_waiting(pool, monkeypatch)
    pool.acquire("a")
    raised: list[str] = []

    def take() -> None:
        with pytest.raises(LohanError, match="closed") as caught:
            pool.acquire("a", timeout_s=3 * PATIENCE_S)
        raised.append(str(caught.value))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert waiting.wait(PATIENCE_S)
    pool.close(force=True)
    thread.join(PATIENCE_S)
    assert len(raised) == 1


def test_an_error_inside_a_with_block_is_not_hidden_by_buffers_that_are_out() -> None:
    with pytest.raises(ZeroDivisionError), HostPool({"a": Reservation(1, 1)}) as pool:
        pool.acquire("a")
        _ = 1 // 0


def test_memory_becomes_resident_only_as_it_is_written_and_goes_at_close() -> None:
    pool = HostPool({"a": Reservation(16, 4 * MIB)})
    assert pool.unused_bytes() == 16 * 4 * MIB
    first = pool.acquire("a")
    address = first.tensor.data_ptr()
    assert resident_bytes_at(address) == 0
    assert pool.unused_bytes() == 15 * 4 * MIB
    first.tensor.fill_(1)
    first.release()
    resident = resident_bytes_at(address)
    assert resident is not None and 4 * MIB <= resident <= 6 * MIB
    # The warm buffer comes back first, so a light user of the pool stays light.
    again = pool.acquire("a")
    assert again.tensor.data_ptr() == address
    assert pool.unused_bytes() == 15 * 4 * MIB
    again.release()
    pool.close()
    assert resident_bytes_at(address) is None


def test_forced_close_frees_the_pages_under_a_live_tensor_which_then_reads_zeros() -> None:
    pool = HostPool({"a": Reservation(1, 4 * MIB)})
    buffer = pool.acquire("a")
    view = buffer.tensor[100:200]
    buffer.tensor.fill_(7)
    address = buffer.tensor.data_ptr()
    pool.close(force=True)
    assert resident_bytes_at(address) == 0
    assert view.eq(0).all()
    buffer.release()
    del view
    assert resident_bytes_at(address) is None


def test_a_forked_child_has_none_of_the_region_s_pages() -> None:
    with HostPool({"a": Reservation(1, 1)}) as pool, pool.acquire("a") as buffer:
        address = buffer.tensor.fill_(3).data_ptr()
        child = os.fork()
        if child == 0:
            os._exit(0 if resident_bytes_at(address) == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_pinning_without_cuda_is_refused() -> None:
    with pytest.raises(ValueError, match="found no CUDA device"):
        HostPool({"a": Reservation(1, 1)}, pin=True)


@pytest.mark.cuda
def test_pinned_buffers_are_pinned_and_copy_without_blocking() -> None:
    with HostPool({"a": Reservation(2, MIB)}, pin=True) as pool, pool.acquire("a") as buffer:
        assert buffer.tensor.is_pinned()
        buffer.tensor.fill_(3)
        on_device = buffer.tensor.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert on_device.eq(3).all().item()
    again = HostPool({"a": Reservation(2, MIB)}, pin=True)
    again.close()


@pytest.mark.parametrize("status", [0, 2])
def test_pinning_registers_the_whole_region_once_and_reports_a_refusal(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = FakeCudart(status)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    if status:
        with pytest.raises(LohanError, match=r"cudaHostRegister of 8192 bytes failed with CUDA error 2"):
            HostPool({"a": Reservation(2, 1)}, pin=True)
        return
    pool = HostPool({"a": Reservation(2, 1)}, pin=True)
    with pool.acquire("a") as buffer:
        assert cudart.registered == {buffer.tensor.data_ptr(): 8192}
    pool.close()
    assert cudart.registered == {}


# --- asking without waiting -----------------------------------------------------------------------------------


def test_who_asks_is_called_at_once_or_by_whoever_releases_in_order() -> None:
    with HostPool({"fetch": Reservation(2, 100)}) as pool:
        got: list[tuple[int, Buffer]] = []
        for number in range(4):
            pool.when_free("fetch", lambda buffer, number=number: got.append((number, buffer)))  # type: ignore[misc]
        assert [number for number, _ in got] == [0, 1] and pool.asking() == (2, 2)
        got[1][1].release()
        assert [number for number, _ in got] == [0, 1, 2] and pool.asking() == (1, 3)
        got[0][1].release()
        assert [number for number, _ in got] == [0, 1, 2, 3]
        for _, buffer in got[2:]:
            buffer.release()
        assert pool.in_use("fetch") == 0 and pool.peak_in_use("fetch") == 2


def test_buffers_that_are_released_at_once_are_no_recursion() -> None:
    with HostPool({"fetch": Reservation(1, 100)}) as pool:
        first = pool.acquire("fetch")
        for _ in range(5000):
            pool.when_free("fetch", Buffer.release)
        first.release()
        assert pool.asking() == (0, 5000) and pool.in_use("fetch") == 0


def test_releases_from_many_threads_leave_nobody_waiting() -> None:
    with HostPool({"fetch": Reservation(3, 100)}) as pool:
        done = threading.Semaphore(0)

        def later(buffer: Buffer) -> None:
            def release() -> None:
                buffer.release()
                done.release()

            threading.Thread(target=release, daemon=True).start()

        for _ in range(300):
            pool.when_free("fetch", later)
        assert all(done.acquire(timeout=PATIENCE_S) for _ in range(300))
        assert pool.asking() == (0, 300) and pool.in_use("fetch") == 0


def test_nobody_is_called_once_the_pool_is_closed() -> None:
    pool = HostPool({"fetch": Reservation(1, 100)})
    buffer = pool.acquire("fetch")
    called: list[Buffer] = []
    pool.when_free("fetch", called.append)
    pool.close(force=True)
    buffer.release()
    assert not called
    with pytest.raises(LohanError, match="the host pool is closed"):
        pool.when_free("fetch", called.append)
    with pytest.raises(ValueError, match="no host memory is reserved for 'such'"):
        pool.when_free("such", called.append)


# --- where it lies ----------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 40 * PAGE_BYTES))
def test_pinned_memory_is_whole_pages_and_not_rounded_up_to_a_power_of_two(count: int, nbytes: int) -> None:
    cudart = FakeCudart(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "cudart", lambda: cudart)
        with HostPool({"a": Reservation(count, nbytes)}, pin=True) as pool:
            assert list(cudart.registered.values()) == [count * page_padded_bytes(nbytes)] == [pool.nbytes]


def test_places_tell_where_the_buffers_of_a_purpose_lie() -> None:
    with HostPool({"a": Reservation(2, 5000), "none": Reservation(0, 0), "b": Reservation(1, 1)}) as pool:
        places = pool.places()
        with pool.acquire("a") as a, pool.acquire("b") as b:
            assert places == {"a": (a.tensor.data_ptr(), 2 * 8192), "b": (b.tensor.data_ptr(), 4096)}
    assert pool.places() == {}
