"""staging: what pays is taken, at the price of what the bytes would save elsewhere, and told."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lohan_fx.plan import Windows
from lohan_fx.planning import staging
from lohan_fx.planning.budgets import LEAST_BUFFERS, MIB, choose_windows, staging_bytes
from lohan_fx.planning.problem import ParameterFacts

GIB = 1 << 30
LAYERS = [ParameterFacts(f"layers.{i}.fc.weight", 100 << 20, 200 << 20, True) for i in range(4)]
BEGAN = choose_windows(31 * GIB, LAYERS)


def burst(windows: Windows) -> float:
    """Seconds of a step that needs 100 chunks of room for gradients."""
    return 10.0 + 0.01 * max(0, 100 - windows.gradient_buffers)


def chosen(step_s: staging.StepSeconds, began: Windows = BEGAN, **changes: Any) -> staging.Staging:
    given = {"per_byte_s": 0.0, "free_bytes": 0, "layer_elements": 100 << 20, **changes}
    return staging.choose(began, step_s, shared=False, **given)


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
    assert found.windows.gradient_buffers == LEAST_BUFFERS
    assert staging_bytes(found.windows) < staging_bytes(BEGAN)
    assert chosen(lambda windows: 10.0).windows == BEGAN  # where bytes are worth nothing, nothing is gained


def test_a_naive_handler_stays_one_and_a_cpu_moves_no_gradients() -> None:
    naive = dataclasses.replace(BEGAN, optimizer_buffers=1)
    tried: list[Windows] = []

    def watched(windows: Windows) -> float:
        tried.append(windows)
        return 10.0

    staging.choose(naive, watched, layer_elements=100 << 20, shared=True, per_byte_s=0.0, free_bytes=0)
    assert {found.optimizer_buffers for found in tried} == {1}
    assert {found.gradient_buffers for found in tried} <= {BEGAN.gradient_buffers, LEAST_BUFFERS}


def test_room_for_states_that_are_read_ahead_is_taken_too() -> None:
    """Where layers with states on NVMe stand between others without, the drives work on while those are passed."""

    def spread(windows: Windows) -> float:
        return 10.0 + 0.02 * max(0, 50 - windows.optimizer_buffers)

    found = chosen(spread, per_byte_s=1e-12)
    assert found.windows.optimizer_buffers == 50 and found.least_s == pytest.approx(10.92)


def test_a_shortage_that_a_coarse_simulation_hides_is_found_by_a_finer_one() -> None:
    """Twice as many buffers for updates as long as that pays: no further, and never of the one of a naive handler."""

    def finer(windows: Windows) -> float:
        return 10.0 + 0.05 * max(0, 40 - windows.optimizer_buffers)

    began = dataclasses.replace(BEGAN, optimizer_buffers=LEAST_BUFFERS)
    coarse = chosen(lambda windows: 10.0, began, per_byte_s=1e-12)
    assert coarse.windows.optimizer_buffers == LEAST_BUFFERS
    found = chosen(lambda windows: 10.0, began, per_byte_s=1e-12, finer_s=finer)
    assert finer(found.windows) == 10.0 and found.windows.optimizer_buffers < 2 * 40
    dear = chosen(lambda windows: 10.0, began, per_byte_s=1.0, finer_s=finer)
    assert dear.windows.optimizer_buffers == LEAST_BUFFERS
    naive = dataclasses.replace(BEGAN, optimizer_buffers=1)
    assert chosen(lambda windows: 10.0, naive, finer_s=finer).windows.optimizer_buffers == 1


def test_what_several_drives_are_given_is_not_taken_back() -> None:
    """However much its bytes would save elsewhere: a simulated job has all drives, a real one goes to one of them."""
    began = choose_windows(31 * GIB, LAYERS, drives=6)
    found = staging.choose(
        began, lambda windows: 10.0, layer_elements=100 << 20, shared=False, per_byte_s=1e-6, free_bytes=0
    )
    assert (found.windows.io_buffers, found.windows.optimizer_buffers) == (12, 12)
    assert found.windows.gradient_buffers == LEAST_BUFFERS


def test_the_note_says_what_and_why() -> None:
    found = chosen(burst, per_byte_s=1e-12)
    text = staging.note(found, shared=False)
    assert "100 for gradients" in text and "10.0 s" in text and "11.0 s with 4 of each" in text
    assert "GiB elsewhere saves 1.07 ms" in text


def per_request(windows: Windows) -> float:
    """Seconds of a step of 1 Gi elements, each chunk of which costs a millisecond."""
    return 10.0 + 0.001 * (2**30 / windows.chunk_elements)


def test_larger_requests_are_taken_where_fewer_of_them_save_more_than_their_memory_would() -> None:
    found = chosen(per_request, sizes=True).windows
    assert (found.chunk_elements, found.io_bytes) == (2 * BEGAN.chunk_elements, 2 * BEGAN.io_bytes)
    saved_s = per_request(BEGAN) - per_request(found)
    more = staging_bytes(found) - staging_bytes(BEGAN)
    dear = chosen(per_request, sizes=True, per_byte_s=1.5 * saved_s / more).windows
    assert dear.chunk_elements <= BEGAN.chunk_elements


def test_the_sizes_alone_are_told_too() -> None:
    """What more buffers take from other uses is known at the margin only: the planner tries a plan without them."""

    def step_s(windows: Windows) -> float:
        return per_request(windows) + 0.01 * max(0, 50 - windows.gradient_buffers)

    few = dataclasses.replace(BEGAN, gradient_buffers=25)
    found = chosen(step_s, few, sizes=True)
    fewer = found.with_fewer()
    assert found.windows.gradient_buffers == 50 and fewer.windows.gradient_buffers == 25
    assert staging.same_sizes(fewer.windows, found.windows) and not staging.same_sizes(fewer.windows, few)
    assert (fewer.step_s, found.step_s) == (step_s(fewer.windows), step_s(found.windows))
    assert (fewer.began_s, fewer.least_s) == (found.began_s, found.least_s)


def test_smaller_requests_give_memory_back_where_large_ones_save_nothing() -> None:
    found = chosen(lambda windows: 10.0, sizes=True, per_byte_s=1e-9).windows
    assert found.chunk_elements == BEGAN.chunk_elements // 2 == staging.least_chunk_elements(BEGAN)
    assert staging_bytes(found) < staging_bytes(BEGAN)


def test_sizes_stay_where_states_are_cut_already() -> None:
    tried: list[Windows] = []

    def watched(windows: Windows) -> float:
        tried.append(windows)
        return per_request(windows)

    assert staging.same_sizes(chosen(watched, per_byte_s=1e-9).windows, BEGAN)
    assert all(staging.same_sizes(windows, BEGAN) for windows in tried)


@pytest.mark.parametrize("host_bytes", [GIB // 4, GIB // 2, GIB, 8 * GIB])
def test_all_sizes_are_whole_numbers_of_those_that_the_store_keeps(host_bytes: int) -> None:
    began = choose_windows(host_bytes, LAYERS, shared=True)
    tried: list[Windows] = []

    def watched(windows: Windows) -> float:
        tried.append(windows)
        return 10.0

    staging.choose(began, watched, layer_elements=100 << 20, shared=True, per_byte_s=0.0, free_bytes=0, sizes=True)
    assert {w.chunk_elements / began.chunk_elements for w in tried} == {0.5, 1.0, 2.0}
    assert not any(w.chunk_elements % staging.least_chunk_elements(began) for w in tried)


def test_the_note_says_how_large_requests_are() -> None:
    assert "buffers of 8.00 MiB per lane" in staging.note(chosen(per_request, sizes=True), shared=False)
