"""Striping: every byte has one place, in proportion to the weights, the same each time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.runtime.striping import Piece, most_bytes, parts_between, stripe_extent

PAGE = 4096


def test_one_file_gets_one_piece() -> None:
    assert stripe_extent(10 * PAGE, 2 * PAGE, [1.0], [3 * PAGE]) == (Piece(0, 10 * PAGE, 0, 3 * PAGE),)


def test_nothing_has_no_piece() -> None:
    assert stripe_extent(0, PAGE, [1.0], [0]) == ()


def test_weights_share_the_bytes() -> None:
    ends = [0, 0, 0]
    stripe_extent(1000 * PAGE, PAGE, [1.0, 2.0, 5.0], ends)
    assert sum(ends) == 1000 * PAGE
    assert ends == pytest.approx([125 * PAGE, 250 * PAGE, 625 * PAGE], abs=2 * PAGE)


def test_small_extents_spread_too() -> None:
    ends = [0, 0]
    for _ in range(6):
        stripe_extent(PAGE, 4 * PAGE, [1.0, 1.0], ends)
    assert ends == [3 * PAGE, 3 * PAGE]


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    stripe=st.integers(1, 5),
    weights=st.lists(st.floats(0.1, 10.0), min_size=1, max_size=3),
)
def test_extents_tile_their_files_without_gap_or_overlap(sizes: list[int], stripe: int, weights: list[float]) -> None:
    ends = [0] * len(weights)
    extents = [stripe_extent(size * PAGE, stripe * PAGE, weights, ends) for size in sizes]
    used: list[set[int]] = [set() for _ in weights]
    for size, pieces in zip(sizes, extents, strict=True):
        assert [piece.start_bytes for piece in pieces] == [
            sum(piece.nbytes for piece in pieces[:i]) for i in range(len(pieces))
        ]
        assert sum(piece.nbytes for piece in pieces) == size * PAGE
        for piece in pieces:
            pages = set(range(piece.file_offset_bytes // PAGE, (piece.file_offset_bytes + piece.nbytes) // PAGE))
            assert not pages & used[piece.file_index]
            used[piece.file_index] |= pages
    assert used == [set(range(end // PAGE)) for end in ends]
    again = [0] * len(weights)
    assert [stripe_extent(size * PAGE, stripe * PAGE, weights, again) for size in sizes] == extents


@given(files=st.lists(st.tuples(st.integers(50, 300), st.floats(1.0, 4.0)), min_size=1, max_size=4))
def test_the_most_bytes_are_there_when_the_first_file_is_full(files: list[tuple[int, float]]) -> None:
    room, weights = [pages * PAGE for pages, _ in files], [weight for _, weight in files]
    ends = [0] * len(files)
    while all(end <= most for end, most in zip(ends, room, strict=True)):
        stripe_extent(PAGE, PAGE, weights, ends)
    found, first = most_bytes(room, weights)
    assert found == pytest.approx(sum(ends), abs=PAGE * (len(files) + sum(weights) / min(weights)))
    assert ends[first] == pytest.approx(room[first], abs=PAGE * (1 + weights[first] / min(weights)))


@given(size=st.integers(1, 40), stripe=st.integers(1, 5), files=st.integers(1, 3), data=st.data())
def test_parts_are_the_range_page_by_page(size: int, stripe: int, files: int, data: st.DataObject) -> None:
    pieces = stripe_extent(size * PAGE, stripe * PAGE, [1.0] * files, [0] * files)
    place = {
        piece.start_bytes + at: (piece.file_index, piece.file_offset_bytes + at)
        for piece in pieces
        for at in range(0, piece.nbytes, PAGE)
    }
    start = data.draw(st.integers(0, size)) * PAGE
    end = data.draw(st.integers(start // PAGE, size)) * PAGE
    found = {
        part.start_bytes + at: (part.file_index, part.file_offset_bytes + at)
        for part in parts_between(pieces, start, end)
        for at in range(0, part.end_bytes - part.start_bytes, PAGE)
    }
    assert found == {at: place[at] for at in range(start, end, PAGE)}
