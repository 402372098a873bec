"""The order of forwards, backwards and steps, as pure bookkeeping; and against a list of what is exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.errors import StepError
from lohan_fx.runtime.micro_batches import MicroBatches


def forward(found: MicroBatches) -> None:
    found.forward_begins()
    found.forward_opens()


def backward(found: MicroBatches) -> bool:
    """One that succeeds; whether its gradients were applied."""
    applies = found.backward_begins()
    if applies:
        found.gradient_applied()
    found.forward_closes()
    found.backward_ends()
    return applies


def step_of(found: MicroBatches, backwards: int) -> list[bool]:
    applied = []
    for _ in range(backwards):
        forward(found)
        applied.append(backward(found))
    found.step_ends()
    return applied


def test_the_first_step_is_held_and_teaches_how_many_backwards_there_are() -> None:
    found = MicroBatches()
    assert found.expected is None
    assert step_of(found, 3) == [False, False, False]
    assert found.expected == 3
    assert step_of(found, 3) == [False, False, True]


def test_fewer_are_held_to_the_end_and_believed_the_second_time() -> None:
    found = MicroBatches()
    step_of(found, 3)
    assert step_of(found, 2) == [False, False]  # the rest of an epoch
    assert step_of(found, 3) == [False, False, True]
    assert step_of(found, 2) == step_of(found, 2) == [False, False]
    assert step_of(found, 2) == [False, True]


def test_it_may_be_told() -> None:
    found = MicroBatches()
    found.declare(2)
    assert step_of(found, 2) == [False, True]
    for _ in range(3):
        assert step_of(found, 1) == [False]
    assert step_of(found, 2) == [False, True]


def test_what_was_learned_before_a_checkpoint_holds_after_it() -> None:
    found = MicroBatches()
    step_of(found, 3)
    step_of(found, 2)
    again, told = MicroBatches(), MicroBatches()
    told.declare(4)
    for resumed in (again, told):
        resumed.resume(found.expected, found.last)
    assert step_of(again, 2) == step_of(found, 2) == [False, False]
    assert step_of(again, 2) == step_of(found, 2) == [False, True]
    assert told.expected == 4


def test_a_step_without_backward_teaches_nothing() -> None:
    found = MicroBatches()
    step_of(found, 2)
    found.step_ends()
    found.step_ends()
    assert step_of(found, 2) == [False, True]


def test_more_backwards_than_expected_are_refused_before_anything_runs() -> None:
    found = MicroBatches()
    step_of(found, 1)
    forward(found)
    assert backward(found)
    for refused in (found.forward_begins, found.backward_begins):
        with pytest.raises(StepError, match=r"optimizer\.step\(\).*accumulation_steps=n"):
            refused()
    found.step_ends()
    assert step_of(found, 1) == [True]


def test_with_two_forwards_open_nothing_is_applied_yet() -> None:
    found = MicroBatches()
    step_of(found, 1)
    forward(found)
    forward(found)
    assert not backward(found)  # the other one's backward may come
    assert not backward(found)
    found.step_ends()
    assert found.expected == 2


def test_a_forward_without_backward_counts_until_the_step_ends() -> None:
    found = MicroBatches()
    step_of(found, 1)
    forward(found)
    forward(found)
    assert not backward(found)
    found.step_ends()
    assert step_of(found, 1) == [True]


def test_forwards_before_a_step_without_backward_are_still_owed_theirs() -> None:
    found = MicroBatches()
    step_of(found, 1)
    forward(found)
    forward(found)
    found.step_ends()  # changes nothing, so both may come
    assert not backward(found), "the other forward's backward follows"
    assert not backward(found)
    found.step_ends()
    assert found.expected == 2


def test_a_backward_of_a_forward_before_the_step_is_counted_in_its_own() -> None:
    found = MicroBatches()
    forward(found)
    found.step_ends()
    found.declare(1)
    assert backward(found)
    found.step_ends()
    assert step_of(found, 1) == [True]


def test_zero_grad() -> None:
    found = MicroBatches()
    forward(found)
    backward(found)
    found.gradients_dropped()
    assert found.backwards == 0 and found.expected is None
    step_of(found, 1)
    forward(found)
    found.gradients_dropped()  # between forward and backward
    assert backward(found)
    with pytest.raises(StepError, match=r"zero_grad\(\).*cannot be taken back: call optimizer\.step\(\) first"):
        found.gradients_dropped()


def test_states_are_of_no_step_between_an_update_and_step() -> None:
    found = MicroBatches()
    found.refuse_if_unfinished("read")
    forward(found)
    backward(found)
    found.refuse_if_unfinished("read")  # held: nothing has changed
    found.step_ends()
    forward(found)
    backward(found)
    with pytest.raises(StepError, match=r"read between backward and optimizer\.step\(\)"):
        found.refuse_if_unfinished("read")
    found.step_ends()
    found.refuse_if_unfinished("read")


def test_a_backward_that_fails_before_the_first_update_is_forgotten() -> None:
    found = MicroBatches(["a"])
    step_of(found, 1)
    forward(found)
    assert found.backward_begins()
    found.backward_failed(OSError("boom"))
    found.forward_closes()
    assert not found.torn
    assert step_of(found, 1) == [True]


def test_one_that_fails_later_is_torn_until_all_is_written_anew() -> None:
    found = MicroBatches(["a", "b", "c", "d", "e"])
    step_of(found, 1)
    forward(found)
    found.backward_begins()
    found.gradient_applied()
    found.backward_failed(OSError("boom"))
    found.forward_closes()
    assert found.torn
    message = r"\(OSError: boom\).*two different steps.*not loaded yet: a, b, c, \.\.\."
    for refused in (
        found.forward_begins,
        found.backward_begins,
        found.refuse_if_torn,
        lambda: found.refuse_if_unfinished("read"),
    ):
        with pytest.raises(StepError, match=message):
            refused()
    found.gradients_dropped()
    for state in ("b", "a", "d", "c"):
        found.restored(state)
        assert found.torn
    with pytest.raises(StepError, match=r"not loaded yet: e\)"):
        found.forward_begins()
    found.restored("e")
    assert not found.torn
    assert step_of(found, 1) == [True]


def test_writing_states_tears_and_mends_nothing_by_itself() -> None:
    found = MicroBatches(["a"])
    forward(found)
    backward(found)
    found.restored("a")
    assert found.backwards == 1
    found.step_ends()
    assert found.expected == 1


@given(
    st.lists(st.sampled_from(["forward", "backward", "step", "zero_grad"]), max_size=60), st.sampled_from([None, 1, 2])
)
def test_what_is_applied_is_applied_once_and_last(calls: list[str], told: int | None) -> None:
    """After a backward that applied, no other backward of its step runs: it is refused."""
    found = MicroBatches()
    found.declare(told)
    open_forwards = backwards = 0
    applied = False
    for call in calls:
        if call == "step":
            found.step_ends()
            # Without a backward the step changes nothing, and what is open stays so.
            applied, open_forwards, backwards = False, 0 if backwards else open_forwards, 0
        elif applied:
            refused = {
                "forward": found.forward_begins,
                "backward": found.backward_begins,
                "zero_grad": found.gradients_dropped,
            }[call]
            with pytest.raises(StepError):
                refused()
        elif call == "zero_grad":
            found.gradients_dropped()
            backwards = 0
        elif call == "forward":
            forward(found)
            open_forwards += 1
        elif open_forwards:
            applied = backward(found)
            open_forwards -= 1
            backwards += 1
            assert not (applied and open_forwards), "applied although another forward's backward may follow"
        assert found.applied == applied


def test_a_graph_that_is_dropped_closes_one_forward() -> None:
    found = MicroBatches(["a"])
    step_of(found, 1)
    for _ in range(3):
        forward(found)
    found.forward_closes()  # one of three went without a backward
    assert not backward(found), "another backward is still owed"
    assert not found.applied
