"""What this machine is, as far as that can be read rather than measured."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def cpu_name() -> str:
    """The processor's model name; on machines whose /proc/cpuinfo has none (Arm), the architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


def cpu_cores() -> int:
    """Logical processors of the machine."""
    return os.cpu_count() or 1


def host_memory_bytes() -> int:
    """RAM of the machine, or of the container where a cgroup limits it to less."""
    total = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    return total if limit == "max" else min(total, int(limit))


def gpu_name() -> str:
    """The current CUDA device's name, or "" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def computes_bfloat16() -> bool:
    """Whether oneDNN has matmuls in bfloat16 for this processor; without, they take a hundred times as long as in float32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def fingerprint() -> str:
    """One line that two different machines are unlikely to share; memory is rounded because kernels reserve some."""
    memory = f"{round(host_memory_bytes() / 2**30)} GiB"
    return f"{cpu_name()}, {cpu_cores()} cores, {memory}, {gpu_name() or 'no GPU'}"


def filesystem_type(directory: str | Path) -> str:
    """Kind of the file system that holds `directory`, as the kernel names it ("ext4", "tmpfs"); "" if not found."""
    path = Path(directory).resolve()
    best = ("", "")
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        mount, _, source = line.partition(" - ")
        # The kernel writes blanks and backslashes in a mount point as octal escapes.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split()[4])
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, source.split()[0])
    return best[1]
