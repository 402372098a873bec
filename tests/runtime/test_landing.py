"""Landing: values read in place lie on pages of their own, in huge ones where there is room, and give it back."""

from __future__ import annotations

import gc

import pytest
import torch

from lohan_fx.process_memory import resident_bytes
from lohan_fx.runtime.huge_pages import HUGE_PAGE_BYTES, PAGE_BYTES, map_memory
from lohan_fx.runtime.landing import LEAST_BYTES, Landing

ROOM_BYTES = 4 * HUGE_PAGE_BYTES


def inside(landing: Landing, value: torch.Tensor) -> bool:
    memory = landing._arena._memory
    return memory is not None and 0 <= value.data_ptr() - memory.data_ptr() < memory.numel()


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_mapped_memory_is_zero_and_begins_on_a_huge_page_if_it_has_one(nbytes: int) -> None:
    region, begin = map_memory(nbytes)
    memory = torch.frombuffer(region, dtype=torch.uint8, count=nbytes, offset=begin)
    assert not memory.any()
    memory.fill_(7)
    assert memory.data_ptr() % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES) == 0


def test_a_value_has_its_shape_and_pages_of_its_own() -> None:
    landing = Landing(ROOM_BYTES)
    value, memory = landing.on_pages(torch.Size((300, 400)), torch.bfloat16)
    other, _ = landing.on_pages(torch.Size((300, 400)), torch.bfloat16, (1, 300))
    assert value.shape == other.shape == (300, 400) and other.stride() == (1, 300)
    assert value.data_ptr() == memory.data_ptr() and value.data_ptr() % PAGE_BYTES == 0
    assert memory.numel() % PAGE_BYTES == 0 and memory.numel() >= value.nbytes
    other.fill_(3)
    memory.fill_(0)
    assert not value.any() and other.eq(3).all()
    assert inside(landing, value) and inside(landing, other)


def test_where_it_is_full_the_heap_takes_values() -> None:
    landing = Landing(ROOM_BYTES)
    values = [landing.on_pages(torch.Size((HUGE_PAGE_BYTES,)), torch.uint8)[0] for _ in range(5)]
    assert [inside(landing, value) for value in values] == [True] * 4 + [False]


def test_the_place_of_a_dead_value_is_anothers() -> None:
    landing = Landing(ROOM_BYTES)
    for _ in range(100):
        value, memory = landing.on_pages(torch.Size((ROOM_BYTES // 2,)), torch.bfloat16)
        part = value[5:]
        assert inside(landing, value)
        del value, memory
        gc.collect()
        other, _ = landing.on_pages(torch.Size((ROOM_BYTES // 2,)), torch.bfloat16)
        assert not inside(landing, other), "a view of the first one still lives"
        del other, part


@pytest.mark.parametrize("room_bytes", [0, ROOM_BYTES])
def test_small_values_are_the_heaps(room_bytes: int) -> None:
    landing = Landing(room_bytes)
    value, _ = landing.on_pages(torch.Size((LEAST_BYTES // 8,)), torch.float32)
    assert value.data_ptr() % PAGE_BYTES == 0 and not inside(landing, value)


def test_what_lives_outlives_the_landing() -> None:
    landing = Landing(ROOM_BYTES)
    value, _ = landing.on_pages(torch.Size((HUGE_PAGE_BYTES,)), torch.uint8)
    value.fill_(9)
    landing.close()
    again, _ = landing.on_pages(torch.Size((HUGE_PAGE_BYTES,)), torch.uint8)
    del landing
    gc.collect()
    again.fill_(1)
    assert value.eq(9).all()


def test_pages_that_no_value_lies_in_go_back() -> None:
    landing = Landing(8 * HUGE_PAGE_BYTES)
    address, nbytes = landing.place()
    assert nbytes == 8 * HUGE_PAGE_BYTES
    kept, dies = (landing.on_pages(torch.Size([3 * HUGE_PAGE_BYTES]), torch.uint8)[0] for _ in range(2))
    kept.fill_(1)
    dies.fill_(2)
    assert resident_bytes(address, nbytes) == 6 * HUGE_PAGE_BYTES
    del dies
    landing.return_free_memory()
    assert resident_bytes(address, nbytes) == 3 * HUGE_PAGE_BYTES
    assert kept.eq(1).all()
    del kept
    landing.return_free_memory()
    assert resident_bytes(address, nbytes) == 0
    again = landing.on_pages(torch.Size([HUGE_PAGE_BYTES]), torch.uint8)[0]
    assert again.data_ptr() == address
    landing.close()
    landing.return_free_memory()
    assert landing.place() == (0, 0)
    assert Landing(0).place() == (0, 0)
