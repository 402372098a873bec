"""States in memory that a checkpoint needs in the store: all of them, by several requests at a time, once."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

from lohan_fx.errors import StoreError
from lohan_fx.plan import Tier
from lohan_fx.runtime.slots import Residency
from lohan_fx.runtime.write_back import _begin, _begin_in, write_back
from tests.runtime.faulty_backend import FaultyBackend
from tests.runtime.rig import CHUNK_ELEMENTS, machine
from tests.runtime.test_generations import flip
from tests.runtime.test_in_time import interrupted_at, lines_of
from tests.runtime.test_states import SLOTS, Rig

pytestmark = pytest.mark.usefixtures("leak_check")

TRAINED = [slot for slot in SLOTS if slot.trainable and slot.numel]


def changed_in_memory(rig: Rig) -> None:
    """All states in memory, where they are newer than in the store."""
    for slot, found in rig.slots.items():
        rig.states.write_parameter(slot, rig.value(slot) + found.trainable)
        if found.trainable:
            rig.states.write_moments(slot, *(moment + 1 for moment in rig.moments(slot)))
    rig.move({slot.slot: (Tier.NVME, Tier.HOST) for slot in SLOTS})
    for slot in TRAINED:
        resident = rig.residency[slot.slot]
        assert resident.master is not None and resident.exp_avg is not None and resident.exp_avg_sq is not None
        for state in (resident.master, resident.exp_avg, resident.exp_avg_sq):
            state.sub_(1)


@pytest.mark.parametrize("buffers", [1, 2, 8])
def test_all_states_are_in_the_store_afterwards(buffers: int, directory: Path) -> None:
    with machine(directory, buffers=buffers) as made:
        rig = Rig(made.store)
        changed_in_memory(rig)
        written_bytes = made.store.bytes_written
        write_back(made, rig.slots, rig.residency)
        expected = sum(3 * chunk.padded_bytes for slot in TRAINED for chunk in slot.chunks(CHUNK_ELEMENTS))
        assert made.store.bytes_written - written_bytes == expected == rig.states.written_back_bytes()
        in_memory = {slot: vars(resident).copy() for slot, resident in rig.residency.items()}
        for slot, found in rig.slots.items():
            vars(rig.residency[slot]).update(vars(Residency()))
            assert rig.states.read_parameter(slot).equal(
                in_memory[slot]["master"].view(found.shape) if found in TRAINED else rig.value(slot)
            )
            if found in TRAINED:
                for moment, name in zip(rig.states.read_moments(slot), ("exp_avg", "exp_avg_sq"), strict=True):
                    assert moment.equal(in_memory[slot][name].view(found.shape))


def test_it_is_summed_in_memory(directory: Path) -> None:
    """What the drive changes of it afterwards, the next read notices."""
    with machine(directory) as made:
        store = made.store
        store.keep_generations(1)
        rig = Rig(store)
        changed_in_memory(rig)
        for number, slot in enumerate(TRAINED):
            write_back(made, rig.slots, rig.residency)
            assert store._generations is not None
            versions = store._generations.versions(slot.moments_extent)
            last = len(versions.sums) - 1
            (piece,) = versions.pieces(last)
            place = piece.file_offset_bytes + versions.span_of(last).start + 5
            flip(directory, place)
            with pytest.raises(StoreError, match=rf"reading back '{slot.moments_extent}'.*damaged"):
                store.commit({}, verify=True)
            flip(directory, place)
            assert store.commit({}, verify=True) == number + 1


def test_several_requests_are_under_way_at_a_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(directory) as made:
        rig = Rig(made.store)
        changed_in_memory(rig)
        write, met = made.store.write, threading.Barrier(2, timeout=60.0)

        def written(*args: Any) -> None:
            met.wait()  # for another one; there is an even number
            write(*args)

        monkeypatch.setattr(made.store, "write", written)
        write_back(made, rig.slots, rig.residency)


@pytest.mark.parametrize("earlier", [0, 3])
def test_a_write_that_fails_is_raised_and_can_be_made_up_for(earlier: int, directory: Path) -> None:
    backend = FaultyBackend()
    with machine(directory, backend) as made:
        made.store.keep_generations(1)
        rig = Rig(made.store)
        changed_in_memory(rig)
        backend.faults["pwritev"] = [None] * earlier + [errno.EIO]
        with pytest.raises(StoreError, match=r"writing .* of extent '.*:(master|moments)'"):
            write_back(made, rig.slots, rig.residency)
        assert all(made.pool.in_use(purpose) == 0 for purpose in ("optimizer", "small"))
        with pytest.raises(StoreError, match=r"a write to .* failed"):
            made.store.commit({})
        write_back(made, rig.slots, rig.residency)
        assert made.store.commit({}, verify=True) == 1


def test_ctrl_c_loses_no_buffer(directory: Path) -> None:
    """The next step would wait for it."""
    with machine(directory) as made:
        made.store.keep_generations(1)
        rig = Rig(made.store)
        changed_in_memory(rig)
        codes = write_back.__code__, _begin.__code__, _begin_in.__code__
        for code, line in itertools.chain(*(zip(itertools.repeat(code), lines_of(code)) for code in codes)):
            with interrupted_at(code, line), contextlib.suppress(KeyboardInterrupt):
                write_back(made, rig.slots, rig.residency)
            made.drain(60.0)
            assert all(made.pool.in_use(purpose) == 0 for purpose in ("optimizer", "small")), f"{code.co_name}:{line}"
        write_back(made, rig.slots, rig.residency)
        assert made.store.commit({}, verify=True) == 1
