"""staging: what pays is taken, at the price of what the bytes would save elsewhere, and told."""

from __future__ import annotations

import dataclasses

import pytest

from lohan_fx import staging
from lohan_fx.budgets import MIB, choose_windows, staging_bytes
from lohan_fx.plan import Windows
from lohan_fx.problem import ParameterFacts

GIB = 1 << 30
LAYERS = [ParameterFacts(f"layers.{i}.fc.weight", 100 << 20, 200 << 20, True) for i in range(4)]
BEGAN = choose_windows(256 * GIB, LAYERS)


def burst(windows: Windows) -> float:
    """Seconds of a step that needs 100 chunks of room for gradients."""
    return 10.0 + 0.01 * max(0, 100 - windows.gradient_buffers)


def chosen(step_s: staging.StepSeconds, began: Windows = BEGAN, **changes: float) -> staging.Staging:
    given = {"per_byte_s": 0.0, "free_bytes": 0, "layer_chunks": 100, **changes}
    return staging.choose(began, step_s, shared=False, **given)  # type: ignore[arg-type]


def test_what_the_planner_began_with_stays_where_nothing_is_better() -> None:
    found = chosen(burst, per_byte_s=1e-12)
    assert found.windows == BEGAN and BEGAN.gradient_buffers == 100
    assert (found.step_s, found.began_s, found.least_s) == (10.0, 10.0, pytest.approx(10.96))


def test_more_is_taken_while_it_saves_more_than_elsewhere() -> None:
    few = dataclasses.replace(BEGAN, gradient_buffers=25)
    assert chosen(burst, few, per_byte_s=1e-12).windows.gradient_buffers == 100
    # 75 buffers of 4 MiB save 0.75 s here: elsewhere they must not save more.
    price = 0.75 / (75 * 4 * MIB)
    assert chosen(burst, few, per_byte_s=0.5 * price).windows.gradient_buffers == 100
    assert chosen(burst, few, per_byte_s=1.5 * price).windows.gradient_buffers <= 25


def test_memory_that_is_free_costs_nothing() -> None:
    few = dataclasses.replace(BEGAN, gradient_buffers=25)
    assert chosen(burst, few, per_byte_s=1.0, free_bytes=GIB).windows.gradient_buffers == 100


def test_what_saves_nothing_is_given_back() -> None:
    found = chosen(lambda windows: 10.0, per_byte_s=1e-9)
    assert found.windows.gradient_buffers == staging.LEAST_BUFFERS
    assert staging_bytes(found.windows) < staging_bytes(BEGAN)
    assert chosen(lambda windows: 10.0).windows == BEGAN  # where bytes are worth nothing, nothing is gained


def test_a_naive_handler_stays_one_and_a_cpu_moves_no_gradients() -> None:
    naive = dataclasses.replace(BEGAN, optimizer_buffers=1)
    tried: list[Windows] = []

    def watched(windows: Windows) -> float:
        tried.append(windows)
        return 10.0

    staging.choose(naive, watched, layer_chunks=100, shared=True, per_byte_s=0.0, free_bytes=0)
    assert {found.optimizer_buffers for found in tried} == {1}
    assert {found.gradient_buffers for found in tried} <= {BEGAN.gradient_buffers, staging.LEAST_BUFFERS}


def test_room_for_states_that_are_read_ahead_is_taken_too() -> None:
    """Where layers with states on NVMe stand between others without, the drives work on while those are passed."""

    def spread(windows: Windows) -> float:
        return 10.0 + 0.02 * max(0, 50 - windows.optimizer_buffers)

    found = chosen(spread, per_byte_s=1e-12)
    assert found.windows.optimizer_buffers == 50 and found.least_s == pytest.approx(10.92)


def test_the_note_says_what_and_why() -> None:
    found = chosen(burst, per_byte_s=1e-12)
    text = staging.note(found, shared=False)
    assert "100 for gradients" in text and "10.0 s" in text and "11.0 s with 4 of each" in text
    assert "GiB elsewhere saves 1.07 ms" in text
