"""workspace: one graph at a time, resident when used, and gone when given back; room for what outlives a graph."""

from __future__ import annotations

import threading

import torch

from lohan_fx.process_memory import resident_bytes
from lohan_fx.runtime.workspace import Room, Workspace

MIB = 1 << 20


def test_one_borrower_at_a_time() -> None:
    workspace = Workspace()
    with workspace.borrowed(MIB) as memory:
        assert memory is not None and memory.numel() == MIB and memory.dtype is torch.uint8
        with workspace.borrowed(MIB) as second:
            assert second is None
        beside: list[object] = []

        def borrow() -> None:
            with workspace.borrowed(MIB) as third:
                beside.append(third)

        thread = threading.Thread(target=borrow)
        thread.start()
        thread.join(10)
        assert beside == [None]
    with workspace.borrowed(MIB) as again:
        assert again is memory


def test_it_is_handed_on_after_an_error() -> None:
    workspace = Workspace()
    try:
        with workspace.borrowed(MIB):
            raise RuntimeError
    except RuntimeError:
        pass
    with workspace.borrowed(MIB) as memory:
        assert memory is not None


def test_all_of_it_is_resident_until_it_is_given_back() -> None:
    workspace = Workspace()
    with workspace.borrowed(5 * MIB) as memory:
        assert memory is not None
        workspace.give_back()  # a graph has it: nothing happens
        address, nbytes = workspace.place()
        assert nbytes == 5 * MIB and resident_bytes(address, nbytes) == nbytes
    workspace.give_back()
    assert workspace.place() == (0, 0)
    assert resident_bytes(address, nbytes) == 0
    assert not memory.any()  # what still views it is safe, and reads zeros


def test_another_size_takes_the_place_of_the_one_before() -> None:
    workspace = Workspace()
    with workspace.borrowed(4 * MIB) as first:
        assert first is not None
        address, nbytes = workspace.place()
    with workspace.borrowed(2 * MIB) as second:
        assert second is not None and second.numel() == 2 * MIB
    assert resident_bytes(address, nbytes) < nbytes or second.data_ptr() == first.data_ptr()


def test_made_in_inference_mode_it_serves_training() -> None:
    workspace = Workspace()
    with torch.inference_mode(), workspace.borrowed(MIB) as memory:
        assert memory is not None and not memory.is_inference()


def test_nothing_takes_nothing() -> None:
    workspace = Workspace()
    for _ in range(2):
        with workspace.borrowed(0) as memory:
            assert memory is not None and memory.numel() == 0
    assert workspace.place() == (0, 0)


def test_what_outlives_a_graph_has_a_place_until_it_dies() -> None:
    room = Room()
    room.reserve(4 * MIB)
    value = torch.empty(300, 400, dtype=torch.bfloat16, device="meta").t()
    made = [room.like(value) for _ in range(3)]
    address, nbytes = room.place()
    assert nbytes >= 4 * MIB
    for one in made:
        assert one.shape == value.shape and one.stride() == value.stride() and one.dtype is value.dtype
        assert address <= one.data_ptr() < address + nbytes
        assert one.untyped_storage().nbytes() == one.nbytes  # it is whole: a gradient may be held as it is
        one.fill_(1)
    kept, taken = made[0], made[1].data_ptr()
    del made, one
    assert room.like(value).data_ptr() == taken  # the place of one that has died
    assert kept.eq(1).all()


def test_what_it_has_no_room_for_lies_in_the_heap() -> None:
    room = Room()
    room.reserve(MIB)
    value = torch.empty(MIB, dtype=torch.float32, device="meta")
    made = room.like(value)
    address, nbytes = room.place()
    assert made.shape == value.shape and not address <= made.data_ptr() < address + nbytes


def test_room_gives_back_what_is_free() -> None:
    room = Room()
    room.reserve(16 * MIB)
    kept, other = (room.like(torch.empty(6 * MIB, dtype=torch.uint8, device="meta")).fill_(1) for _ in range(2))
    address, nbytes = room.place()
    before = resident_bytes(address, nbytes)
    del other
    room.return_free_memory()
    assert resident_bytes(address, nbytes) <= before - 4 * MIB
    assert kept.eq(1).all()


def test_a_value_survives_the_room() -> None:
    room = Room()
    room.reserve(4 * MIB)
    kept = room.like(torch.empty(MIB, dtype=torch.uint8, device="meta")).fill_(3)
    room.close()
    assert room.place() == (0, 0) and kept.eq(3).all()
