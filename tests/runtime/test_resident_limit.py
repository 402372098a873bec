"""ResidentLimit: asks for memory back only above the limit, and not again and again in vain."""

from __future__ import annotations

import os

import pytest

from lohan_fx import ops, process_memory
from lohan_fx.runtime import resident_limit
from lohan_fx.runtime.resident_limit import IN_VAIN_BYTES, STEP_BYTES, ResidentLimit, Rise, resident_bytes

FETCHED, LEAVES = (ops.FETCH, 7), (ops.OFFLOAD_GRAD, 7)
"""The same parameter: as it comes, and as its gradient goes."""
LIMIT = 1 << 30


def test_it_asks_above_the_limit_and_again_only_after_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [LIMIT]
    asked: list[int] = []

    def give_back() -> None:
        asked.append(now[0])
        now[0] -= 1 << 20

    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: now[0])
    limit = ResidentLimit(LIMIT, give_back)
    for resident in (LIMIT, LIMIT + (4 << 20), LIMIT + STEP_BYTES, LIMIT + STEP_BYTES + (4 << 20), LIMIT):
        now[0] = resident
        limit.look(None)
    assert asked == [LIMIT + (4 << 20), LIMIT + STEP_BYTES + (4 << 20)]


class Heap:
    """Bytes in use, holes, and how often they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.holes, self.asked = LIMIT, 0, 0
        monkeypatch.setattr(resident_limit, "resident_bytes", lambda: self.used + self.holes)
        self.limit = ResidentLimit(LIMIT, self._give_back)

    def _give_back(self) -> None:
        self.asked += 1
        self.holes = 0

    def looks(self, *, used: int = 0, holes: int = 0, times: int) -> int:
        """Grow by so much ``times`` times, with a look after each; how often holes were asked for."""
        before = self.asked
        for _ in range(times):
            self.used, self.holes = self.used + used, self.holes + holes
            self.limit.look(None)
        return self.asked - before


def test_it_asks_ever_more_rarely_where_the_limit_is_passed_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    assert heap.looks(used=1 << 20, times=1024) == 7, "at 1, 17, 50, 115, 244, 501 and 1014 MiB"


def test_what_helps_is_asked_for_at_every_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap.looks(used=1 << 20, times=64)
    heap.looks(holes=1 << 20, times=64)
    assert heap.holes < STEP_BYTES
    before = heap.asked
    for _ in range(512):
        heap.looks(holes=1 << 20, times=1)
        assert heap.holes <= STEP_BYTES
    assert heap.asked - before == 512 // 17


@pytest.mark.parametrize("beyond", [0, 20 << 20, 100 << 20, 500 << 20])
def test_holes_stay_below_what_is_beyond_the_limit(monkeypatch: pytest.MonkeyPatch, beyond: int) -> None:
    heap = Heap(monkeypatch)
    heap.looks(used=1 << 20, times=beyond >> 20)
    for _ in range(1024):
        heap.looks(holes=1 << 20, times=1)
        assert heap.holes <= beyond + STEP_BYTES


@pytest.mark.parametrize("beyond", [1 << 20, STEP_BYTES // 2, STEP_BYTES - 1])
def test_in_vain_or_not_it_asks_before_a_step_beyond_the_limit_is_passed(
    monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    heap = Heap(monkeypatch)
    assert heap.looks(used=beyond, times=1) == 1, "in vain"
    for _ in range(64):
        heap.looks(holes=1 << 20, times=1)
        assert heap.used + heap.holes <= LIMIT + STEP_BYTES


def test_below_the_limit_the_first_step_counts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap.looks(used=1 << 20, times=200)
    heap.used = LIMIT - (1 << 20)
    heap.looks(times=1)
    heap.used = LIMIT + (245 << 20)
    assert heap.looks(times=1) == 1
    assert heap.looks(used=1 << 20, times=STEP_BYTES >> 20) == 0
    assert heap.looks(used=1 << 20, times=1) == 1


def test_having_been_far_beyond_the_limit_once_is_no_leave_to_pass_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap.looks(used=1 << 20, times=200)
    heap.used = LIMIT - (1 << 20)
    heap.looks(times=1)
    for _ in range(64):
        heap.looks(holes=1 << 20, times=1)
        assert heap.used + heap.holes <= LIMIT + STEP_BYTES


def test_what_comes_until_the_next_look_counts_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [LIMIT // 2]
    asked: list[int] = []
    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: now[0])
    limit = ResidentLimit(LIMIT, lambda: asked.append(now[0]))
    limit.begin(
        {None: Rise(LIMIT // 4, LIMIT // 8, LIMIT // 8), FETCHED: Rise(0, LIMIT // 4, 0), LEAVES: Rise(LIMIT, 0, 0)}
    )
    assert asked == []
    limit.look(FETCHED)
    assert asked == []
    limit.look(LEAVES)
    assert asked == [LIMIT // 2]
    limit.look(LEAVES)
    assert asked == [LIMIT // 2], "nothing came back: not again before there is more"
    now[0] += 2 * STEP_BYTES
    limit.look(FETCHED)
    assert len(asked) == 1
    limit.look(LEAVES)
    assert len(asked) == 2
    ResidentLimit(LIMIT, lambda: asked.append(0)).begin({None: Rise(LIMIT, 0, 0)})
    assert asked[2:] == [0]


def test_what_has_memory_already_does_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now, in_ram, asked, found = [LIMIT - 10], [0], list[int](), list[Rise]()
    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: now[0])

    def growth_bytes(rise: Rise) -> int:
        found.append(rise)
        return sum(rise) - in_ram[0]

    limit = ResidentLimit(LIMIT, lambda: asked.append(now[0]), growth_bytes)
    limit.begin({None: Rise(1, 2, 3), FETCHED: Rise(10, 20, 30), LEAVES: Rise(10, 20, 31)})
    assert not found, "nobody asks below the limit"
    in_ram[0] = 50
    limit.look(FETCHED)
    assert found == [Rise(10, 20, 30)] and not asked
    limit.look(LEAVES)
    assert asked == [LIMIT - 10]


def test_what_was_asked_for_earlier_and_has_not_arrived_counts_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now, coming, asked = LIMIT - 10, [10], list[int]()
    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: now)
    limit = ResidentLimit(LIMIT, lambda: asked.append(coming[0]), coming_bytes=lambda: coming[0])
    limit.look(FETCHED)
    assert not asked
    coming[0] = 11
    limit.look(FETCHED)
    assert asked == [11]


PROMISE = LIMIT + 3 * STEP_BYTES
NEAR = PROMISE - IN_VAIN_BYTES


class Values:
    """A process near its promise: what is in use, and what is free in rooms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used, self.free, self.asked = LIMIT, 0, 0
        monkeypatch.setattr(resident_limit, "resident_bytes", lambda: self.used + self.free)
        self.limit = ResidentLimit(
            LIMIT, self._give_back, self._growth_bytes, promise_bytes=PROMISE, free_bytes=lambda: self.free
        )

    def _give_back(self) -> None:
        self.asked += 1
        self.free = 0

    def _growth_bytes(self, rise: Rise) -> int:
        return max(0, sum(rise) - self.free)

    def looks(self, at: ops.Look = None) -> bool:
        """Whether that look asked."""
        before = self.asked
        self.limit.look(at)
        return self.asked > before


def test_what_a_large_value_took_is_given_back_once_it_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rise counted as taken when it was asked last, which is no leave to keep it beside what comes next."""
    process, large = Values(monkeypatch), 5 * STEP_BYTES // 2
    process.limit.begin({FETCHED: Rise(0, large, 0)})
    process.used = LIMIT + (1 << 20)
    assert process.looks(FETCHED), "it reaches beyond the limit"
    process.used += large
    assert not process.looks(), "nothing is free"
    process.used, process.free = process.used - large + IN_VAIN_BYTES, large
    assert process.used + process.free > NEAR
    assert process.looks() and process.free == 0


def test_near_the_promise_what_is_free_counts_where_it_lets_the_promise_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Values(monkeypatch)
    process.limit.begin({LEAVES: Rise(0, 0, 2 * IN_VAIN_BYTES)})
    process.used = NEAR + 1
    assert process.looks(), "once, in vain"
    process.used, process.free = NEAR, IN_VAIN_BYTES - 1
    assert not process.looks(), "too little to be worth it"
    process.used, process.free = PROMISE, IN_VAIN_BYTES
    assert not process.looks(), "the promise is passed all the same: that is for the steps"
    process.used, process.free = NEAR - IN_VAIN_BYTES, 2 * IN_VAIN_BYTES
    assert not process.looks(LEAVES), "the graph takes it again"
    assert process.looks()


def test_in_vain_or_not_it_asks_before_the_promise_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Values(monkeypatch)
    asked_at = []
    for process.used in range(LIMIT, PROMISE, 1 << 20):
        if process.looks():
            asked_at.append((process.used - LIMIT) >> 20)
    assert asked_at == [1, 17, 41], "the next would have been at 50, twice as far as the last"


def test_the_last_resort_is_asked_where_the_promise_would_be_passed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, code, asked = [LIMIT + 1], [0], list[int]()
    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: now[0] + code[0])

    def last_resort() -> bool:
        asked.append(now[0])
        code[0] = 0
        return len(asked) < 2

    limit = ResidentLimit(LIMIT, lambda: None, promise_bytes=PROMISE, last_resort=last_resort)
    limit.look(None)
    assert not asked, "the promise is far"
    now[0], code[0] = LIMIT - STEP_BYTES, 3 * STEP_BYTES
    limit.begin({FETCHED: Rise(0, STEP_BYTES, 0)})
    assert not asked
    limit.look(FETCHED)
    assert asked == [LIMIT - STEP_BYTES]
    for _ in range(3):
        limit.look(FETCHED)
    assert len(asked) == 1, "it reaches the limit, and no more"
    now[0] = PROMISE
    for _ in range(3):
        limit.look(None)
    assert len(asked) == 2, "in vain: not at every look"


def test_without_a_limit_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: pytest.fail("looked"))
    ResidentLimit(None, lambda: pytest.fail("asked")).look(None)


def test_it_sees_what_the_kernel_counts() -> None:
    block = bytearray(64 << 20)
    assert abs(resident_bytes() - process_memory.rss_bytes()) < 8 << 20
    del block


def test_after_a_fork_it_tells_of_the_child() -> None:
    here = resident_bytes()
    block = bytearray(256 << 20)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        block = bytearray(0)  # the child gives up what the parent keeps
        os.write(writer, str(resident_bytes()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    there = int(os.read(reader, 64))
    os.close(reader)
    os.close(writer)
    assert there < here + (128 << 20) < resident_bytes()
    del block


def test_what_is_expected_is_the_limit_where_more_is_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = Heap(monkeypatch)
    heap.used = LIMIT // 2
    heap.limit.expect(LIMIT // 2 + STEP_BYTES)
    assert heap.looks(holes=1 << 20, times=16) == 0
    assert heap.looks(holes=1 << 20, times=1) == 1 and heap.holes == 0
    heap.limit.expect(2 * LIMIT)
    assert heap.looks(used=LIMIT // 2, times=1) == 0
    assert heap.looks(used=1 << 20, times=1) == 1, "a promise is never passed for what was expected"


def test_without_a_promise_nothing_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: pytest.fail("looked"))
    limit = ResidentLimit(None, lambda: pytest.fail("asked"))
    limit.expect(0)
    limit.look(None)
