"""simulated_waits: what compute waited for, in words, and the tail."""

from __future__ import annotations

import pytest

from lohan_fx.plan import Keep
from lohan_fx.simulation.simulated_waits import TAIL, waits_s
from tests.lohan_fx.simulation.simulated import machine, run, windows
from tests.passes.graphs import captured, plan_for


def test_waits_are_the_stalls_and_the_tail() -> None:
    plan = plan_for(found := captured("dropout"), Keep(), windows=windows(fetch_bytes=0))
    step = run(found, plan, machine())
    waits = waits_s(step)
    assert waits["parameters"] > 0 and waits[TAIL] == step.tail_s
    assert sum(s for kind, s in waits.items() if kind != TAIL) == pytest.approx(step.stall_s)
    assert list(waits.values()) == sorted(waits.values(), reverse=True)
