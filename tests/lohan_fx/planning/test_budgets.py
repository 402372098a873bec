"""budgets: bytes as users write them, windows within the promise, and what is too little for any plan."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import Windows
from lohan_fx.planning import budgets
from lohan_fx.planning.budgets import (
    BYTES_PER_THREAD,
    CAPTURE_BYTES,
    GPU_KERNELS_BYTES,
    MIB,
    STRETCHES_BYTES,
    available_memory_bytes,
    choose_windows,
    default_host_memory_bytes,
    fixed_bytes,
    least_promise,
    make_budgets,
    mean_request_bytes,
    parse_bytes,
    staging_bytes,
    threads_bytes,
)
from lohan_fx.planning.problem import ParameterFacts
from lohan_fx.runtime.state_buffer import buffer_bytes

GPU = HardwareProfile.preset("rtx4090-12xP5510")
CPU = replace(GPU, device="cpu")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6GiB", 6 * GIB),
        ("6gib", 6 * GIB),
        ("6Gi", 6 * GIB),
        (" 6 GiB ", 6 * GIB),
        ("6GB", 6 * 10**9),
        ("6g", 6 * 10**9),
        ("1.5MiB", 3 * MIB // 2),
        ("800MB", 800 * 10**6),
        ("2TiB", 2 << 40),
        ("4KiB", 4096),
        ("4096", 4096),
        ("17b", 17),
        (4096, 4096),
        (4096.9, 4096),
        (1, 1),
    ],
)
def test_bytes_as_users_write_them(text: int | float | str, expected: int) -> None:
    assert parse_bytes(text, "host_memory") == expected


@pytest.mark.parametrize("text", ["", "GiB", "6 XB", "-6GiB", "6e9", "6GiB free", "5i", "1,000", "0x10", "six"])
def test_text_that_says_no_bytes_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^host_memory is {re.escape(repr(text))}: expected bytes as a number, or text"
    ):
        parse_bytes(text, "host_memory")


@pytest.mark.parametrize("value", [0, -1, 0.5, "0", "0.5b", math.nan, math.inf, -math.inf, 2**63, "9999999TiB"])
def test_no_bytes_and_too_many_are_refused_by_name(value: int | float | str) -> None:
    with pytest.raises(ValueError, match=rf"^device_memory is {re.escape(repr(value))}: expected at least one byte"):
        parse_bytes(value, "device_memory")


@pytest.mark.parametrize("value", [True, None, b"6GiB", [6]])
def test_other_types_are_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=rf"^host_memory is {re.escape(repr(value))}: expected bytes as a number"):
        parse_bytes(value, "host_memory")  # type: ignore[arg-type]


@given(st.integers(1, 2**63 - 1))
def test_a_number_of_bytes_stays(nbytes: int) -> None:
    assert parse_bytes(nbytes, "x") == nbytes


def parameters(*megabytes: int) -> list[ParameterFacts]:
    return [ParameterFacts(f"layers.{i}.fc.weight", m * MIB // 2, m * MIB, True) for i, m in enumerate(megabytes)]


@given(st.integers(64 * MIB, 2**45), st.lists(st.integers(1, 4096), max_size=5))
def test_windows_take_a_bounded_part_of_the_promise(host_bytes: int, sizes: list[int]) -> None:
    windows = choose_windows(host_bytes, parameters(*sizes))
    in_flight = windows.fetch_bytes + windows.swap_in_bytes + windows.gradient_bytes + windows.swap_out_bytes
    assert in_flight <= host_bytes * 6 // 16
    assert staging_bytes(windows) <= max(200 * MIB, host_bytes // 64) + host_bytes // 64
    assert staging_bytes(choose_windows(host_bytes, parameters(*sizes), shared=True), shared=True) <= 240 * MIB


@given(st.integers(64 * MIB, 2**45), st.lists(st.integers(1, 4096), min_size=1, max_size=5), st.integers(2, 64))
def test_no_staging_buffer_grows_with_the_model(host_bytes: int, sizes: list[int], times: int) -> None:
    """Nothing with more layers; with larger ones only the room for one layer's gradients, which leave a GPU at once, and
    which the promise bounds (above)."""
    small = choose_windows(host_bytes, parameters(*sizes))
    deep = choose_windows(host_bytes, parameters(*sizes * times))
    wide = choose_windows(host_bytes, parameters(*(times * size for size in sizes)))
    assert deep == small
    for name in ("chunk_elements", "io_bytes", "io_buffers", "optimizer_buffers"):
        assert getattr(wide, name) == getattr(small, name)
    assert staging_bytes(small, shared=True) == staging_bytes(wide, shared=True)


@given(st.integers(64 * MIB, 2**45), st.integers(0, 2**45), st.lists(st.integers(1, 4096), max_size=5))
def test_a_larger_promise_never_gets_smaller_windows(host_bytes: int, more: int, sizes: list[int]) -> None:
    small, large = (choose_windows(nbytes, parameters(*sizes)) for nbytes in (host_bytes, host_bytes + more))
    for name in ("fetch_bytes", "swap_in_bytes", "gradient_bytes", "swap_out_bytes", "chunk_elements", "io_bytes"):
        assert getattr(small, name) <= getattr(large, name)
    # Bytes, because the number of buffers falls where each becomes larger.
    assert staging_bytes(small) <= staging_bytes(large) + 16 * large.chunk_elements


@pytest.mark.parametrize("gib", [2, 3, 64])
def test_on_a_cpu_requests_are_larger_where_that_is_no_larger_share(gib: int) -> None:
    found, least = (choose_windows(nbytes, parameters(10), shared=True) for nbytes in (gib * GIB, 2 * GIB - 1))
    assert (found.chunk_elements, found.io_bytes) == (2 * least.chunk_elements, 2 * least.io_bytes)
    assert staging_bytes(found, shared=True) <= gib * GIB // 8


@pytest.mark.parametrize(("gib", "times"), [(2, 1), (31, 1), (32, 2), (64, 4), (1024, 4)])
def test_beside_a_gpu_requests_are_larger_where_there_is_plenty(gib: int, times: int) -> None:
    """Each takes the interpreter from the thread that launches kernels."""
    found, least = (choose_windows(nbytes, parameters(10)) for nbytes in (gib * GIB, 2 * GIB))
    assert (found.chunk_elements, found.io_bytes) == (times * least.chunk_elements, times * least.io_bytes)
    assert staging_bytes(found) <= gib * GIB // 8


@given(st.integers(64 * MIB, 2**45), st.integers(1, 12), st.booleans())
def test_several_drives_have_buffers_each_where_there_is_room(host_bytes: int, drives: int, shared: bool) -> None:
    found, one = (choose_windows(host_bytes, parameters(10), shared=shared, drives=n) for n in (drives, 1))
    assert (found.chunk_elements, found.io_bytes) == (one.chunk_elements, one.io_bytes)
    assert found.io_buffers == found.optimizer_buffers <= max(4, 2 * drives)
    if found != one:
        assert staging_bytes(found, shared=shared) <= host_bytes // 2
    if host_bytes > 8 * GIB:
        assert found.optimizer_buffers == max(4, 2 * drives)


def test_beside_a_gpu_host_memory_holds_the_gradients_of_a_layer() -> None:
    """Of two bytes per element on the device: so many chunks as the largest layer has, if that is little of the promise."""
    roomy = choose_windows(1024 * GIB, parameters(10, 3000, 20))
    assert roomy.gradient_buffers == -(-3000 * MIB // 2 // roomy.chunk_elements) == 375
    tight = choose_windows(64 * GIB, parameters(10, 3000, 20))
    assert 4 * tight.chunk_elements * tight.gradient_buffers == GIB
    assert choose_windows(1024 * GIB, parameters(10, 3000, 20), shared=True).gradient_buffers == 4
    frozen = [replace(p, trainable=False) for p in parameters(3000)]
    assert choose_windows(1024 * GIB, frozen).gradient_buffers == 4


def test_windows_hold_two_layers_and_one_layers_gradients_where_there_is_room() -> None:
    windows = choose_windows(1024 * GIB, parameters(10, 30, 20))
    assert (windows.fetch_bytes, windows.gradient_bytes) == (60 * MIB, 30 * MIB)


def test_parameters_of_one_block_are_one_layer() -> None:
    block = [ParameterFacts(f"model2.layers.{i}.{n}", 1, 10 * MIB, True) for i in range(4) for n in ("a", "b", "c")]
    assert choose_windows(1024 * GIB, block).fetch_bytes == 2 * 30 * MIB


def test_a_model_without_parameters_needs_no_windows() -> None:
    assert choose_windows(GIB, []).fetch_bytes == 0


def test_on_a_gpu_the_two_memories_are_apart() -> None:
    windows = choose_windows(8 * GIB, parameters(10))
    found = make_budgets(GPU, 8 * GIB, 4 * GIB, windows)
    assert (found.host_memory_bytes, found.device_memory_bytes, found.shared) == (8 * GIB, 4 * GIB, False)
    assert found.fixed_bytes == fixed_bytes(windows, 0) == staging_bytes(windows) + CAPTURE_BYTES + GPU_KERNELS_BYTES
    assert make_budgets(GPU, 8 * GIB, 4 * GIB, windows, 100).fixed_bytes > found.fixed_bytes
    assert make_budgets(GPU, 8 * GIB, None, windows).device_memory_bytes == int(24 * GIB * 0.9)


def test_what_others_have_of_this_machines_gpu_is_left_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = choose_windows(8 * GIB, parameters(10))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (9 * GIB, 24 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: GIB)
    for is_here, device in ((False, int(24 * GIB * 0.9)), (True, 9 * GIB)):
        monkeypatch.setattr(HardwareProfile, "is_this_machine", lambda self, is_here=is_here: is_here)
        assert make_budgets(GPU, 8 * GIB, None, windows).device_memory_bytes == device
    assert make_budgets(GPU, 8 * GIB, 20 * GIB, windows).device_memory_bytes == 20 * GIB


def test_what_is_moved_in_place_needs_no_staging() -> None:
    windows = choose_windows(8 * GIB, parameters(10))
    saved = staging_bytes(windows) - staging_bytes(windows, shared=True)
    own = buffer_bytes(windows.chunk_elements) - 4 * windows.chunk_elements
    assert saved == windows.io_buffers * windows.io_bytes + windows.gradient_buffers * 4 * windows.chunk_elements + own
    shared = make_budgets(CPU, 8 * GIB, None, windows).fixed_bytes
    assert shared == fixed_bytes(windows, 0) - saved - GPU_KERNELS_BYTES + STRETCHES_BYTES


def test_on_a_cpu_there_is_one_memory() -> None:
    found = make_budgets(CPU, 8 * GIB, None, choose_windows(8 * GIB, parameters(10)))
    assert (found.host_memory_bytes, found.device_memory_bytes, found.shared) == (8 * GIB, 8 * GIB, True)


def test_each_thread_of_torch_keeps_memory_for_matmuls_on_a_cpu() -> None:
    assert [threads_bytes(CPU, threads) for threads in (1, 2, 8)] == [0, BYTES_PER_THREAD, 7 * BYTES_PER_THREAD]
    assert threads_bytes(GPU, 8) == 0
    windows = choose_windows(8 * GIB, parameters(10))
    budgets = [make_budgets(CPU, 8 * GIB, None, windows, kernels_bytes=threads_bytes(CPU, n)) for n in (1, 2)]
    assert budgets[1].fixed_bytes - budgets[0].fixed_bytes == BYTES_PER_THREAD


def test_without_a_promise_most_of_what_is_free_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory_bytes() > 0
    monkeypatch.setattr(budgets, "available_memory_bytes", lambda: 10 * GIB)
    assert default_host_memory_bytes(CPU) == 8 * GIB
    windows = choose_windows(8 * GIB, parameters(10))
    assert make_budgets(CPU, None, None, windows).host_memory_bytes == 8 * GIB


@pytest.mark.parametrize(("asked", "tensors"), [(64 * MIB, 1), (100 * MIB, 40), (700 * MIB, 1500), (GIB, 5000)])
def test_a_promise_that_staging_alone_exceeds_is_refused_with_one_that_it_does_not(asked: int, tensors: int) -> None:
    def windows_of(promise: int) -> Windows:
        return choose_windows(promise, parameters(10), shared=True)

    with pytest.raises(InfeasiblePlan) as caught:
        make_budgets(CPU, asked, None, windows_of(asked), tensors, windows_of=windows_of)
    message = str(caught.value)
    assert message.startswith(f"host_memory={asked:,} bytes is too small for any plan")
    taken, missing, enough = (int(n.replace(",", "")) for n in re.findall(r"([\d,]{6,})(?:;| bytes are|$)", message))
    assert missing == taken - asked
    make_budgets(CPU, enough, None, windows_of(enough), tensors)
    less = enough - MIB
    with pytest.raises(InfeasiblePlan):
        make_budgets(CPU, less, None, windows_of(less), tensors)


@given(
    st.integers(0, 50_000 * MIB), st.integers(0, 50_000 * MIB), st.integers(0, 3 * 256), st.integers(0, 10_000 * MIB)
)
def test_the_least_promise_holds_what_is_needed_of_it_and_a_mebibyte_less_does_not(
    from_bytes: int, fixed: int, share: int, step_at: int
) -> None:
    def needed(promise: int) -> int:
        return fixed + promise * share // 1024 + (100 * MIB if promise >= step_at else 0)

    found = least_promise(from_bytes, needed)
    assert found % MIB == 0 and found >= max(from_bytes, needed(found))
    assert found - MIB < max(from_bytes, needed(found - MIB))


def test_the_mean_request_is_that_of_all_a_step_moves() -> None:
    windows = replace(choose_windows(4 * GIB, []), chunk_elements=1 << 20, io_bytes=4 * MIB)
    large, small = ParameterFacts("w", 3 << 19, 3 * MIB, True), ParameterFacts("b", 1 << 10, 2 << 10, True)
    # Two chunks of 5 requests for 24 bytes of states and 2 of the copy an element; two fetches.
    expected = (26 * (3 << 19) + 2 * 3 * MIB) // 12
    assert mean_request_bytes([large], windows) == mean_request_bytes([large, small], windows) == expected
    assert mean_request_bytes([replace(large, trainable=False)], windows) == 3 * MIB
    assert mean_request_bytes([small], windows) == windows.io_bytes


@given(st.integers(1 << 16, 1 << 24), st.sampled_from([1 << 18, 1 << 20, 1 << 21]))
def test_no_mean_is_larger_than_the_largest_request(numel: int, chunk_elements: int) -> None:
    windows = replace(choose_windows(4 * GIB, []), chunk_elements=chunk_elements, io_bytes=4 * chunk_elements)
    found = mean_request_bytes([ParameterFacts("w", numel, 2 * numel, True)], windows)
    assert 0 < found <= 8 * chunk_elements
