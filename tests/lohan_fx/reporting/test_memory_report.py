"""What the accounts make of what the runtime, the C library and the kernel say."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from lohan_fx import process_memory
from lohan_fx.reporting.memory_report import (
    EXPECTED_HOLE_BYTES,
    GRADIENTS,
    PARAMETERS,
    VALUES,
    MemoryAccounts,
    MemoryReport,
)
from lohan_fx.runtime.memory_use import MemoryUse

BLOCK_BYTES = 64 << 20
ELSEWHERE_BYTES = 8 << 20
LONG_S = 30.0


class Runtime:
    """What the runtime is said to hold."""

    use = MemoryUse()


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def accounts(runtime: Runtime, leak_check: None) -> Iterator[MemoryAccounts]:
    process_memory.return_free_memory()
    found = MemoryAccounts(lambda: runtime.use, process_memory.now(), 0)
    process_memory.forget_peak_rss()
    found.watch()
    yield found
    found.stop()


def rows_of(report: MemoryReport) -> dict[str, int]:
    assert sum(row.bytes for row in report.rows) == report.peak_rss_bytes
    return {row.purpose: row.bytes for row in report.rows}


def await_peak(accounts: MemoryAccounts, stage: str) -> MemoryReport:
    """The report, once the watch has seen a peak within ``stage``."""
    end_s = time.monotonic() + LONG_S
    while (report := accounts.report(None, 0)).stage != stage:
        assert time.monotonic() < end_s, "nobody has seen the peak"
        time.sleep(0.01)
    return report


def block() -> torch.Tensor:
    return torch.ones(BLOCK_BYTES // 4, dtype=torch.float32)


def test_what_a_graph_holds_is_told_from_what_was_there_before_it(accounts: MemoryAccounts, runtime: Runtime) -> None:
    stays = block()
    runtime.use = MemoryUse(parameter_bytes=BLOCK_BYTES)
    accounts.stage("forward")
    made = block()
    rows = rows_of(await_peak(accounts, "forward"))
    assert rows[PARAMETERS] == BLOCK_BYTES
    assert abs(rows[VALUES] - BLOCK_BYTES) < ELSEWHERE_BYTES
    assert rows[GRADIENTS] == 0
    del stays, made


def test_gradients_that_wait_are_no_values_at_work(accounts: MemoryAccounts, runtime: Runtime) -> None:
    accounts.stage("forward")
    accounts.stage("backward")
    runtime.use = MemoryUse(gradient_bytes=BLOCK_BYTES)
    made = block()
    rows = rows_of(await_peak(accounts, "backward"))
    assert rows[GRADIENTS] == BLOCK_BYTES
    assert rows[VALUES] < ELSEWHERE_BYTES
    del made


def test_books_of_less_memory_do_not_replace_those_nearer_to_the_peak(accounts: MemoryAccounts) -> None:
    accounts.stage("forward")
    made = block()
    await_peak(accounts, "forward")
    accounts.stage("backward")
    del made
    process_memory.return_free_memory()
    assert accounts._note() < process_memory.peak_rss_bytes() - BLOCK_BYTES // 2
    assert accounts.report(None, 0).stage == "forward"


def test_nobody_has_watched() -> None:
    with pytest.raises(ValueError, match=r"nobody has watched.*lohan_fx\.Monitor"):
        MemoryAccounts(MemoryUse, process_memory.now(), 0).report(None, 0)


def test_the_expected_peak_is_what_is_there_and_what_the_step_adds(accounts: MemoryAccounts) -> None:
    now = process_memory.now()
    expected = now.rss_bytes - now.free_bytes + BLOCK_BYTES + EXPECTED_HOLE_BYTES
    assert abs(accounts.expected_peak_bytes(BLOCK_BYTES) - expected) < ELSEWHERE_BYTES
