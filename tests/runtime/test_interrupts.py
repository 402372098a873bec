"""Ctrl-C that comes where Python would lose it is not lost."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest

from lohan_fx.runtime.interrupts import interrupt_waits
from tests.runtime.test_in_time import interruptible


class Referred: ...


def _interrupt(_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_one_in_a_finalizer_comes_afterwards() -> None:
    done = []
    with interruptible():
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupt_waits():
            value = Referred()
            reference = weakref.ref(value, _interrupt)
            del value
            assert reference() is None
            done.append("finalized")
        assert signal.getsignal(signal.SIGINT) is before
    assert done == ["finalized"]


def test_none_and_one_that_the_user_handles() -> None:
    with interrupt_waits():
        pass
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with interrupt_waits():
            _interrupt(None)
            assert not came
        assert came == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_within_is_not_hidden_and_the_handler_is_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError), interrupt_waits():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_and_handlers_of_c_are_left_alone() -> None:
    def inside() -> None:
        with interrupt_waits():
            assert signal.getsignal(signal.SIGINT) is before

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt_waits():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
