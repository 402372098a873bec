"""Room: values lie in huge pages until nobody views them, in the heap where there are none, and give them back."""

from __future__ import annotations

import gc

import pytest
import torch

from lohan_fx.process_memory import resident_bytes
from lohan_fx.runtime.huge_pages import HUGE_PAGE_BYTES, PAGE_BYTES, map_memory
from lohan_fx.runtime.room import LEAST_BYTES, Room

ROOM_BYTES = 4 * HUGE_PAGE_BYTES


def room_of(nbytes: int) -> Room:
    made = Room()
    made.reserve(nbytes)
    return made


def inside(room: Room, value: torch.Tensor) -> bool:
    memory = room._arena._memory
    return memory is not None and 0 <= value.data_ptr() - memory.data_ptr() < memory.numel()


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_mapped_memory_is_zero_and_begins_on_a_huge_page_if_it_has_one(nbytes: int) -> None:
    region, begin = map_memory(nbytes)
    memory = torch.frombuffer(region, dtype=torch.uint8, count=nbytes, offset=begin)
    assert not memory.any()
    memory.fill_(7)
    assert memory.data_ptr() % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES) == 0


def test_a_value_has_its_shape_and_pages_of_its_own() -> None:
    room = room_of(ROOM_BYTES)
    value, memory = room.on_pages(torch.Size((300, 400)), torch.bfloat16)
    other, _ = room.on_pages(torch.Size((300, 400)), torch.bfloat16, (1, 300))
    assert value.shape == other.shape == (300, 400) and other.stride() == (1, 300)
    assert value.data_ptr() == memory.data_ptr() and value.data_ptr() % PAGE_BYTES == 0
    assert memory.numel() % PAGE_BYTES == 0 and memory.numel() >= value.nbytes
    other.fill_(3)
    memory.fill_(0)
    assert not value.any() and other.eq(3).all()
    assert inside(room, value) and inside(room, other)


def test_where_it_is_full_the_heap_takes_values() -> None:
    room = room_of(ROOM_BYTES)
    values = [room.on_pages(torch.Size((HUGE_PAGE_BYTES,)), torch.uint8)[0] for _ in range(5)]
    assert [inside(room, value) for value in values] == [True] * 4 + [False]


def test_the_place_of_a_dead_value_is_anothers() -> None:
    room = room_of(ROOM_BYTES)
    for _ in range(100):
        value, memory = room.on_pages(torch.Size((ROOM_BYTES // 2,)), torch.bfloat16)
        part = value[5:]
        assert inside(room, value)
        del value, memory
        gc.collect()
        other, _ = room.on_pages(torch.Size((ROOM_BYTES // 2,)), torch.bfloat16)
        assert not inside(room, other), "a view of the first one still lives"
        del other, part


def value_in(room: Room, pages: float) -> torch.Tensor:
    value = room.on_pages(torch.Size((int(pages * HUGE_PAGE_BYTES),)), torch.uint8)[0]
    assert inside(room, value)
    return value


def test_what_is_in_ram_is_taken_first_and_nothing_grows_by_it() -> None:
    room = room_of(8 * HUGE_PAGE_BYTES)
    assert room.growth_bytes(HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES
    first, second, third = (value_in(room, 2) for _ in range(3))
    begin = first.data_ptr()
    del first, third
    gc.collect()
    assert room.growth_bytes(2 * HUGE_PAGE_BYTES) == 0
    assert room.growth_bytes(3 * HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES
    room.return_free_memory()
    assert room.growth_bytes(2 * HUGE_PAGE_BYTES) == 2 * HUGE_PAGE_BYTES
    again = value_in(room, 1)
    del again
    gc.collect()
    assert room.growth_bytes(HUGE_PAGE_BYTES) == 0 < room.growth_bytes(2 * HUGE_PAGE_BYTES)
    behind = value_in(room, 2), value_in(room, 1.5)  # of two holes the first is half in RAM, the second not at all
    assert behind[0].data_ptr() == begin
    del behind
    gc.collect()
    room.close()
    assert room.growth_bytes(HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES  # of the heap
    del second


def test_what_is_being_read_into_new_pages_is_coming_until_it_has_arrived_or_died() -> None:
    room = room_of(8 * HUGE_PAGE_BYTES)
    first, second = value_in(room, 2), value_in(room, 1)
    assert room.coming_bytes() == 3 * HUGE_PAGE_BYTES
    for _ in range(4):
        before = room.coming_bytes()
        room.arrived(first.data_ptr(), HUGE_PAGE_BYTES // 2)
        assert room.coming_bytes() == before - HUGE_PAGE_BYTES // 2
    room.arrived(first.data_ptr(), HUGE_PAGE_BYTES)  # of nothing that is coming
    assert room.coming_bytes() == HUGE_PAGE_BYTES
    begin = first.data_ptr()
    del first, second  # whose read has failed
    gc.collect()
    third = value_in(room, 2)
    assert third.data_ptr() == begin and room.coming_bytes() == 0, "its pages are in RAM"
    made = room.dense(torch.Size((2 * HUGE_PAGE_BYTES,)), (1,), torch.uint8)
    assert inside(room, made) and room.coming_bytes() == 0, "nobody reads it from anywhere"


def test_what_it_would_give_back_is_known() -> None:
    room = room_of(8 * HUGE_PAGE_BYTES)
    assert room.free_bytes() == 0, "nothing was touched"
    first, second, third = value_in(room, 2), value_in(room, 1.5), value_in(room, 1)
    assert room.free_bytes() == 0
    del first
    assert room.free_bytes() == 2 * HUGE_PAGE_BYTES
    del second
    assert room.free_bytes() == 3 * HUGE_PAGE_BYTES, "the third one has the other half of a page"
    room.return_free_memory()
    assert room.free_bytes() == 0
    again = value_in(room, 1)
    assert room.free_bytes() == 0
    del again
    assert room.free_bytes() == HUGE_PAGE_BYTES
    del third
    room.close()
    assert room.free_bytes() == 0


def test_what_is_in_ram_where_there_is_no_room_keeps_nothing_from_growing() -> None:
    room = room_of(8 * HUGE_PAGE_BYTES)
    small, between, _ = value_in(room, 1), value_in(room, 1), value_in(room, 1)
    large = value_in(room, 3)
    begin = large.data_ptr()
    del small, large
    gc.collect()
    assert room.growth_bytes(HUGE_PAGE_BYTES) == 0
    again = value_in(room, 0.5)  # of two holes in RAM the first
    assert again.data_ptr() < between.data_ptr()
    assert room.growth_bytes(4 * HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES
    before = room.coming_bytes()
    larger = value_in(room, 4)
    assert larger.data_ptr() == begin and room.coming_bytes() == before + HUGE_PAGE_BYTES
    del again, larger


def test_where_it_is_full_the_heap_grows() -> None:
    room = room_of(ROOM_BYTES)
    values = [value_in(room, 1) for _ in range(4)]
    assert room.growth_bytes(HUGE_PAGE_BYTES) == HUGE_PAGE_BYTES
    values.clear()
    gc.collect()
    assert room.growth_bytes(HUGE_PAGE_BYTES) == 0


@pytest.mark.parametrize("room_bytes", [0, ROOM_BYTES])
def test_small_values_are_the_heaps(room_bytes: int) -> None:
    room = room_of(room_bytes)
    value, _ = room.on_pages(torch.Size((LEAST_BYTES // 8,)), torch.float32)
    assert value.data_ptr() % PAGE_BYTES == 0 and not inside(room, value)


def test_what_lives_outlives_the_room() -> None:
    room = room_of(ROOM_BYTES)
    value, _ = room.on_pages(torch.Size((HUGE_PAGE_BYTES,)), torch.uint8)
    value.fill_(9)
    room.close()
    again, _ = room.on_pages(torch.Size((HUGE_PAGE_BYTES,)), torch.uint8)
    del room
    gc.collect()
    again.fill_(1)
    assert value.eq(9).all()


def test_pages_that_no_value_lies_in_go_back() -> None:
    room = room_of(8 * HUGE_PAGE_BYTES)
    assert room.place() == (0, 0)  # nothing is there before the first value
    kept, dies = (room.on_pages(torch.Size([3 * HUGE_PAGE_BYTES]), torch.uint8)[0] for _ in range(2))
    address, nbytes = room.place()
    assert nbytes >= 8 * HUGE_PAGE_BYTES
    kept.fill_(1)
    dies.fill_(2)
    assert resident_bytes(address, nbytes) == 6 * HUGE_PAGE_BYTES
    del dies
    room.return_free_memory()
    assert resident_bytes(address, nbytes) == 3 * HUGE_PAGE_BYTES
    assert kept.eq(1).all()
    del kept
    room.return_free_memory()
    assert resident_bytes(address, nbytes) == 0
    again = room.on_pages(torch.Size([HUGE_PAGE_BYTES]), torch.uint8)[0]
    assert again.data_ptr() == address
    room.close()
    room.return_free_memory()
    assert room.place() == (0, 0)


def test_what_outlives_a_graph_has_a_place_until_it_dies() -> None:
    room = room_of(2 * HUGE_PAGE_BYTES)
    value = torch.empty(300, 400, dtype=torch.bfloat16, device="meta").t()
    made = [room.dense(value.shape, value.stride(), value.dtype) for _ in range(3)]
    address, nbytes = room.place()
    assert nbytes >= 2 * HUGE_PAGE_BYTES
    for one in made:
        assert one.shape == value.shape and one.stride() == value.stride() and one.dtype is value.dtype
        assert address <= one.data_ptr() < address + nbytes
        assert one.untyped_storage().nbytes() == one.nbytes  # it is whole: a gradient may be held as it is
        one.fill_(1)
    kept, taken = made[0], made[1].data_ptr()
    del made, one
    assert room.dense(value.shape, value.stride(), value.dtype).data_ptr() == taken  # the place of one that has died
    assert kept.eq(1).all()


def test_what_it_has_no_room_for_lies_in_the_heap() -> None:
    room = room_of(HUGE_PAGE_BYTES)
    value = torch.empty(HUGE_PAGE_BYTES, dtype=torch.float32, device="meta")
    made = room.dense(value.shape, value.stride(), value.dtype)
    assert made.shape == value.shape and not inside(room, made)


def test_it_grows_once_nothing_lives_in_it() -> None:
    room = room_of(HUGE_PAGE_BYTES)
    first = room.on_pages(torch.Size([HUGE_PAGE_BYTES]), torch.uint8)[0]
    first.fill_(7)
    before = room.place()
    room.reserve(ROOM_BYTES)
    room.reserve(PAGE_BYTES)  # by another graph, which needs less
    assert not inside(room, room.on_pages(torch.Size([ROOM_BYTES]), torch.uint8)[0])
    assert room.place() == before and first.eq(7).all()
    del first
    assert inside(room, room.on_pages(torch.Size([ROOM_BYTES]), torch.uint8)[0])
    assert room.place()[1] >= ROOM_BYTES
