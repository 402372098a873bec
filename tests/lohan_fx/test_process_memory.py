"""What the process is said to use follows what it does use."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from lohan_fx import process_memory

BLOCK_BYTES = 64 << 20
ELSEWHERE_BYTES = 16 << 20
"""What the rest of the process may take or give back meanwhile."""


def touched_block() -> mmap.mmap:
    """A mapping of its own: what other tests have freed in the heap may be in RAM already, and stays there."""
    block = mmap.mmap(-1, BLOCK_BYTES)
    for page in range(0, BLOCK_BYTES, mmap.PAGESIZE):
        block[page] = 1
    return block


def test_a_block_of_memory_is_seen_and_its_peak_stays() -> None:
    before_bytes = process_memory.rss_bytes()
    assert process_memory.forget_peak_rss()
    block = touched_block()
    assert process_memory.rss_bytes() >= before_bytes + BLOCK_BYTES - ELSEWHERE_BYTES
    del block
    assert process_memory.rss_bytes() < before_bytes + ELSEWHERE_BYTES
    assert process_memory.peak_rss_bytes() >= before_bytes + BLOCK_BYTES - ELSEWHERE_BYTES


def test_forgetting_the_peak_lets_it_begin_at_what_is_in_use() -> None:
    block = touched_block()
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


def _mapped_bytes() -> int:
    info = process_memory._mallinfo()
    assert info is not None
    return info.hblkhd


def test_large_values_that_no_hole_has_room_for_have_mappings_of_their_own() -> None:
    try:
        for from_bytes, some_are_mapped in ((8 << 20, True), (process_memory.USUALLY_MAPPED_BYTES, False)):
            process_memory.map_from(from_bytes)
            before_bytes = _mapped_bytes()
            values = [torch.empty(8 << 20, dtype=torch.uint8) for _ in range(200)]
            assert (_mapped_bytes() > before_bytes) == some_are_mapped
            del values
            assert _mapped_bytes() == before_bytes
    finally:
        process_memory.map_from(process_memory.USUALLY_MAPPED_BYTES)


def test_what_is_handed_out_and_what_is_free_are_told_apart() -> None:
    process_memory.return_free_memory()
    before = process_memory.now()
    blocks = [torch.ones(1 << 12, dtype=torch.float32) for _ in range(BLOCK_BYTES >> 14)]
    during = process_memory.now()
    assert abs(during.used_bytes - before.used_bytes - BLOCK_BYTES) < ELSEWHERE_BYTES
    assert during.free_bytes < before.free_bytes + ELSEWHERE_BYTES
    pins = blocks[::64]
    del blocks
    after = process_memory.now()
    assert all(bool(pin.all()) for pin in pins)
    assert abs(after.used_bytes - before.used_bytes) < ELSEWHERE_BYTES
    assert after.free_bytes > before.free_bytes + BLOCK_BYTES - ELSEWHERE_BYTES
    process_memory.return_free_memory()
    returned = process_memory.now()
    assert returned.free_bytes < after.free_bytes - BLOCK_BYTES + ELSEWHERE_BYTES
    assert returned.rss_bytes < after.rss_bytes - BLOCK_BYTES + ELSEWHERE_BYTES


def test_a_mapping_is_resident_as_far_as_it_was_touched() -> None:
    region = mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    assert process_memory.resident_bytes(address, BLOCK_BYTES) == 0
    for page in range(3):
        region[page * mmap.PAGESIZE] = 1
    assert process_memory.resident_bytes(address, BLOCK_BYTES) == 3 * mmap.PAGESIZE
    assert process_memory.resident_bytes(address, mmap.PAGESIZE + 1) == 2 * mmap.PAGESIZE
    assert process_memory.resident_bytes(0, mmap.PAGESIZE) == 0


SMAPS = """
00400000-00600000 r-xp 00000000 fe:00 17                                 /usr/bin/python3.11
Size:               2048 kB
Rss:                1800 kB
Anonymous:             0 kB
7f0000000000-7f0010000000 r-xp 00001000 fe:00 18                         /opt/a library/libtorch_cpu.so
Size:             262144 kB
Rss:               96256 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f0010000000-7f0020000000 r--p 10001000 fe:00 18                         /opt/a library/libtorch_cpu.so
Rss:               96256 kB
Anonymous:             0 kB
7f0020000000-7f0030000000 r-xp 00000000 fe:00 19                         /opt/changed/by/a/debugger.so
Rss:               96256 kB
Anonymous:             4 kB
7f0030000000-7f0030400000 r-xp 00000000 fe:00 20                         /opt/hardly/used.so
Rss:                 512 kB
Anonymous:             0 kB
7f0040000000-7f0050000000 r-xp 00000000 00:00 0
Rss:               96256 kB
Anonymous:             0 kB
7ffd00000000-7ffd00002000 r-xp 00000000 00:00 0                          [vdso]
Rss:               96256 kB
Anonymous:             0 kB
"""


def test_code_of_libraries_is_what_is_executable_of_files_and_as_in_the_file() -> None:
    found = list(process_memory._library_code(SMAPS.strip().splitlines()))
    assert found == [(0x400000, 0x600000), (0x7F0000000000, 0x7F0010000000)]


def test_code_that_was_let_go_of_runs_again() -> None:
    matrix = torch.rand(64, 64)
    before, expected = process_memory.rss_bytes(), matrix @ matrix
    process_memory.return_library_pages()
    assert process_memory.rss_bytes() < before - (8 << 20)
    assert torch.equal(matrix @ matrix, expected)


MAPS = """
000055d0c0000000-000055d0c0100000 rw-p 00000000 00:00 0                          [heap]
00007f0000000000-00007f0000021000 rw-p 00000000 00:00 0
00007f0000021000-00007f0004000000 ---p 00000000 00:00 0
00007f0004000000-00007f0008000000 rw-p 00000000 00:00 0
00007f0010000000-00007f0010021000 rw-p 00000000 00:00 0
00007f0010021000-00007f0010022000 ---p 00000000 00:00 0
00007f0020000000-00007f0020001000 rw-p 00000000 00:00 0                          [stack]
00007f0024000000-00007f0024021000 rw-p 00000000 00:00 0
"""


def test_heaps_are_the_named_one_and_those_of_threads() -> None:
    found = list(process_memory._heaps(MAPS.strip().splitlines()))
    assert found == [
        (0x55D0C0000000, 0x55D0C0100000),
        (0x7F0000000000, 0x7F0000021000),
        (0x7F0004000000, 0x7F0008000000),
    ]
