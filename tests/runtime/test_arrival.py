"""An arrival is settled once, by its last part, with the first failure; whoever waits hears of it in time."""

from __future__ import annotations

import threading

import pytest

from lohan_fx.errors import LaneTimeout
from lohan_fx.runtime.arrival import Arrival


def test_it_is_done_when_its_last_part_is() -> None:
    arrival = Arrival("fetch of w", 3)
    for _ in range(2):
        arrival.part_done()
        assert not arrival.done()
    arrival.part_done(moment="copied")
    assert arrival.done() and arrival.error is None and arrival.moment == "copied"
    arrival.wait(0.0)


def test_no_parts_are_there_at_once() -> None:
    arrival = Arrival("nothing", 0)
    called: list[int] = []
    arrival.then(lambda: called.append(1))
    arrival.wait(0.0)
    assert called == [1]


def test_the_first_failure_is_raised_once_all_parts_have_reported() -> None:
    arrival = Arrival("swap_in of x", 3)
    first, second = OSError("first"), OSError("second")
    arrival.part_done(first)
    assert not arrival.done()  # a late part may still write into the memory that the waiter would reuse
    arrival.part_done(second)
    arrival.part_done()
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            arrival.wait(0.0)
        assert str(caught.value) == "first"
    # The frames of who waited lead to the arrival: were they those of its own error, they would live until the collector comes.
    assert arrival.error is first and first.__traceback__ is None


def test_a_wait_in_vain_names_what_it_waited_for() -> None:
    arrival = Arrival("fetch of layers.3.weight", 2)
    arrival.part_done()
    with pytest.raises(
        LaneTimeout, match=r"waited 0\.01 s for fetch of layers\.3\.weight: 1 transfers are still under way"
    ):
        arrival.wait(0.01)


def test_callbacks_run_in_order_and_at_once_when_it_is_done() -> None:
    arrival = Arrival("x", 1)
    called: list[str] = []
    arrival.then(lambda: called.append("first"))
    arrival.then(lambda: called.append("second"))
    assert called == []
    arrival.part_done(ValueError())
    assert called == ["first", "second"]
    arrival.then(lambda: called.append("late"))
    assert called == ["first", "second", "late"]


def test_a_callback_may_ask_for_another_one() -> None:
    arrival = Arrival("x", 1)
    called: list[int] = []
    arrival.then(lambda: arrival.then(lambda: called.append(1)))
    arrival.part_done()
    assert called == [1]


def test_many_threads_settle_it_exactly_once() -> None:
    parts = 64
    arrival = Arrival("x", parts)
    called: list[int] = []
    arrival.then(lambda: called.append(1))
    threads = [threading.Thread(target=arrival.part_done) for _ in range(parts)]
    for thread in threads:
        thread.start()
    arrival.wait(60.0)
    for thread in threads:
        thread.join()
    assert called == [1]
