"""Facts about this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from lohan_fx.measuring import machine


def test_a_container_has_the_memory_its_limit_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_CGROUP_LIMIT", limit)
    whole = machine.host_memory_bytes()
    for text, expected in (("max\n", whole), ("1048576\n", 2**20), (f"{2 * whole}\n", whole)):
        limit.write_text(text)
        assert machine.host_memory_bytes() == expected


def test_filesystem_type_takes_the_innermost_mount(tmp_path: Path) -> None:
    assert machine.filesystem_type("/proc/self") == "proc"
    assert machine.filesystem_type(tmp_path) not in ("", "proc")
