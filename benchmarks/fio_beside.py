"""fio_beside: traffic to a drive by a program that is not ours, as much as a step of ours has. What compute loses to it is what
a drive costs (interrupts, the kernel's work, memory, one thread) with no Python and none of our runtime in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FILE_BYTES = 1 << 30
DEPTH = 4
"""Requests under way in each direction."""
_RAMP_S = 1.0
_BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Traffic:
    """What a step moves in one ``direction`` (read or write): so many ``bytes`` in so many ``requests``."""

    direction: str
    bytes: int
    requests: int

    def job(self, seconds: float, directory: Path) -> list[str]:
        """fio's arguments for as much every ``seconds``, in requests of that size."""
        block = -(-self.bytes // self.requests // _BLOCK_BYTES) * _BLOCK_BYTES
        return [
            f"--name={self.direction}", f"--rw={self.direction}", f"--filename={_file(self.direction, directory)}",
            f"--bs={block}", f"--rate={round(self.bytes / seconds)}",
        ]  # fmt: skip


def installed() -> bool:
    return shutil.which("fio") is not None


def huge_pages() -> dict[str, str]:
    """An environment in which fio's buffers are on huge pages, as the runtime's are (docs/0026); on small ones it moves half."""
    return {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def lay_out(traffic: Sequence[Traffic], directory: Path) -> None:
    """Write the files that fio will move: a read of what was never written would not reach the drive."""
    for one in traffic:
        job = [f"--name={one.direction}", "--rw=write", f"--filename={_file(one.direction, directory)}", "--bs=8m"]
        subprocess.run([*_COMMAND, *job], check=True, capture_output=True)


@contextmanager
def fio_beside(traffic: Sequence[Traffic], seconds: float, directory: Path) -> Iterator[dict[str, float]]:
    """Meanwhile fio moves, every so many ``seconds``, what a step moves. What it reached of that, by direction, is in the dict
    afterwards. Raises ``RuntimeError`` where fio failed."""
    jobs = [argument for one in traffic for argument in one.job(seconds, directory)]
    command = [*_COMMAND, "--time_based", "--runtime=3600", "--group_reporting", "--output-format=json", *jobs]
    fio = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=huge_pages())
    reached: dict[str, float] = {}
    try:
        time.sleep(_RAMP_S)
        yield reached
        fio.send_signal(signal.SIGINT)
        said, complaint = fio.communicate()
    finally:
        fio.kill()
    if "{" not in said:
        raise RuntimeError(f"fio ended with status {fio.returncode}: {complaint.strip() or said.strip()}")
    (moved,) = json.loads(said[said.index("{") :])["jobs"]
    reached |= {one.direction: moved[one.direction]["bw_bytes"] * seconds / one.bytes for one in traffic}


def _file(direction: str, directory: Path) -> Path:
    return directory / f"{direction}.fio"


_COMMAND = ("fio", "--thread", "--direct=1", "--ioengine=io_uring", f"--iodepth={DEPTH}", f"--size={FILE_BYTES}")
