"""Parameters and optimizer states as a whole: what is written is read, wherever they live and however they moved."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lohan_fx.plan import OptimizerTiming, ParameterPlan, Plan, Tier, Windows
from lohan_fx.runtime import staging
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.slots import ParameterSlot, Residency
from lohan_fx.runtime.states import States
from tests.runtime.rig import CHUNK_ELEMENTS, FakeCudart, parameter

pytestmark = pytest.mark.usefixtures("leak_check")

CPU = torch.device("cpu")
HOMES = [(home, states_home) for home in Tier for states_home in (Tier.HOST, Tier.NVME)]
SLOTS = (
    parameter("long", 2 * CHUNK_ELEMENTS + 77, slot=0),
    parameter("half", 30, 11, slot=1, compute=torch.bfloat16),
    parameter("frozen", 9, slot=2, master=torch.float16, compute=torch.bfloat16, trainable=False),
    parameter("frozen as is", 9, slot=3, master=torch.bfloat16, compute=torch.bfloat16, trainable=False),
    parameter("scalar", slot=4),
    parameter("empty", 0, 3, slot=5),
)


class Rig:
    def __init__(self, store: NvmeStore, slots: tuple[ParameterSlot, ...] = SLOTS) -> None:
        self.store = store
        self.slots = {slot.slot: slot for slot in slots}
        self.residency = {slot: Residency() for slot in self.slots}
        self.states = States(store, self.slots, self.residency)
        self.states.chunk_elements = CHUNK_ELEMENTS
        for slot in slots:
            store.allocate(slot.extents(CHUNK_ELEMENTS), chunk_bytes=slot.chunk_bytes(CHUNK_ELEMENTS))

    def fill(self) -> None:
        for slot, found in self.slots.items():
            self.states.write_parameter(slot, self.value(slot))
            if found.trainable:
                self.states.write_moments(slot, *self.moments(slot))

    def value(self, slot: int) -> torch.Tensor:
        found = self.slots[slot]
        return torch.randn(found.shape, generator=torch.Generator().manual_seed(slot)).to(found.master_dtype)

    def moments(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.value(slot).float() + 1, self.value(slot).float() ** 2

    def streamed(self, slot: int) -> torch.Tensor:
        found = self.slots[slot]
        return self.states._read(found.streamed_extent, found.numel, found.compute_dtype).view(found.shape)

    def check(self) -> None:
        for slot, found in self.slots.items():
            value = self.states.read_parameter(slot)
            assert value.dtype == found.master_dtype and torch.equal(value, self.value(slot))
            resident = self.residency[slot]
            copy = self.streamed(slot) if resident.compute is None and found.numel else resident.compute
            if copy is not None:
                assert torch.equal(copy.view(found.shape), self.value(slot).to(found.compute_dtype))
            if found.trainable:
                for ours, expected in zip(self.states.read_moments(slot), self.moments(slot), strict=True):
                    assert ours.dtype == torch.float32 and torch.equal(ours, expected)

    def move(self, homes: dict[int, tuple[Tier, Tier]], device: torch.device = CPU) -> None:
        self.states.apply_homes(plan(*(planned(self.slots[slot], *home) for slot, home in homes.items())), device)


def planned(slot: ParameterSlot, home: Tier, states_home: Tier) -> ParameterPlan:
    return ParameterPlan(
        name=slot.name,
        layer="",
        numel=slot.numel,
        bytes=slot.compute_bytes,
        trainable=slot.trainable,
        home=home,
        states_home=states_home if slot.trainable else None,
        optimizer_runs=OptimizerTiming.IN_BACKWARD,
    )


def plan(*parameters: ParameterPlan) -> Plan:
    windows = Windows(0, 0, 0, CHUNK_ELEMENTS, 4096, 1, 2, 2, 0)
    return Plan("keep", "cpu", "float32", 1, 1, (), parameters, windows)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with NvmeStore([tmp_path]) as store:
        yield Rig(store)


def test_moments_are_zeros_before_anything_is_written(rig: Rig) -> None:
    for slot, found in rig.slots.items():
        if found.trainable:
            assert not any(moment.any() for moment in rig.states.read_moments(slot))


def test_what_is_written_is_read(rig: Rig) -> None:
    rig.fill()
    rig.check()


def test_what_is_read_is_the_callers(rig: Rig) -> None:
    rig.fill()
    for home in HOMES:
        rig.move(dict.fromkeys(rig.slots, home))
        for slot, found in rig.slots.items():
            rig.states.read_parameter(slot).zero_()
            if found.trainable:
                for moment in rig.states.read_moments(slot):
                    moment.zero_()
        rig.check()


@pytest.mark.parametrize("staging_pages", [1, 3])
def test_staging_smaller_than_a_parameter(staging_pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "REQUEST_BYTES", staging_pages * 4096)
    with NvmeStore([tmp_path]) as store:
        small = Rig(store)
        small.fill()
        small.check()
        for home in HOMES:
            small.move(dict.fromkeys(small.slots, home))
            small.check()


@pytest.mark.parametrize("second", HOMES, ids=str)
@pytest.mark.parametrize("first", HOMES, ids=str)
def test_moving_from_one_home_to_another(first: tuple[Tier, Tier], second: tuple[Tier, Tier], rig: Rig) -> None:
    rig.fill()
    for home in (first, second):
        rig.move(dict.fromkeys(rig.slots, home))
        for slot, found in rig.slots.items():
            resident = rig.residency[slot]
            assert (resident.compute is None) is (home[0] is Tier.NVME)
            assert resident.on_device is (home[0] is Tier.DEVICE)
            in_memory = found.trainable and home[1] is Tier.HOST
            assert {resident.master is None, resident.exp_avg is None, resident.exp_avg_sq is None} == {not in_memory}
        rig.check()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(st.dictionaries(st.sampled_from(range(len(SLOTS))), st.sampled_from(HOMES)), max_size=6),
    data=st.data(),
)
def test_any_moves_with_writes_between(
    moves: list[dict[int, tuple[Tier, Tier]]], data: st.DataObject, rig: Rig
) -> None:
    if not rig.store.bytes_written:
        rig.fill()
    for homes in moves:
        rig.move(homes)
        slot = data.draw(st.sampled_from(range(len(SLOTS))))
        rig.states.write_parameter(slot, torch.zeros(rig.slots[slot].shape))
        assert not rig.states.read_parameter(slot).any()
        rig.states.write_parameter(slot, rig.value(slot))
        if rig.slots[slot].trainable:
            rig.states.write_moments(slot, *rig.moments(slot))
        rig.check()


@pytest.mark.parametrize("states_home", [Tier.HOST, Tier.NVME])
def test_what_a_gpu_copies_from_host_memory_is_pinned(
    states_home: Tier, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    rig.fill()
    rig.move(dict.fromkeys(rig.slots, (Tier.HOST, states_home)), torch.device("cuda"))
    copied = {slot: rig.residency[slot].compute for slot, found in rig.slots.items() if found.numel}
    assert all(copy is not None and copy.data_ptr() in cudart.registered for copy in copied.values())
    assert len(cudart.registered) == len(rig.slots)
    rig.check()
    del copied
    rig.move(dict.fromkeys(rig.slots, (Tier.NVME, Tier.NVME)), torch.device("cuda"))
    assert not cudart.registered
    rig.check()


def test_an_update_in_memory_survives_the_move_to_the_store(rig: Rig) -> None:
    """As the optimizer leaves it: master and copy in memory changed, the store's own behind."""
    rig.fill()
    rig.move(dict.fromkeys(rig.slots, (Tier.DEVICE, Tier.HOST)))
    for slot, found in rig.slots.items():
        resident = rig.residency[slot]
        if found.trainable:
            assert resident.master is not None and resident.compute is not None
            resident.master.add_(1)
            if resident.compute is not resident.master:
                resident.compute.copy_(resident.master)
    expected = {slot: rig.states.read_parameter(slot) for slot in rig.slots}
    rig.move(dict.fromkeys(rig.slots, (Tier.NVME, Tier.NVME)))
    for slot, found in rig.slots.items():
        assert torch.equal(rig.states.read_parameter(slot), expected[slot])
        if found.numel:
            assert torch.equal(rig.streamed(slot), expected[slot].to(found.compute_dtype))


def test_states_that_cannot_be_moved_to_the_store_stay_in_memory(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.fill()
    rig.move({0: (Tier.DEVICE, Tier.HOST)})
    newer = rig.residency[0].master
    assert newer is not None
    newer.add_(1)  # as an update does
    expected = newer.clone()
    for fails_at in range(2):  # the master, then the first chunk of the moments
        calls, write = itertools.count(), rig.store.write

        def failing(*args: Any, calls: Any = calls, write: Any = write, fails_at: int = fails_at) -> None:
            if next(calls) == fails_at:
                raise OSError("I/O error")
            write(*args)

        with monkeypatch.context() as patched, pytest.raises(OSError, match="I/O error"):
            patched.setattr(rig.store, "write", failing)
            rig.move({0: (Tier.DEVICE, Tier.NVME)})
        assert torch.equal(rig.states.read_parameter(0).view(-1), expected)
        assert torch.equal(rig.states.read_moments(0)[0], rig.moments(0)[0])
    rig.move({0: (Tier.DEVICE, Tier.NVME)})
    assert rig.residency[0].master is None
    assert torch.equal(rig.states.read_parameter(0).view(-1), expected)


def test_parameters_that_a_plan_does_not_name_stay(rig: Rig) -> None:
    rig.fill()
    rig.move({0: (Tier.HOST, Tier.HOST)})
    rig.move({1: (Tier.DEVICE, Tier.HOST)})
    assert rig.residency[0].master is not None and rig.residency[1].master is not None
    assert rig.residency[2].compute is None
    rig.check()


def test_an_fp32_master_and_what_the_graph_sees_are_one(rig: Rig) -> None:
    rig.fill()
    rig.move(dict.fromkeys(rig.slots, (Tier.DEVICE, Tier.HOST)))
    assert rig.residency[0].compute is rig.residency[0].master
    assert rig.residency[1].compute is not rig.residency[1].master


def test_values_of_other_shapes_are_refused(rig: Rig) -> None:
    rig.fill()
    with pytest.raises(ValueError, match=r"parameter half has shape \(30, 11\); the value has \(11, 30\)"):
        rig.states.write_parameter(1, torch.zeros(11, 30))
    with pytest.raises(ValueError, match=r"exp_avg_sq of half has shape \(330,\); expected \(30, 11\)"):
        rig.states.write_moments(1, torch.zeros(30, 11), torch.zeros(330))
    rig.check()


def test_values_of_other_dtypes_and_strides_are_converted(rig: Rig) -> None:
    value = torch.randn(11, 30, dtype=torch.float64).t()
    rig.states.write_parameter(1, value)
    assert torch.equal(rig.states.read_parameter(1), value.float())
    assert torch.equal(rig.streamed(1), value.float().bfloat16())  # through the master's dtype, as an update does it


def test_a_slot_needs_what_its_kind_needs() -> None:
    needed = {slot.name: slot.extents(CHUNK_ELEMENTS) for slot in SLOTS}
    assert needed["half"] == {"half:master": 1320, "half:compute": 660, "half:moments": 8192}
    assert needed["frozen"] == {"frozen:master": 18, "frozen:compute": 18}
    assert needed["frozen as is"] == {"frozen as is:master": 18}
    assert needed["scalar"] == {"scalar:master": 4, "scalar:moments": 8192}
    assert needed["empty"] == {}
    chunks = SLOTS[0].chunks(CHUNK_ELEMENTS)
    assert [(chunk.start, chunk.elements) for chunk in chunks] == [(0, 4096), (4096, 4096), (8192, 77)]
    assert dataclasses.replace(SLOTS[0], shape=torch.Size([1])).chunks(CHUNK_ELEMENTS)[0].elements == 1


def test_ctrl_c_as_space_for_a_gradient_is_taken_leaves_it_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is raised once the store has the extent."""
    with NvmeStore([tmp_path]) as store:
        rig = Rig(store)

        def interrupted(*arguments: Any, **options: Any) -> None:
            NvmeStore.allocate(store, *arguments, **options)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(store, "allocate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                rig.states.allocate_gradient(1)
        rig.states.allocate_gradient(1)
        rig.states.write_gradient(1, 0, rig.value(1).reshape(-1))
        found = torch.empty(rig.slots[1].numel)
        rig.states.read_gradient(1, 0, found)
        assert torch.equal(found, rig.value(1).reshape(-1).float())
