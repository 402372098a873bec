"""ResidentLimit: asks for memory back only above the limit, and not again and again in vain."""

from __future__ import annotations

import pytest

from lohan_fx import process_memory
from lohan_fx.runtime import resident_limit
from lohan_fx.runtime.resident_limit import STEP_BYTES, ResidentLimit, resident_bytes

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


def test_what_comes_until_the_next_look_counts_as_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [LIMIT // 2]
    asked: list[int] = []
    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: now[0])
    limit = ResidentLimit(LIMIT, lambda: asked.append(now[0]))
    limit.begin({None: LIMIT // 2, 7: LIMIT // 4, 8: LIMIT})
    assert asked == []
    limit.look(7)
    assert asked == []
    limit.look(8)
    assert asked == [LIMIT // 2]
    limit.look(8)
    assert asked == [LIMIT // 2], "nothing came back: not again before there is more"
    now[0] += 2 * STEP_BYTES
    limit.look(7)
    assert len(asked) == 1
    limit.look(8)
    assert len(asked) == 2
    ResidentLimit(LIMIT, lambda: asked.append(0)).begin({None: LIMIT})
    assert asked[2:] == [0]


def test_without_a_limit_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_limit, "resident_bytes", lambda: pytest.fail("looked"))
    ResidentLimit(None, lambda: pytest.fail("asked")).look(None)


def test_it_sees_what_the_kernel_counts() -> None:
    block = bytearray(64 << 20)
    assert abs(resident_bytes() - process_memory.rss_bytes()) < 8 << 20
    del block
