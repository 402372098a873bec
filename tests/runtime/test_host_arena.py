"""The arena against a list of the places taken: none overlap, none is lost, and none is outside."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.runtime.host_arena import HostArena, Region
from lohan_fx.runtime.host_pool import PAGE_BYTES, HostPool, Reservation, page_padded_bytes

PAGES = 8


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 3 * PAGE_BYTES)), st.tuples(st.just("give"), st.integers(0, 20))
        ),
        max_size=40,
    )
)
def test_any_order_of_taking_and_giving_back(moves: list[tuple[str, int]]) -> None:
    with HostPool({"activations": Reservation(1, PAGES * PAGE_BYTES)}) as pool, pool.acquire("activations") as buffer:
        arena = HostArena(buffer.tensor)
        taken: list[Region] = []
        for move, number in moves:
            if move == "give" and taken:
                arena.give_back(taken.pop(number % len(taken)))
            elif move == "take":
                region = arena.take(number)
                if region is None:
                    assert largest_hole(taken) < page_padded_bytes(number)
                else:
                    assert region.tensor.numel() == number
                    assert region.tensor.data_ptr() == buffer.tensor.data_ptr() + region.offset
                    taken.append(region)
            places = sorted((region.offset, region.offset + region.padded_bytes) for region in taken)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
            assert all(0 <= start < end <= PAGES * PAGE_BYTES for start, end in places)
        for region in taken:
            arena.give_back(region)
        whole = arena.take(PAGES * PAGE_BYTES)  # all neighbours were merged again
        assert whole is not None
        assert arena.take(1) is None


def largest_hole(taken: list[Region]) -> int:
    ends = sorted((region.offset, region.offset + region.padded_bytes) for region in taken)
    starts = [start for start, _ in ends] + [PAGES * PAGE_BYTES]
    return max(start - end for start, end in zip(starts, [0] + [end for _, end in ends], strict=True))


def test_regions_do_not_share_memory() -> None:
    with HostPool({"activations": Reservation(1, PAGES * PAGE_BYTES)}) as pool, pool.acquire("activations") as buffer:
        arena = HostArena(buffer.tensor)
        regions = [arena.take(100) for _ in range(PAGES)]
        for number, region in enumerate(regions):
            assert region is not None
            region.tensor.fill_(number)
        assert [torch.unique(region.tensor).tolist() for region in regions if region] == [[n] for n in range(PAGES)]


def test_an_arena_of_nothing() -> None:
    assert HostArena(None).take(1) is None


def test_of_several_places_the_one_of_most_worth() -> None:
    arena = HostArena(torch.empty(6 * PAGE_BYTES, dtype=torch.uint8))
    regions = [arena.take(PAGE_BYTES) for _ in range(6)]
    for index in (0, 2, 4):
        region = regions[index]
        assert region is not None
        arena.give_back(region)
    asked: list[tuple[int, int]] = []

    def worth(offset: int, nbytes: int) -> int:
        asked.append((offset, nbytes))
        return offset

    most, first = arena.take(PAGE_BYTES - 1, worth), arena.take(PAGE_BYTES, lambda offset, nbytes: 1)
    assert most is not None and first is not None
    assert asked == [(place * PAGE_BYTES, PAGE_BYTES) for place in (0, 2, 4)]
    assert (most.offset, first.offset) == (4 * PAGE_BYTES, 0)
