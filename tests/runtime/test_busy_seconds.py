"""busy_seconds: what overlaps counts once, and compute's stalls do not count, wherever they lie."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lohan_fx.runtime.busy_seconds import busy_s, covered_s, uncovered_s, union
from lohan_fx.runtime.timeline import Event

STEP = [
    Event("compute", "forward", 100.0, 102.0),
    Event("compute", "wait:fetch of w", 100.5, 101.0),
    Event("ssd", "read w:compute", 100.0, 101.0),
    Event("ssd", "read b:compute", 100.5, 101.5),
    Event("compute", "backward", 102.0, 107.0),
    Event("compute", "wait:gradient window for w", 106.0, 106.25),
    Event("cpu", "wait: is no stall of this lane", 104.0, 107.5),
    Event("ssd", "write w:master", 107.0, 108.0),
]
intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair))))
times = st.floats(0, 100, allow_nan=False)


def test_busy_seconds_count_overlaps_once_and_compute_without_its_stalls() -> None:
    assert [busy_s(STEP, lane) for lane in ("ssd", "compute", "cpu", "h2d")] == [2.5, 6.25, 3.5, 0.0]


@pytest.mark.parametrize(
    ("begin_s", "end_s", "expected_s"), [(107.0, 109.0, 6.25), (108.0, 109.0, 6.25), (106.5, 109.0, 5.75)]
)
def test_stalls_count_as_far_as_they_lie_in_stages(begin_s: float, end_s: float, expected_s: float) -> None:
    assert busy_s([*STEP, Event("compute", "wait:update of w", begin_s, end_s)], "compute") == expected_s


@given(st.lists(st.tuples(times, times).map(lambda pair: (min(pair), max(pair)))), times)
def test_union_covers_the_same_moments_without_touching(intervals: list[tuple[float, float]], moment: float) -> None:
    merged = union(intervals)
    assert any(a <= moment <= b for a, b in merged) == any(a <= moment <= b for a, b in intervals)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))


@given(intervals, intervals)
def test_seconds_are_those_counted_one_by_one(work: list[tuple[int, int]], stalls: list[tuple[int, int]]) -> None:
    worked, waited = ([Event("compute", "", begin, end) for begin, end in of] for of in (work, stalls))
    at_work, waiting = ({second for begin, end in of for second in range(begin, end)} for of in (work, stalls))
    assert covered_s(worked) == len(at_work)
    assert uncovered_s(worked, waited) == len(at_work - waiting)
