"""gate: what many wait at until one opens it."""

from __future__ import annotations

import threading
import time

from lohan_fx.runtime.gate import Gate

PATIENCE_S = 30.0


def test_everybody_who_waits_gets_through_and_whoever_comes_later() -> None:
    gate, through = Gate(), []
    waiting = [threading.Thread(target=lambda: through.append(gate.wait(PATIENCE_S)), daemon=True) for _ in range(5)]
    for thread in waiting:
        thread.start()
    assert not gate.is_open and not through
    gate.open()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert through == [True] * 5
    assert gate.is_open and gate.wait(0.0)


def test_waiting_ends_where_nobody_opens_it() -> None:
    begun_s = time.perf_counter()
    assert not Gate().wait(0.01)
    assert time.perf_counter() - begun_s < PATIENCE_S
