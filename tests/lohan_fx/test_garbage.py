"""Graphs that were dropped go while others are made, and the collector is left as it was."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterator

import pytest
from torch.fx import Graph

from lohan_fx.garbage import USUAL_THRESHOLDS, collected_soon


@pytest.fixture(autouse=True)
def nothing_is_frozen() -> Iterator[None]:
    gc.unfreeze()
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


def graph_of_many() -> Graph:
    graph = Graph()
    for number in range(200):
        graph.placeholder(f"value_{number}")
    return graph


def most_alive() -> int:
    """Of graphs that are made one after the other and dropped when so many others have been made that they count as old."""
    made: list[weakref.ref[Graph]] = []
    held: deque[Graph] = deque(maxlen=100)
    most = 0
    for _ in range(600):
        held.append(graph_of_many())
        made.append(weakref.ref(held[-1]))
        most = max(most, sum(graph() is not None for graph in made))
    return most


def test_graphs_that_were_dropped_do_not_pile_up() -> None:
    there = [[number] for number in range(500_000)]  # as torch and a library of models are there
    gc.collect()
    gc.set_threshold(*USUAL_THRESHOLDS)
    piled_up = most_alive()
    with collected_soon():
        most = most_alive()
    assert most < 400 < piled_up
    assert len(there) == 500_000


def test_the_collector_is_as_it_was() -> None:
    with collected_soon():
        assert gc.get_freeze_count() > 0
        frozen = gc.get_freeze_count()
        with collected_soon():
            assert gc.get_freeze_count() <= frozen, "the outer one's is enough"
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError), collected_soon():
        _ = 1 // 0
    assert gc.get_freeze_count() == 0
    assert gc.isenabled()


def test_whoever_has_switched_it_off_finds_it_off() -> None:
    gc.disable()
    gc.set_threshold(100_000, 50, 50)
    with collected_soon():
        assert gc.isenabled() and gc.get_threshold() == USUAL_THRESHOLDS
    assert not gc.isenabled() and gc.get_threshold() == (100_000, 50, 50)


def test_what_others_have_frozen_stays_frozen() -> None:
    gc.freeze()
    with collected_soon():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() > 0


def test_garbage_from_before_is_found_afterwards() -> None:
    gc.disable()
    garbage = weakref.ref(graph_of_many())
    kept = Graph()
    inside = weakref.ref(kept)
    with collected_soon():
        assert garbage() is None, "it is looked for once, at the beginning"
        del kept
    gc.collect()
    assert inside() is None
