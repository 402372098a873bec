"""Gradients that wait: in memory as far as it goes, else in the store; alone as they are, summed in fp32; their norms."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lohan_fx.plan import OptimizerTiming, ParameterPlan, Plan, Prediction, Stage, Tier, Windows
from lohan_fx.runtime.gradient_norm import PIECE_ELEMENTS, norm_of
from lohan_fx.runtime.held_gradients import PIECE_BYTES, HeldGradients
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.slots import Residency
from lohan_fx.runtime.states import States
from tests.runtime.rig import parameter

pytestmark = pytest.mark.usefixtures("leak_check")

CPU = torch.device("cpu")
HALF, FULL, EMPTY, LONG = range(4)
SLOTS = (
    parameter("half", 11, 30, slot=HALF, compute=torch.bfloat16),
    parameter("full", 7, 3, slot=FULL),
    parameter("empty", 0, 3, slot=EMPTY),
    parameter("long", PIECE_BYTES // 4 + 5, slot=LONG, compute=torch.bfloat16),
)


class Rig:
    def __init__(self, store: NvmeStore) -> None:
        self.store = store
        self.slots = {slot.slot: slot for slot in SLOTS}
        self.residency = {slot: Residency() for slot in self.slots}
        self.held = HeldGradients(States(store, self.slots, self.residency), self.slots, self.residency)

    def gradient(self, slot: int, seed: int = 0) -> torch.Tensor:
        found = self.slots[slot]
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(found.shape, generator=generator).to(found.compute_dtype)

    def hold(self, slot: int, seed: int = 0, *, alone: bool = False) -> torch.Tensor:
        """As the lanes do: what is not taken in is added where the room is."""
        gradient, resident = self.gradient(slot, seed), self.residency[slot]
        if self.held.take_in(slot, gradient, alone=alone, measures=True, in_place=True):
            return gradient
        held = resident.held
        assert held is not None
        total = gradient.float().reshape(-1) + (self.held.read(slot).reshape(-1) if resident.contributions else 0)
        if held.memory is not None:
            held.memory.copy_(total)
        else:
            self.held._states._write(self.slots[slot].gradient_extent, total, held.dtype)
        resident.contributions += 1
        return gradient


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with NvmeStore([tmp_path]) as store:
        yield Rig(store)


def place(rig: Rig, slot: int) -> tuple[torch.dtype, bool]:
    """(dtype, whether in memory) of what is held."""
    held = rig.residency[slot].held
    assert held is not None
    return held.dtype, held.memory is not None


def test_room_in_memory_as_far_as_it_goes(rig: Rig) -> None:
    rig.held.hold_bytes = 4 * rig.slots[HALF].numel
    rig.hold(HALF)
    allocated = rig.store.nbytes_allocated
    rig.hold(FULL)
    assert [place(rig, HALF), place(rig, FULL)] == [(torch.float32, True), (torch.float32, False)]
    assert rig.store.nbytes_allocated == allocated + 4096
    rig.hold(EMPTY)
    assert rig.store.nbytes_allocated == allocated + 4096


def test_room_is_used_again_in_the_next_step(rig: Rig) -> None:
    rig.held.hold_bytes = 4 * rig.slots[HALF].numel
    allocated = 0
    for _ in range(3):
        rig.hold(HALF)
        rig.hold(FULL)
        assert place(rig, HALF)[1] and not place(rig, FULL)[1]
        allocated = allocated or rig.store.nbytes_allocated
        rig.held.forget()
        assert rig.residency[HALF].held is None and not rig.held.holds(HALF)
    assert rig.store.nbytes_allocated == allocated


def test_where_a_gradient_waits_does_not_hang_on_timing(rig: Rig) -> None:
    """The thread that updates may have let go of the step before's or not: the place decides how a norm is rounded."""
    rig.held.hold_bytes = 4 * rig.slots[HALF].numel
    users = []
    for _ in range(3):
        rig.hold(HALF)
        rig.hold(FULL)
        assert place(rig, HALF)[1] and not place(rig, FULL)[1]
        users.append(rig.residency[HALF].held)
        rig.held.forget()
    rig.hold(FULL)  # also where it comes first
    assert not place(rig, FULL)[1]


def test_a_sum_and_the_one_that_it_replaces_share_a_place(rig: Rig) -> None:
    """Both are there at once, but only while it is widened."""
    elements = rig.slots[HALF].numel
    rig.held.hold_bytes = 6 * elements
    for seed in (1, 2):
        rig.hold(HALF, seed, alone=True)
    assert place(rig, HALF) == (torch.float32, True)
    rig.held.hold_bytes += 4 * rig.slots[FULL].numel - 2 * elements
    rig.hold(FULL)
    assert place(rig, FULL)[1]


@pytest.mark.parametrize("room", [5, 6])
def test_a_sum_goes_to_the_store_where_not_both_fit(rig: Rig, room: int) -> None:
    rig.held.hold_bytes = room * rig.slots[HALF].numel
    for seed in (1, 2):
        rig.hold(HALF, seed, alone=True)
    assert place(rig, HALF) == (torch.float32, room == 6)


def test_another_plan_counts_what_is_held_already(rig: Rig) -> None:
    plan = Plan("keep", "cpu", "float32", 1, 1, (), (), Windows(0, 0, 0, 4096, 4096, 1, 2, 2, 0))
    rig.held.hold_bytes = 4 * rig.slots[HALF].numel
    rig.hold(HALF)
    rig.held.apply_plan(plan, torch.device("cpu"))
    rig.hold(FULL)
    assert not place(rig, FULL)[1]
    rig.held.forget()
    rig.held.apply_plan(plan, torch.device("cpu"))
    rig.hold(FULL)
    assert place(rig, FULL)[1]


def planned(*parameters: ParameterPlan, left: int = 0) -> Plan:
    """Of a promise of which ``left`` bytes are left."""
    at_peak = Prediction(Stage({}), Stage({}), {"device": 1, "host": 1 << 20}, 0, 0, 0, 0)
    windows = Windows(0, 0, 0, 4096, 4096, 1, 2, 2, 0)
    return Plan("lohan", "cpu", "float32", (1 << 20) + left, 1, (), parameters, windows, prediction=at_peak)


def waiting(slot: int, runs: OptimizerTiming, home: Tier, *, twice: bool = False) -> ParameterPlan:
    found = SLOTS[slot]
    nbytes = found.numel * found.compute_dtype.itemsize
    return ParameterPlan(found.name, "", found.numel, nbytes, True, Tier.NVME, Tier.NVME, runs, home, twice)


def test_the_plan_says_when_and_how_often_a_gradient_is_applied(rig: Rig) -> None:
    def said() -> list[list[int]]:
        asked = (rig.held.applied_late, rig.held.deferred, rig.held.updated_twice)
        return [[slot for slot in rig.slots if ask(slot)] for ask in asked]

    half = waiting(HALF, OptimizerTiming.NEXT_FORWARD, Tier.HOST)
    long = waiting(LONG, OptimizerTiming.NEXT_FORWARD, Tier.NVME, twice=True)
    rig.held.apply_plan(
        planned(half, waiting(FULL, OptimizerTiming.AFTER_BACKWARD, Tier.HOST), long), torch.device("cpu")
    )
    assert said() == [[FULL], [HALF, LONG], [LONG]]
    rig.held.apply_plan(planned(waiting(HALF, OptimizerTiming.AFTER_BACKWARD, Tier.HOST)), torch.device("cpu"))
    assert said() == [[HALF], [], []]


def test_a_gradient_waits_where_the_plan_says_in_memory_that_it_counted(rig: Rig) -> None:
    half = waiting(HALF, OptimizerTiming.NEXT_FORWARD, Tier.HOST)
    late = waiting(FULL, OptimizerTiming.AFTER_BACKWARD, Tier.HOST)
    rig.held.apply_plan(planned(half, late, waiting(LONG, OptimizerTiming.NEXT_FORWARD, Tier.NVME)), CPU)
    for slot in (HALF, FULL, LONG):
        rig.hold(slot, alone=True)
    assert place(rig, HALF) == (torch.bfloat16, True) and place(rig, FULL) == (torch.float32, True)
    assert not place(rig, LONG)[1]
    rig.held.forget()
    rig.held.apply_plan(planned(waiting(LONG, OptimizerTiming.NEXT_FORWARD, Tier.NVME), left=1 << 30), CPU)
    rig.hold(LONG, alone=True)
    assert not place(rig, LONG)[1]


def test_what_is_updated_after_the_backward_is_held_in_fp32_from_the_first_on(rig: Rig) -> None:
    rig.held.apply_plan(planned(waiting(HALF, OptimizerTiming.AFTER_BACKWARD, Tier.HOST)), CPU)
    rig.held.hold_bytes = 1 << 20
    gradient = rig.hold(HALF, alone=True)
    held = rig.residency[HALF].held
    assert held is not None and held.memory is not None and held.dtype == held.memory.dtype == torch.float32
    assert torch.equal(rig.held.read(HALF), gradient.float())


def test_the_gradient_that_came_first_is_not_changed_by_what_is_added(rig: Rig) -> None:
    """The caller may have it, too, as ``parameter.grad`` or from a hook."""
    rig.held.hold_bytes = 1 << 20
    first = rig.hold(FULL, 1, alone=True)
    before = first.clone()
    second = rig.hold(FULL, 2)
    assert torch.equal(first, before)
    assert torch.equal(rig.held.read(FULL), before + second)


def test_what_no_plan_speaks_of_has_what_all_of_them_leave(rig: Rig) -> None:
    for left, least in ((700, 700), (500, 500), (900, 500)):
        rig.held.apply_plan(planned(left=left), torch.device("cpu"))
        assert rig.held.hold_bytes == least


def test_a_sum_in_memory_is_measured_as_a_whole(rig: Rig) -> None:
    """As plain PyTorch does: pieces would differ in the last bits."""
    rig.held.hold_bytes = 4 * rig.slots[LONG].numel
    total = rig.hold(LONG, 0).float() + rig.hold(LONG, 1).float()
    assert place(rig, LONG) == (torch.float32, True)
    for norm_type in (2.0, 3.0):
        assert torch.equal(rig.held.norm(LONG, norm_type), torch.linalg.vector_norm(total, norm_type))


def test_a_gradient_alone_stays_as_it_is_and_is_not_copied(rig: Rig) -> None:
    rig.held.hold_bytes = 2 * rig.slots[HALF].numel
    gradient = rig.hold(HALF, alone=True)
    held = rig.residency[HALF].held
    assert held is not None and held.memory is not None and held.memory.data_ptr() == gradient.data_ptr()
    assert torch.equal(rig.held.read(HALF), gradient.float())


@pytest.mark.parametrize("part", [lambda g: g[:1].expand(11, 30), lambda g: torch.cat([g, g])[:11], lambda g: g.t()])
def test_a_part_of_something_larger_is_not_kept_alive(rig: Rig, part: object) -> None:
    assert callable(part)
    rig.held.hold_bytes = 1 << 20
    gradient = part(rig.gradient(HALF).reshape(30, 11).t().contiguous())
    taken = rig.held.take_in(HALF, gradient, alone=True, measures=False, in_place=True)
    held = rig.residency[HALF].held
    assert held is not None and held.memory is not None
    # A transposed one was copied on the way, so the copy may be kept.
    assert taken is (gradient.untyped_storage().nbytes() == 660)
    assert held.memory.untyped_storage().nbytes() == 660 and held.memory.is_contiguous()


@pytest.mark.parametrize("before", [0, 1 << 30], ids=["nvme", "memory"])
@pytest.mark.parametrize("after", [0, 1 << 30], ids=["nvme", "memory"])
@pytest.mark.parametrize("slot", [HALF, LONG])
def test_another_after_the_one_that_was_thought_alone(rig: Rig, slot: int, before: int, after: int) -> None:
    rig.held.hold_bytes = before
    first = rig.hold(slot, 1, alone=True)
    assert place(rig, slot) == (torch.bfloat16, bool(before))
    rig.held.hold_bytes = after
    second = rig.hold(slot, 2, alone=True)
    assert place(rig, slot) == (torch.float32, bool(after))
    assert torch.equal(rig.held.read(slot), first.float() + second.float())


@pytest.mark.parametrize("hold_bytes", [0, 1 << 20], ids=["nvme", "memory"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, 0.0, math.inf, -math.inf])
def test_norms_are_those_of_torch(rig: Rig, norm_type: float, hold_bytes: int) -> None:
    rig.held.hold_bytes = hold_bytes
    for slot in (HALF, FULL):
        gradient = rig.hold(slot, alone=slot == HALF)
        assert torch.equal(rig.held.norm(slot, norm_type), torch.linalg.vector_norm(gradient.float(), norm_type))


def test_norms_and_values_after_scaling(rig: Rig) -> None:
    rig.held.hold_bytes = 1 << 20
    gradient = rig.hold(FULL)
    before = rig.residency[FULL].held
    assert not rig.held.scaled()
    for factor in (0.5, -0.25):
        rig.held.scale(FULL, torch.tensor(factor))
    assert rig.held.scaled()
    assert torch.equal(rig.held.norm(FULL, 2.0), torch.linalg.vector_norm(gradient) * 0.125)
    assert torch.equal(rig.held.norm(FULL, 0.0), torch.linalg.vector_norm(gradient, 0.0))
    assert torch.equal(rig.held.read(FULL), gradient * 0.5 * -0.25)
    assert before is not None and before.memory is not None and torch.equal(before.memory, gradient.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_gradient_of_half_precision_is_measured_in_pieces(dtype: torch.dtype) -> None:
    flat = torch.randn(2 * PIECE_ELEMENTS + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for norm_type in (2.0, 1.0, math.inf):
        torch.testing.assert_close(
            norm_of(flat, norm_type), torch.linalg.vector_norm(flat.double(), norm_type).float(), rtol=1e-4, atol=0.0
        )
    flat[-1] = math.inf
    assert not torch.isfinite(norm_of(flat))


class _Memory(TorchDispatchMode):
    """The memory of all fp32 values that ops made, kept, so that none is told for another."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            self.of[found.untyped_storage().data_ptr()] = found.untyped_storage()
        return found


def test_the_norm_of_a_narrow_gradient_takes_one_copy_of_a_piece() -> None:
    """Many, each below a norm that lives on, would leave holes of as many bytes as all of it in fp32 (docs/0054)."""
    flat = torch.full((16 * PIECE_ELEMENTS,), 0.5, dtype=torch.bfloat16)
    with _Memory() as memory:
        found = norm_of(flat)
    assert found.item() == pytest.approx(0.5 * math.sqrt(flat.numel()))
    assert 4 * PIECE_ELEMENTS <= sum(each.nbytes() for each in memory.of.values()) < 5 * PIECE_ELEMENTS


def test_what_is_held_on_nvme_is_read_and_measured_without_further_copies(rig: Rig) -> None:
    """A piece at a time in one place, and as fp32 straight to where it was asked for (docs/0054)."""
    gradient = rig.hold(FULL)
    held = rig.residency[FULL].held
    assert held is not None and held.memory is None
    held.norms.clear()
    with _Memory() as memory:
        found = rig.held.read(FULL)
    assert torch.equal(found, gradient)
    assert [each.nbytes() for each in memory.of.values()] == [found.nbytes]
    with _Memory() as memory:
        rig.held.norm(FULL, 2.0)
    assert sum(each.nbytes() for each in memory.of.values()) < PIECE_BYTES + 1024
