"""The out-of-core optimizer against ``torch.optim``, in chunks, held, over every kind of home; and each way to fail."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
from torch import nn

from lohan_fx.errors import LaneTimeout, LohanError, StepError, StoreError
from lohan_fx.runtime import adam, chunk_pipeline, generations
from lohan_fx.runtime.adam import AdamOptions
from lohan_fx.runtime.checksum import checksum
from lohan_fx.runtime.chunk_pipeline import ChunkPipeline
from lohan_fx.runtime.chunk_update import ChunkUpdate, Purpose
from lohan_fx.runtime.device_link import Moment
from lohan_fx.runtime.held_gradients import HeldGradients
from lohan_fx.runtime.host_pool import Buffer, HostPool
from lohan_fx.runtime.lanes import Work
from lohan_fx.runtime.machine import Machine
from lohan_fx.runtime.nvme_store import SSD_THREADS
from lohan_fx.runtime.out_of_core_optimizer import OutOfCoreOptimizer
from lohan_fx.runtime.slots import ParameterSlot, Residency
from lohan_fx.runtime.state_buffer import SMALL_BUFFERS, SMALL_ELEMENTS, StateBuffer
from lohan_fx.runtime.states import States
from tests.runtime.faulty_backend import Claim, Fault, FaultyBackend, Short
from tests.runtime.rig import CHUNK_ELEMENTS, machine, parameter
from tests.runtime.test_generations import flip
from tests.runtime.test_in_time import interrupted_at, lines_of

pytestmark = pytest.mark.usefixtures("leak_check")

OPTIONS = AdamOptions(
    lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False, fused=False
)
PATIENCE_S = 30.0
ELEMENTS = 3 * CHUNK_ELEMENTS + 77
"""Four chunks, the last one short: more than there are buffers."""
LARGE = 2 * SMALL_ELEMENTS
"""Chunks so large that small ones have buffers of their own."""


class Rig:
    """Two parameters in the store, one of several chunks, and their copies that ``torch.optim`` updates."""

    def __init__(self, machine: Machine, backend: FaultyBackend, *, compute: torch.dtype, window_bytes: int) -> None:
        self.machine = machine
        self.backend = backend
        chunk_elements = machine.windows.chunk_elements
        self.slots = {
            0: parameter("long", 3 * chunk_elements + 77, slot=0, compute=compute),
            1: parameter("small", 5, 5, slot=1, compute=compute),
        }
        self.residency = {slot: Residency() for slot in self.slots}
        self.states = States(machine.store, self.slots, self.residency)
        self.states.chunk_elements = chunk_elements
        self.gradients = HeldGradients(self.states, self.slots, self.residency)
        self.optimizer = OutOfCoreOptimizer(
            machine, self.slots, self.residency, chunk_elements=chunk_elements, window_bytes=window_bytes
        )
        self.expected = {}
        for slot, found in self.slots.items():
            machine.store.allocate(found.extents(chunk_elements), chunk_bytes=found.chunk_bytes(chunk_elements))
            value = torch.randn(found.shape, generator=torch.Generator().manual_seed(slot))
            self.states.write_parameter(slot, value)
            self.expected[slot] = nn.Parameter(value)
        self.reference = torch.optim.AdamW(self.expected.values(), lr=0.01, foreach=False)

    def gradient(self, slot: int, seed: int) -> torch.Tensor:
        found = self.slots[slot]
        return torch.randn(found.shape, generator=torch.Generator().manual_seed(100 + seed)).to(found.compute_dtype)

    def offer(self, seed: int, purpose: Purpose = Purpose.APPLY) -> None:
        for slot in self.slots:
            if purpose is Purpose.HOLD:
                self.gradients.make_room(slot)
            self.optimizer.offer(
                slot, self.gradient(slot, seed), purpose, OPTIONS if purpose is Purpose.APPLY else None
            )

    def reference_step(self, *seeds: int) -> None:
        for slot, found in self.expected.items():
            found.grad = sum((self.gradient(slot, seed).float() for seed in seeds), torch.zeros(found.shape))
        self.reference.step()

    def same(self) -> None:
        for slot, found in self.expected.items():
            assert torch.equal(self.states.read_parameter(slot), found)
            for ours, name in zip(self.states.read_moments(slot), ("exp_avg", "exp_avg_sq"), strict=True):
                assert torch.equal(ours, self.reference.state[found][name])
            assert self.residency[slot].updates == int(self.reference.state[found]["step"])
            streamed = self.states._read(
                self.slots[slot].streamed_extent, self.slots[slot].numel, self.slots[slot].compute_dtype
            )
            assert torch.equal(streamed, found.detach().reshape(-1).to(streamed.dtype))


@pytest.fixture(params=[True, False], ids=["in place", "copied"])
def shares_memory(request: pytest.FixtureRequest) -> bool:
    """Whether gradients are updated from where they are, as on a CPU, or copied first, as beside a GPU."""
    return bool(request.param)


@pytest.fixture(
    params=[(torch.float32, CHUNK_ELEMENTS), (torch.bfloat16, CHUNK_ELEMENTS), (torch.bfloat16, LARGE)],
    ids=["fp32", "bf16", "bf16, with small buffers"],
)
def any_rig(request: pytest.FixtureRequest, tmp_path: Path, shares_memory: bool) -> Iterator[Rig]:
    compute, chunk_elements = request.param
    yield from rigged(tmp_path, compute=compute, shares_memory=shares_memory, chunk_elements=chunk_elements)


@pytest.fixture
def rig(tmp_path: Path, shares_memory: bool) -> Iterator[Rig]:
    yield from rigged(tmp_path, shares_memory=shares_memory)


@pytest.fixture(params=[(True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float32)], ids=str)
def kept_rig(request: pytest.FixtureRequest, directory: Path) -> Iterator[Rig]:
    """Its store keeps checkpoints, whose checksums are found by the thread that updates, or by those of the drives."""
    beside, compute = request.param
    for rig in rigged(directory, compute=compute):
        rig.machine.sums_beside_updates = beside
        rig.machine.store.keep_generations(1)
        yield rig


def rigged(
    directory: Path,
    *,
    compute: torch.dtype = torch.float32,
    window_bytes: int = 1 << 30,
    shares_memory: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Iterator[Rig]:
    backend = FaultyBackend()
    with machine(directory, backend, shares_memory=shares_memory, chunk_elements=chunk_elements) as made:
        yield Rig(made, backend, compute=compute, window_bytes=window_bytes)


# --- numbers --------------------------------------------------------------------------------------------------


def test_an_update_writes_what_is_reserved_for_it(any_rig: Rig) -> None:
    rig = any_rig
    before = rig.machine.store.bytes_written
    rig.offer(1)
    rig.optimizer.barrier()
    written = rig.machine.store.bytes_written - before
    assert written == sum(map(rig.states.written_by_update, rig.slots))


def test_updates_are_those_of_torch(any_rig: Rig) -> None:
    for seed in range(3):
        any_rig.offer(seed)
        any_rig.optimizer.barrier(PATIENCE_S)
        any_rig.reference_step(seed)
        any_rig.same()


def test_updates_are_the_same_while_another_thread_compiles(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flag for that is the process's, and its optimizers round otherwise under it."""
    for seed in range(3):
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        rig.offer(seed)
        rig.optimizer.barrier(PATIENCE_S)
        monkeypatch.undo()
        rig.reference_step(seed)
        rig.same()


def test_what_is_held_is_summed_in_order(any_rig: Rig) -> None:
    for first in (0, 10):
        for seed in range(first, first + 3):
            any_rig.offer(seed, Purpose.HOLD)
            any_rig.optimizer.barrier(PATIENCE_S)
        any_rig.offer(first + 3)
        any_rig.optimizer.barrier(PATIENCE_S)
        any_rig.reference_step(first, first + 1, first + 2, first + 3)
        any_rig.same()


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_is_held_can_be_applied_later(in_memory: bool, any_rig: Rig) -> None:
    any_rig.gradients.hold_bytes = 1 << 20 if in_memory else 0
    for seed in range(2):
        any_rig.offer(seed, Purpose.HOLD)
        any_rig.optimizer.barrier(PATIENCE_S)
    assert all((found.held.memory is not None) is in_memory for found in any_rig.residency.values())
    for slot in any_rig.slots:
        any_rig.optimizer.apply_held(slot, OPTIONS)
    any_rig.optimizer.barrier(PATIENCE_S)
    any_rig.gradients.forget()
    any_rig.reference_step(0, 1)
    any_rig.same()


@pytest.mark.parametrize("in_memory", [False, True])
def test_one_that_is_alone_is_held_as_it_is_and_scaled_when_it_is_applied(in_memory: bool, any_rig: Rig) -> None:
    rig = any_rig
    rig.gradients.hold_bytes = 1 << 20 if in_memory else 0
    for seed in range(2):
        for slot, found in rig.slots.items():
            gradient, in_place = rig.gradient(slot, seed), rig.machine.link.shares_memory
            if not rig.gradients.take_in(slot, gradient, alone=True, measures=True, in_place=in_place):
                rig.optimizer.offer(slot, gradient, Purpose.HOLD, None)
            held = rig.residency[slot].held
            assert held is not None and held.dtype == found.compute_dtype and (held.memory is not None) is in_memory
        rig.optimizer.barrier(PATIENCE_S)
        for slot in rig.slots:
            assert torch.equal(
                rig.gradients.norm(slot, 2.0), torch.linalg.vector_norm(rig.gradient(slot, seed).float())
            )
            for factor in (0.5, 0.3):
                rig.gradients.scale(slot, torch.tensor(factor))
            rig.optimizer.apply_held(slot, OPTIONS)
        rig.optimizer.finish_updates()
        assert all(rig.optimizer.pending(slot) is None for slot in rig.slots)
        for slot, found in rig.expected.items():
            found.grad = rig.gradient(slot, seed).float().mul_(0.5).mul_(torch.tensor(0.3))
        rig.reference.step()
        rig.same()


@pytest.mark.parametrize("in_memory", [False, True])
def test_updates_made_twice_write_first_what_the_forward_waits_for(in_memory: bool, any_rig: Rig) -> None:
    rig = any_rig
    copied = rig.slots[0].compute_dtype != torch.float32
    rig.gradients.hold_bytes = 1 << 20 if in_memory else 0
    for seed in range(3):
        rig.offer(seed, Purpose.HOLD)
        rig.optimizer.barrier(PATIENCE_S)
        before = {slot: rig.states.read_parameter(slot) for slot in rig.slots}
        for slot in rig.slots:
            rig.gradients.scale(slot, torch.tensor(0.3))
            rig.optimizer.apply_held(slot, OPTIONS, twice=True)
        rig.machine.drain(PATIENCE_S)
        for slot in rig.slots:
            assert rig.optimizer.pending(slot) is None
            assert rig.optimizer.is_pending(slot) is copied
            assert torch.equal(rig.states.read_parameter(slot), before[slot]) is copied
        rig.optimizer.repeat([1, 0])
        rig.gradients.forget()
        rig.optimizer.finish_repeating(0)
        rig.optimizer.finish_repeating(1)
        rig.machine.drain(PATIENCE_S)
        assert not any(map(rig.optimizer.is_pending, rig.slots))
        for slot, found in rig.expected.items():
            found.grad = rig.gradient(slot, seed).float().mul_(torch.tensor(0.3))
        rig.reference.step()
        rig.same()


def test_gradients_that_are_held_do_not_queue_behind_the_second_time(tmp_path: Path) -> None:
    """Compute waits for those, and for the second time only where the same parameter has its next gradient."""
    for rig in rigged(tmp_path, compute=torch.bfloat16, shares_memory=False):
        rig.offer(0, Purpose.HOLD)
        rig.optimizer.barrier(PATIENCE_S)
        rig.optimizer.apply_held(0, OPTIONS, twice=True)
        update = rig.optimizer.pending(0)
        assert update is not None
        update.wait(PATIENCE_S)
        order: list[str] = []
        span = rig.machine.timeline.span

        def noted(lane: str, label: str, nbytes: int = 0, span: Any = span, order: list[str] = order) -> Any:
            if lane == "cpu":
                order.append(label)
            return span(lane, label, nbytes)

        gate = threading.Event()
        rig.machine.timeline.span = noted  # type: ignore[method-assign]
        rig.machine.cpu.submit(lambda gate=gate: gate.wait(PATIENCE_S))  # type: ignore[misc]
        rig.optimizer.repeat([0])
        rig.optimizer.offer(1, rig.gradient(1, 1), Purpose.HOLD, None)
        rig.machine.d2h.drain(PATIENCE_S)
        gate.set()
        rig.optimizer.barrier(PATIENCE_S)
        # Two of four chunks have a buffer already, and the third is the first to wait for one.
        assert order == [*["update of long"] * 3, "update of small", "update of long"]


def test_the_drives_threads_do_not_wait_for_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All write copies when the second time of these chunks has buffers already, and its reads are queued behind them."""
    with machine(tmp_path, buffers=2 * SSD_THREADS) as made:
        slots = {n: parameter(f"p{n}", CHUNK_ELEMENTS, slot=n, compute=torch.bfloat16) for n in range(SSD_THREADS)}
        residency = {slot: Residency() for slot in slots}
        states = States(made.store, slots, residency)
        states.chunk_elements = CHUNK_ELEMENTS
        gradients = HeldGradients(states, slots, residency)
        optimizer = OutOfCoreOptimizer(made, slots, residency, chunk_elements=CHUNK_ELEMENTS, window_bytes=1 << 30)
        for slot, found in slots.items():
            made.store.allocate(found.extents(CHUNK_ELEMENTS))
            states.write_parameter(slot, torch.randn(found.shape))
            gradients.make_room(slot)
            optimizer.offer(slot, torch.randn(found.shape).bfloat16(), Purpose.HOLD, None)
        optimizer.barrier(PATIENCE_S)
        gate, writing, write = threading.Event(), threading.Semaphore(0), made.store.write

        def held_up(extent: str, *args: Any) -> None:
            if extent.endswith(":compute"):
                writing.release()
                assert gate.wait(PATIENCE_S)
            write(extent, *args)

        monkeypatch.setattr(made.store, "write", held_up)
        for slot in slots:
            optimizer.apply_held(slot, OPTIONS, twice=True)
        assert all(writing.acquire(timeout=PATIENCE_S) for _ in slots)
        optimizer.repeat(())
        gate.set()
        started_s = time.monotonic()
        optimizer.barrier(PATIENCE_S)
        assert time.monotonic() - started_s < PATIENCE_S
        gradients.forget()


def test_an_interrupt_between_the_two_times_leaves_the_second_to_those_who_wait(tmp_path: Path) -> None:
    for rig in rigged(tmp_path, compute=torch.bfloat16):
        rig.offer(0, Purpose.HOLD)
        rig.optimizer.barrier(PATIENCE_S)
        for slot in rig.slots:
            rig.optimizer.apply_held(slot, OPTIONS, twice=True)
        rig.optimizer.finish_updates()  # what repeat() would have begun
        rig.gradients.forget()
        rig.reference_step(0)
        rig.same()


@pytest.mark.parametrize("what", ["preadv", "pwritev"])
def test_a_second_time_that_fails_is_heard_of_and_forgotten_with_the_states(what: str, tmp_path: Path) -> None:
    for rig in rigged(tmp_path, compute=torch.bfloat16):
        rig.offer(0, Purpose.HOLD)
        rig.optimizer.barrier(PATIENCE_S)
        for slot in rig.slots:
            rig.optimizer.apply_held(slot, OPTIONS, twice=True)
        rig.optimizer.barrier(PATIENCE_S)
        assert not rig.optimizer.update_failed()
        rig.backend.faults[what] = [errno.EIO]
        with suppress(StoreError):  # it may be known before the last of them has begun
            rig.optimizer.repeat([0])
        with pytest.raises(StoreError):
            rig.optimizer.finish_updates()
        assert rig.optimizer.update_failed()
        with pytest.raises(StoreError):
            rig.optimizer.finish_repeating(0)
        rig.optimizer.settle(PATIENCE_S)
        assert not rig.optimizer.update_failed()
        rig.gradients.forget()
        starts_over(rig)


@pytest.mark.parametrize("what", ["preadv", "pwritev"])
def test_an_update_that_fails_is_heard_of_by_those_who_wait_for_it(what: str, rig: Rig) -> None:
    rig.offer(0, Purpose.HOLD)
    rig.optimizer.barrier(PATIENCE_S)
    rig.backend.faults[what] = [None, errno.EIO]
    with suppress(StoreError):  # the first one's failure may be known before the second one begins
        for slot in rig.slots:
            rig.optimizer.apply_held(slot, OPTIONS)
    with pytest.raises(StoreError):
        rig.optimizer.finish_updates()
    assert rig.optimizer.update_failed()
    failed = [rig.optimizer.pending(slot) for slot in rig.slots]
    assert any(update is not None and isinstance(update.error, StoreError) for update in failed)
    rig.optimizer.settle()
    assert not rig.optimizer.update_failed() and rig.optimizer.pending(0) is None


@pytest.mark.parametrize("resident", [("master",), ("compute",), ("master", "compute")], ids=" and ".join)
def test_states_may_be_in_memory(resident: tuple[str, ...], any_rig: Rig) -> None:
    for slot, found in any_rig.slots.items():
        home = any_rig.residency[slot]
        value = any_rig.states.read_parameter(slot).reshape(-1)
        if "master" in resident:
            home.exp_avg, home.exp_avg_sq = (torch.zeros(found.numel) for _ in range(2))
            home.master = value
        if "compute" in resident:
            home.compute = (
                value if found.is_master and home.master is not None else value.to(found.compute_dtype, copy=True)
            )
            home.on_device = True
    for seed in range(2):
        any_rig.offer(seed, Purpose.HOLD)
        any_rig.optimizer.barrier(PATIENCE_S)
        any_rig.offer(seed + 10)
        any_rig.optimizer.barrier(PATIENCE_S)
        any_rig.reference_step(seed, seed + 10)
    for slot, expected in any_rig.expected.items():
        home, found = any_rig.residency[slot], any_rig.slots[slot]
        assert torch.equal(any_rig.states.read_parameter(slot), expected)
        if home.compute is not None:
            assert torch.equal(home.compute, expected.detach().reshape(-1).to(found.compute_dtype))
        else:
            assert torch.equal(
                any_rig.states._read(found.streamed_extent, found.numel, found.compute_dtype),
                expected.detach().reshape(-1).to(found.compute_dtype),
            )


def test_a_gradient_may_have_any_strides_and_may_die_at_once(rig: Rig) -> None:
    gradient = rig.gradient(1, 0)
    rig.optimizer.offer(1, gradient.t().contiguous().t(), Purpose.APPLY, OPTIONS)
    del gradient
    rig.optimizer.offer(0, rig.gradient(0, 0), Purpose.APPLY, OPTIONS)
    rig.optimizer.barrier(PATIENCE_S)
    rig.reference_step(0)
    rig.same()


def test_a_parameter_of_no_elements(tmp_path: Path) -> None:
    with machine(tmp_path) as made:
        slots = {0: parameter("empty", 0, 7)}
        residency = {0: Residency()}
        optimizer = OutOfCoreOptimizer(made, slots, residency, chunk_elements=CHUNK_ELEMENTS, window_bytes=1)
        for purpose in (Purpose.HOLD, Purpose.APPLY):
            optimizer.offer(0, torch.empty(0, 7), purpose, OPTIONS)
            optimizer.barrier(PATIENCE_S)
        assert residency[0].updates == 1


# --- the window -----------------------------------------------------------------------------------------------


def test_small_chunks_do_not_wait_for_large_buffers(tmp_path: Path) -> None:
    """Twice as many norms as there are small buffers, while both large ones are taken; then large and small in turns."""
    with machine(tmp_path, chunk_elements=LARGE) as made:
        sizes = [5] * (2 * SMALL_BUFFERS) + [SMALL_ELEMENTS, SMALL_ELEMENTS + 1, 3 * LARGE + 5, 7, LARGE, 9] * 2
        slots = {slot: parameter(f"p{slot}", size, slot=slot) for slot, size in enumerate(sizes)}
        residency = {slot: Residency() for slot in slots}
        states = States(made.store, slots, residency)
        states.chunk_elements = LARGE
        for slot, found in slots.items():
            made.store.allocate(found.extents(LARGE))
            states.write_parameter(slot, torch.full(found.shape, 0.5))
        optimizer = OutOfCoreOptimizer(made, slots, residency, chunk_elements=LARGE, window_bytes=1 << 30)

        def update(updated: dict[int, ParameterSlot]) -> None:
            for slot, found in updated.items():
                optimizer.offer(slot, torch.ones(found.shape), Purpose.APPLY, OPTIONS)
            optimizer.barrier(PATIENCE_S)

        with made.pool.acquire("optimizer"), made.pool.acquire("optimizer"):
            update({slot: found for slot, found in slots.items() if found.numel <= SMALL_ELEMENTS})
        update({slot: found for slot, found in slots.items() if found.numel > SMALL_ELEMENTS})
        update(slots)
        assert {found.updates for found in residency.values()} == {2}
        assert len({states.read_parameter(slot)[-1].item() for slot in slots}) == 1


def test_gradients_on_the_device_wait_for_the_window(tmp_path: Path, shares_memory: bool) -> None:
    for rig in rigged(tmp_path, window_bytes=4 * ELEMENTS, shares_memory=shares_memory):
        gate = threading.Event()
        rig.machine.d2h.submit(gate.wait)
        rig.optimizer.offer(0, rig.gradient(0, 0), Purpose.APPLY, OPTIONS)  # fills the window
        offered = threading.Event()

        def offer_more(rig: Rig = rig, offered: threading.Event = offered) -> None:
            rig.optimizer.offer(1, rig.gradient(1, 0), Purpose.APPLY, OPTIONS)
            offered.set()

        thread = threading.Thread(target=offer_more)
        thread.start()
        assert not offered.wait(0.2)
        gate.set()
        assert offered.wait(PATIENCE_S)
        thread.join()
        rig.optimizer.barrier(PATIENCE_S)
        rig.reference_step(0)
        rig.same()
        assert rig.machine.timeline.stall_s > 0


def test_a_window_only_narrows(tmp_path: Path, shares_memory: bool) -> None:
    for rig in rigged(tmp_path, window_bytes=8 * ELEMENTS, shares_memory=shares_memory):
        rig.optimizer.narrow(4 * ELEMENTS)
        rig.optimizer.narrow(1 << 30)
        gate, offered = threading.Event(), threading.Event()
        rig.machine.d2h.submit(gate.wait)
        rig.optimizer.offer(0, rig.gradient(0, 0), Purpose.APPLY, OPTIONS)

        def offer_more(rig: Rig = rig, offered: threading.Event = offered) -> None:
            rig.optimizer.offer(1, rig.gradient(1, 0), Purpose.APPLY, OPTIONS)
            offered.set()

        thread = threading.Thread(target=offer_more)
        thread.start()
        assert not offered.wait(0.2), "it waits: the first fills the narrow window"
        gate.set()
        thread.join(PATIENCE_S)
        assert offered.is_set()
        rig.optimizer.barrier(PATIENCE_S)


def test_who_needs_room_waits_until_gradients_have_left(tmp_path: Path, shares_memory: bool) -> None:
    for rig in rigged(tmp_path, shares_memory=shares_memory):
        gate, alone = threading.Event(), threading.Event()
        rig.machine.d2h.submit(gate.wait)
        gradient = rig.gradient(0, 0)
        rig.optimizer.offer(0, gradient, Purpose.APPLY, OPTIONS)
        rig.optimizer.let_leave(gradient.nbytes)

        def have_room(rig: Rig = rig, alone: threading.Event = alone) -> None:
            rig.optimizer.let_leave(0)
            alone.set()

        thread = threading.Thread(target=have_room)
        thread.start()
        assert not alone.wait(0.2)
        gate.set()
        thread.join(PATIENCE_S)
        assert alone.is_set() and not rig.optimizer.window_used
        rig.optimizer.barrier(PATIENCE_S)


def test_a_gradient_larger_than_the_window_passes_alone(tmp_path: Path, shares_memory: bool) -> None:
    for rig in rigged(tmp_path, window_bytes=1, shares_memory=shares_memory):
        for seed in range(2):
            rig.offer(seed)
            rig.optimizer.barrier(PATIENCE_S)
            rig.reference_step(seed)
        rig.same()


@pytest.mark.parametrize(("lane", "which"), [("d2h", "5 wait for their gradients"), ("cpu", "of long")])
def test_a_barrier_in_vain_says_how_much_is_missing(rig: Rig, lane: str, which: str) -> None:
    gate = threading.Event()
    getattr(rig.machine, lane).submit(gate.wait)
    rig.offer(0)
    with pytest.raises(LaneTimeout, match=rf"waited 0\.5 s for the optimizer: 5 chunks are unfinished \({which}"):
        rig.optimizer.barrier(0.5)
    gate.set()
    rig.optimizer.barrier(PATIENCE_S)
    rig.reference_step(0)
    rig.same()


# --- Ctrl-C ---------------------------------------------------------------------------------------------------


HANDS_OVER = [
    OutOfCoreOptimizer.apply_held, OutOfCoreOptimizer._begin, OutOfCoreOptimizer.repeat, ChunkPipeline.expect,
    ChunkPipeline.arrive, ChunkPipeline._start_reading, ChunkPipeline._read_into, HostPool.try_acquire, HostPool._hand_out,
]  # fmt: skip


def test_an_interrupt_at_any_line_of_handing_over_an_update_loses_nothing(tmp_path: Path) -> None:
    """Whoever goes on with those that still wait gets what torch does: each has been handed over as a whole, or not at all."""
    for rig in rigged(tmp_path, compute=torch.bfloat16):
        came, places = 0, [(work.__code__, line) for work in HANDS_OVER for line in lines_of(work.__code__)]
        for seed, (code, line) in enumerate(places):
            rig.offer(seed, Purpose.HOLD)
            rig.optimizer.barrier(PATIENCE_S)
            came += interrupted(code, line, partial(apply_what_is_held, rig))
            apply_what_is_held(rig)
            rig.optimizer.finish_updates()
            rig.optimizer.barrier(PATIENCE_S)
            rig.machine.drain(PATIENCE_S)
            assert not any(rig.machine.pool.in_use(purpose) for purpose in ("optimizer", "small"))
            rig.gradients.forget()
            rig.reference_step(seed)
        assert came > len(places) // 2  # other lines are those of lanes, or of failures
        rig.same()


def test_an_interrupt_at_any_line_of_an_offer_loses_nothing(rig: Rig) -> None:
    came, places = (
        0,
        [
            (work.__code__, line)
            for work in (OutOfCoreOptimizer.offer, OutOfCoreOptimizer._hand_over, ChunkPipeline.expect)
            for line in lines_of(work.__code__)
        ],
    )
    for seed, (code, line) in enumerate(places):
        came += interrupted(code, line, partial(rig.offer, seed))
        for slot in rig.slots:
            if rig.residency[slot].updates == seed:
                rig.optimizer.offer(slot, rig.gradient(slot, seed), Purpose.APPLY, OPTIONS)
        rig.optimizer.barrier(PATIENCE_S)
        rig.reference_step(seed)
        assert rig.optimizer.window_used == 0
    assert came > len(places) // 3
    rig.same()


def test_an_interrupt_at_any_line_of_an_update_at_once_keeps_no_buffer(rig: Rig) -> None:
    for slot in rig.slots:
        home = rig.residency[slot]
        home.master = home.compute = rig.states.read_parameter(slot).reshape(-1)
        home.exp_avg, home.exp_avg_sq = torch.zeros_like(home.master), torch.zeros_like(home.master)
        home.on_device = True
    came, update = 0, OutOfCoreOptimizer._update_here
    for work in (update, ChunkUpdate.compute, HostPool.acquire, HostPool._hand_out, Buffer.release):
        for line in lines_of(work.__code__):
            came += interrupted(work.__code__, line, lambda: rig.offer(0))
            assert rig.machine.pool.in_use("compute") == 0
    assert came > len(lines_of(update.__code__)) + len(lines_of(ChunkUpdate.compute.__code__))


def apply_what_is_held(rig: Rig) -> None:
    for slot in rig.slots:
        if rig.gradients.holds(slot):
            rig.optimizer.apply_held(slot, OPTIONS, twice=True)
    rig.optimizer.repeat([1])


def interrupted(code: CodeType, line: int, call: Callable[[], object]) -> bool:
    """Whether Ctrl-C came in ``call``."""
    try:
        with interrupted_at(code, line):
            call()
    except KeyboardInterrupt:
        return True
    return False


# --- failures -------------------------------------------------------------------------------------------------


def fails_once(rig: Rig, kind: type[BaseException], match: str) -> None:
    """An update raises the failure itself, soon; after it everything raises ``StepError`` until ``settle``."""
    started_s = time.monotonic()
    with pytest.raises(kind, match=match):
        rig.offer(0)
        rig.optimizer.barrier(PATIENCE_S)
    for again in (lambda: rig.optimizer.barrier(PATIENCE_S), lambda: rig.offer(5)):
        with pytest.raises(StepError, match="the optimizer failed earlier"):
            again()
    assert time.monotonic() - started_s < PATIENCE_S
    rig.optimizer.settle(PATIENCE_S)
    rig.gradients.forget()
    rig.optimizer.barrier(PATIENCE_S)


def starts_over(rig: Rig) -> None:
    """All is written anew, and updates are torch's again."""
    rig.reference.state.clear()
    for slot, found in rig.expected.items():
        rig.states.write_parameter(slot, found.detach())
        rig.states.write_moments(slot, torch.zeros(found.shape), torch.zeros(found.shape))
        rig.residency[slot].updates = 0
    for seed in range(2):
        rig.offer(seed)
        rig.optimizer.barrier(PATIENCE_S)
        rig.reference_step(seed)
    rig.same()


def test_checksums_of_states_are_found_while_they_are_in_a_cache(
    kept_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the thread that updates, where it is the only one; what is kept is the same, and so are the numbers."""
    threads: list[str] = []

    def noted(view: memoryview) -> int:
        threads.append(threading.current_thread().name.rpartition("-")[0])
        return checksum(view)

    for seed in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(generations, "checksum", noted)
            kept_rig.offer(seed)
            kept_rig.optimizer.barrier(PATIENCE_S)
        kept_rig.reference_step(seed)
        kept_rig.same()  # reads, and compares
        kept_rig.machine.store.commit({}, verify=True)
    assert set(threads) == {"lohan-cpu" if kept_rig.machine.sums_beside_updates else "lohan-ssd"}


def test_damaged_states_are_not_updated(kept_rig: Rig, directory: Path) -> None:
    store = kept_rig.machine.store
    kept_rig.offer(0)
    kept_rig.optimizer.barrier(PATIENCE_S)
    store.commit({})
    versions = store._extents["long:moments"].versions
    assert versions is not None
    flip(directory, versions.pieces(0)[0].file_offset_bytes + 5)
    slot = versions.current[0]
    with pytest.raises(StoreError, match=r"extent 'long:moments': bytes 0 to \d+ of it are damaged"):
        kept_rig.offer(1)
        kept_rig.optimizer.barrier(PATIENCE_S)
    kept_rig.optimizer.settle(PATIENCE_S)
    assert versions.current[0] == slot


@pytest.mark.parametrize(
    "fault", [errno.EIO, errno.ENOSPC, Short(100), Claim(0)], ids=["EIO", "ENOSPC", "a part", "nothing"]
)
@pytest.mark.parametrize("skipped", [0, 3])
def test_a_write_that_fails(fault: Fault, skipped: int, rig: Rig) -> None:
    rig.backend.faults["pwritev"] = [None] * skipped + [fault]
    fails_once(rig, StoreError, "writing .* of extent '(long|small):")
    starts_over(rig)


@pytest.mark.parametrize("fault", [errno.EIO, Short(100), Claim(0)], ids=["EIO", "a part", "nothing"])
@pytest.mark.parametrize("skipped", [0, 3])
def test_a_read_that_fails(fault: Fault, skipped: int, rig: Rig) -> None:
    rig.backend.faults["preadv"] = [None] * skipped + [fault]
    fails_once(rig, StoreError, "reading .* of extent '(long|small):")
    starts_over(rig)


def test_everything_fails_at_once(rig: Rig) -> None:
    rig.backend.faults.update(preadv=[errno.EIO] * 100, pwritev=[errno.EIO] * 100)
    fails_once(rig, StoreError, "Input/output error")
    rig.backend.faults.clear()
    starts_over(rig)


@pytest.mark.parametrize("lane", ["cpu", "d2h"])
def test_a_gradient_that_cannot_be_held(lane: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is updated, so that it is enough to drop it, as ``settle`` does."""
    with monkeypatch.context() as patch:
        patch.setattr(getattr(rig.machine, lane), "submit", raises(LohanError(f"lane {lane} is closed")))
        with pytest.raises(LohanError, match="closed"):
            rig.offer(0, Purpose.HOLD)
            rig.optimizer.barrier(PATIENCE_S)
    if lane == "d2h":  # where the compute thread itself has heard it
        with pytest.raises(LohanError, match="closed"):
            rig.optimizer.barrier(PATIENCE_S)
    for again in (lambda: rig.optimizer.barrier(PATIENCE_S), lambda: rig.offer(5)):
        with pytest.raises(StepError, match=rf"could not be held \(lane {lane} is closed\).*optimizer\.zero_grad\(\)"):
            again()
    rig.optimizer.settle(PATIENCE_S)
    rig.gradients.forget()
    starts_over(rig)


@pytest.mark.parametrize("shares_memory", [False], indirect=True)
def test_a_copy_from_the_device_that_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rig.machine.link, "copy_out", raises(MemoryError("no staging")), raising=True)
        fails_once(rig, MemoryError, "no staging")
    starts_over(rig)


def test_arithmetic_that_fails(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("lohan_fx.runtime.adam.update", raises(ZeroDivisionError("beta")))
        fails_once(rig, ZeroDivisionError, "beta")
    starts_over(rig)


@pytest.mark.parametrize("lane", ["cpu", "ssd"])
def test_a_lane_that_takes_no_more_jobs(lane: str, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is handed on may be lost without those who wait for it hearing."""
    with monkeypatch.context() as patch:
        patch.setattr(getattr(rig.machine, lane), "submit", raises(LohanError(f"lane {lane} is closed")))
        fails_once(rig, LohanError, f"lane {lane} is closed")
    starts_over(rig)


def test_a_lane_that_takes_no_more_gradients(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rig.machine.d2h, "submit", raises(LohanError("lane d2h is closed")))
        for act in (lambda: rig.offer(0), lambda: rig.optimizer.barrier(PATIENCE_S), lambda: rig.offer(0)):
            with pytest.raises(LohanError, match="closed"):
                act()
    rig.optimizer.settle(PATIENCE_S)
    starts_over(rig)


def test_a_failure_wakes_those_who_wait_for_the_window(tmp_path: Path) -> None:
    for rig in rigged(tmp_path, window_bytes=1):
        rig.backend.faults["preadv"] = [errno.EIO] * 100
        started_s = time.monotonic()
        with pytest.raises((StoreError, StepError)):
            for seed in range(100):
                rig.offer(seed)
        assert time.monotonic() - started_s < PATIENCE_S
        rig.backend.faults.clear()
        rig.optimizer.settle(PATIENCE_S)
        starts_over(rig)


def test_a_copy_that_stays_on_a_gpu_is_cast_in_parts_and_brought_there_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far as that can be seen without one."""
    brought: list[int] = []
    copy_in = rig.machine.link.copy_in

    def counted(target: torch.Tensor, source: torch.Tensor) -> Moment:
        brought.append(source.numel())
        return copy_in(target, source)

    monkeypatch.setattr(StateBuffer, "_returns", lambda states, compute: True)
    monkeypatch.setattr(adam, "part_elements", lambda: 1000)
    monkeypatch.setattr(rig.machine.link, "copy_in", counted)
    for slot, found in rig.slots.items():
        rig.residency[slot].compute = torch.zeros(found.numel, dtype=found.compute_dtype)
    rig.offer(0)
    rig.optimizer.barrier(PATIENCE_S)
    rig.reference_step(0)
    for slot, found in rig.slots.items():
        copy = rig.residency[slot].compute
        assert copy is not None and torch.equal(copy, rig.expected[slot].detach().flatten().to(found.compute_dtype))
    assert sorted(brought) == [25, 77, CHUNK_ELEMENTS, CHUNK_ELEMENTS, CHUNK_ELEMENTS]


def test_a_read_that_was_given_up_keeps_its_buffer_until_it_is_over(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would write, late, into what another chunk is updated in."""
    go_on, read = threading.Event(), rig.backend.preadv

    def hangs(fd: int, view: memoryview, offset: int) -> int:
        assert go_on.wait(PATIENCE_S)
        return read(fd, view, offset)

    def gives_up(reads: Iterable[Work[Any]]) -> list[Any]:
        return [found for work in reads for found in work.wait(0.0)]

    with monkeypatch.context() as patch:
        patch.setattr(rig.backend, "preadv", hangs)
        patch.setattr(chunk_pipeline, "wait_for_all", gives_up)
        with pytest.raises(LaneTimeout, match="waited 0 s for 'read"):
            rig.offer(0)
            rig.optimizer.barrier(PATIENCE_S)
        assert rig.machine.pool.in_use("optimizer") > 0
        go_on.set()
        rig.optimizer.settle(PATIENCE_S)
    starts_over(rig)


def test_the_failure_keeps_no_frames_alive(rig: Rig) -> None:
    """What is raised is a copy: the traceback of a whole backward must not stay with the optimizer."""
    rig.backend.faults["preadv"] = [errno.EIO]
    with pytest.raises(StoreError) as caught:
        rig.offer(0)
        rig.optimizer.barrier(PATIENCE_S)
    assert rig.optimizer._chunks._error is not caught.value
    assert str(rig.optimizer._chunks._error) == str(caught.value)
    rig.optimizer.settle(PATIENCE_S)
    starts_over(rig)


def raises(error: BaseException) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail
