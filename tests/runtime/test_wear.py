"""wear: what the last step has yet to write counts against the budget before it is written."""

from __future__ import annotations

import pytest

from lohan_fx.errors import WearBudgetExceeded
from lohan_fx.runtime.wear import Wear


def test_updates_that_are_put_off_count_before_they_are_written() -> None:
    to_come, checkpoint_bytes = 5, 1
    wear = Wear(lambda: 10, lambda: to_come, lambda: checkpoint_bytes)
    assert not wear.is_spent(checkpoints=100)
    wear.max_bytes = 20
    wear.expect(6)
    assert wear.is_spent(checkpoints=0)
    to_come = 4
    assert not wear.is_spent(checkpoints=0) and wear.is_spent(checkpoints=1)
    with pytest.raises(WearBudgetExceeded):
        wear.step_begins()
    checkpoint_bytes = 0
    wear.step_begins()


def test_a_step_counts_as_much_as_any_before_it() -> None:
    scratch = [0]
    wear = Wear(lambda: scratch[0], lambda: 0, scratch_here=lambda: scratch[0])
    for begin, end in ((0, 5), (5, 8), (10, 14)):  # the last step but one was followed by two bytes of something else
        scratch[0] = begin
        wear.step_begins()
        wear.step_begins()  # of the same step: a second forward
        scratch[0] = end
        wear.step_ends(2)
        wear.step_ends()
        assert wear.step_bytes == 7
    scratch[0] = 16
    wear.earlier_bytes, wear.max_bytes = 100, 123
    assert not wear.is_spent(checkpoints=0)
    wear.max_bytes = 122
    assert wear.is_spent(checkpoints=0)


def test_a_step_is_over_where_its_number_changes_and_no_backward_of_it_came_before() -> None:
    scratch = 0
    wear = Wear(lambda: 0, scratch_here=lambda: scratch)
    for step in range(3):  # each is skipped before its backward
        wear.step_begins(step)
        scratch += 3
    assert wear.step_bytes == 3
    wear.step_begins(3)
    scratch += 3  # here comes zero_grad(), and then the backward
    wear.step_begins(4, goes_on=True)
    scratch += 3
    wear.step_ends(1)
    assert wear.step_bytes == 7


def test_a_model_that_is_too_large_for_the_budget_is_not_stored() -> None:
    wear = Wear(lambda: 10, lambda: 0)
    wear.refuse_to_store(1 << 50)
    wear.max_bytes = 20
    wear.refuse_to_store(10)
    with pytest.raises(
        WearBudgetExceeded, match="not even the model's 11 bytes can be stored, and nothing was written"
    ):
        wear.refuse_to_store(11)
