"""What the process is said to use follows what it does use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lohan_fx import process_memory

BLOCK_BYTES = 64 << 20
ELSEWHERE_BYTES = 16 << 20
"""What the rest of the process may take or give back meanwhile."""


def test_a_block_of_memory_is_seen_and_its_peak_stays() -> None:
    before_bytes = process_memory.rss_bytes()
    assert process_memory.forget_peak_rss()
    block = bytearray(BLOCK_BYTES)
    assert process_memory.rss_bytes() >= before_bytes + BLOCK_BYTES - ELSEWHERE_BYTES
    del block
    assert process_memory.rss_bytes() < before_bytes + ELSEWHERE_BYTES
    assert process_memory.peak_rss_bytes() >= before_bytes + BLOCK_BYTES - ELSEWHERE_BYTES


def test_forgetting_the_peak_lets_it_begin_at_what_is_in_use() -> None:
    block = bytearray(BLOCK_BYTES)
    high_bytes = process_memory.peak_rss_bytes()
    del block
    assert process_memory.forget_peak_rss()
    assert process_memory.peak_rss_bytes() < high_bytes - BLOCK_BYTES + ELSEWHERE_BYTES


def test_a_kernel_that_cannot_forget_is_not_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_CLEAR_REFS", tmp_path / "missing" / "clear_refs")
    assert not process_memory.forget_peak_rss()


def test_a_kernel_without_the_line_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmRSS:\t  1024 kB\n")
    monkeypatch.setattr(process_memory, "_STATUS", status)
    assert process_memory.rss_bytes() == 1 << 20
    with pytest.raises(OSError, match="VmHWM"):
        process_memory.peak_rss_bytes()


def test_holes_in_the_heap_go_back_to_the_system() -> None:
    blocks = [torch.ones(1 << 16, dtype=torch.uint8) for _ in range(1600)]
    pins = blocks[::100]
    del blocks
    before = process_memory.rss_bytes()
    process_memory.return_free_memory()
    assert before - process_memory.rss_bytes() > 50 << 20
    assert all(bool(pin.all()) for pin in pins)
