"""turns: places of the last forward, and only where updates run beside the next one."""

from __future__ import annotations

from lohan_fx.runtime.turns import FIRST, Turns

KIND = 2


def after_a_forward(*wanted: str) -> Turns[str]:
    turns: Turns[str] = Turns()
    turns.forward_begins()
    for key in wanted:
        turns.wanted(key)
    return turns


def test_a_turn_is_the_place_of_the_first_wait() -> None:
    turns = after_a_forward("a", "b", "a", "c")
    assert turns.places() == {"a": 0, "b": 1, "c": 2}
    turns.begin()
    assert [turns.of(key, KIND) - FIRST for key in ("a", "b", "c", "never wanted")] == [0, 1, 2, 3]


def test_turns_go_before_kinds() -> None:
    turns = after_a_forward("a")
    turns.begin()
    assert turns.of("never wanted", KIND) < 0


def test_without_updates_that_a_forward_waits_for_only_kinds_count() -> None:
    turns = after_a_forward("a")
    assert turns.of("a", KIND) == turns.here(KIND) == KIND and turns.of("a", None) is None
    turns.begin()
    turns.end()
    assert turns.of("a", KIND) == turns.here(KIND) == KIND


def test_what_is_computed_has_the_turn_of_what_compute_goes_on_with() -> None:
    turns = after_a_forward("a", "b", "c")
    turns.begin()
    turns.forward_begins()
    assert turns.here(KIND) == turns.of("a", KIND)
    turns.wanted("b")
    assert turns.here(KIND) == turns.of("b", KIND)
    turns.wanted("a")  # again
    assert turns.here(KIND) == turns.of("b", KIND)


def test_the_next_updates_go_by_the_next_forward() -> None:
    turns = after_a_forward("a", "b")
    turns.begin()
    turns.forward_begins()
    for key in ("b", "a"):
        turns.wanted(key)
    assert turns.of("a", KIND) < turns.of("b", KIND)
    turns.begin()
    assert turns.of("b", KIND) < turns.of("a", KIND)
