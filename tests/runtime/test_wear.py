"""wear: what the last step has yet to write counts against the budget before it is written."""

from __future__ import annotations

import pytest

from lohan_fx.errors import WearBudgetExceeded
from lohan_fx.runtime.wear import Wear


def test_updates_that_are_put_off_count_before_they_are_written() -> None:
    to_come = 5
    wear = Wear(lambda: 10, lambda: to_come)
    assert not wear.is_spent(100)
    wear.max_bytes = 20
    wear.expect(6)
    assert wear.is_spent(0)
    with pytest.raises(WearBudgetExceeded):
        wear.step_begins()
    to_come = 4
    assert not wear.is_spent(0) and wear.is_spent(1)
    wear.step_begins()
