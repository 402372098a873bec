"""The store's I/O against fio's best, in alternating rounds: sequential read, write, and the optimizer's real mix.

    python benchmarks/io.py [--rounds 5 --seconds 2] [--save]

Ours: ``NvmeStore`` with the ssd lane's threads and a chunk's requests as the optimizer makes them. fio's: O_DIRECT, the
best of several engines, block sizes, depths and pages (small ones, and huge ones by malloc), found first; the mixed one reads
and writes in the optimizer's shares. Over one directory and over two, which are on the same drive (so two show what the
store's own work for several costs, not what two drives give), with both sizes of chunks that plans have; ours also on pages
of 4 KiB, for comparison (docs/0026). Bar: at least 95% of fio in all of these. Needs ``fio`` on the PATH.
JSON: ``read_ratio, write_ratio, mixed_ratio`` over one directory with the usual chunks, ``large_...`` with the others; ``rows``.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars
from fio_beside import huge_pages
from report import arguments, at_least_one, finish, own_folder

from lohan_fx.runtime.host_pool import HostPool, Reservation
from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.nvme_store import NvmeStore, ssd_threads

CHUNKS = (1 << 20, 2 << 20)
"""Elements of an optimizer chunk: the usual ones, and those of large promises on a CPU (docs/0030)."""
FILE_BYTES = 1 << 30
KINDS = ("read", "write", "mixed")
HUGE = "huge"
Move = tuple[str, int]
"""(read or write, bytes per element of the chunk)."""
MOVES: dict[str, list[Move]] = {
    "read": [("read", 4)],
    "write": [("write", 4)],
    # Master and moments in; master, moments and the bf16 copy out.
    "mixed": [("read", 4), ("read", 8), ("write", 4), ("write", 8), ("write", 2)],
}
MIXED_READ_PERCENT = 46
"""12 of 26 bytes."""


@dataclass(frozen=True)
class Rate:
    """``bytes_per_s``, and seconds of processor time per 10^9 bytes."""

    bytes_per_s: float
    cpu_s_per_gb: float


def ours(kind: str, chunk: int, directories: Sequence[Path], seconds: float, *, huge: bool = True) -> Rate:
    """The store at work for so long, with buffers on huge pages as the runtime's are, or on small ones."""
    moves = [(how, each * chunk) for how, each in MOVES[kind]]
    largest, threads = max(nbytes for _, nbytes in moves), ssd_threads(len(directories))
    with (
        NvmeStore(directories) as store,
        HostPool({"io": Reservation(threads, largest)}) as pool,
        Lane("ssd", threads=threads) as lane,
    ):
        if not huge and pool._region is not None:
            pool._region.madvise(mmap.MADV_NOHUGEPAGE)
        store.allocate({"a": FILE_BYTES})
        with pool.acquire("io") as buffer:
            buffer.tensor.fill_(1)
            for offset in range(0, FILE_BYTES, largest):
                nbytes = min(largest, FILE_BYTES - offset)
                store.write("a", offset, buffer.tensor, nbytes)

        def move(how: str, offset: int, nbytes: int) -> None:
            with pool.acquire("io") as buffer:
                (store.read if how == "read" else store.write)("a", offset, buffer.tensor, nbytes)

        before, cpu_s, begin_s = store.bytes_read + store.bytes_written, _cpu_s(), time.perf_counter()
        waiting: list[Any] = []
        for how, offset, nbytes in _places(moves):
            if time.perf_counter() - begin_s > seconds:
                break
            waiting.append(lane.submit(functools.partial(move, how, offset, nbytes)))
            if len(waiting) > 2 * threads:
                waiting.pop(0).wait()
        for work in waiting:
            work.wait()
        took_s = time.perf_counter() - begin_s
        moved = store.bytes_read + store.bytes_written - before
        return Rate(moved / took_s, (_cpu_s() - cpu_s) / moved * 1e9)


def _places(moves: Sequence[Move]) -> Iterator[tuple[str, int, int]]:
    """The moves again and again, each kind going through the file in order."""
    at = {"read": 0, "write": FILE_BYTES // 2}
    for how, nbytes in itertools.cycle(moves):
        if at[how] + nbytes > FILE_BYTES:
            at[how] = 0
        yield how, at[how], nbytes
        at[how] += nbytes


def _cpu_s() -> float:
    times = os.times()
    return times.user + times.system


def fio(
    kind: str, directories: Sequence[Path], seconds: float, engine: str, block: str, jobs: int, depth: int, pages: str
) -> Rate:
    """What fio reaches with these settings."""
    files = ":".join(str(directory / "fio.bin") for directory in directories)
    command = [
        "fio", "--name=x", f"--filename={files}", f"--filesize={FILE_BYTES // len(directories)}", "--direct=1",
        f"--ioengine={engine}", f"--bs={block}", f"--numjobs={jobs}", f"--iodepth={depth}",
        "--group_reporting", "--time_based", f"--runtime={seconds}", "--output-format=json", "--offset_increment=64m",
        "--rw=" + {"read": "read", "write": "write", "mixed": "rw"}[kind], f"--rwmixread={MIXED_READ_PERCENT}",
    ]  # fmt: skip
    environment = huge_pages() if pages == HUGE else None
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    (job,) = json.loads(run.stdout[run.stdout.index("{") :])["jobs"]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    took_s = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
    return Rate(moved / took_s, cpu_s / moved * 1e9)


SETTINGS = [
    (*setting, pages)
    for pages in ("small", HUGE)
    for setting in (
        ("psync", "8m", 3, 1), ("psync", "4m", 3, 1), ("psync", "1m", 4, 1), ("libaio", "1m", 1, 8), ("libaio", "4m", 1, 4),
        ("io_uring", "1m", 1, 8),
    )
]  # fmt: skip


def best_of_fio(kind: str, directories: Sequence[Path], seconds: float) -> Callable[[], Rate]:
    """fio with the settings that are the fastest here."""
    rates = {}
    for setting in SETTINGS:
        try:
            rates[setting] = fio(kind, directories, seconds, *setting).bytes_per_s
        except subprocess.CalledProcessError as error:
            print(f"fio {setting}: {error.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
    chosen = max(rates, key=lambda setting: rates[setting])
    print(f"{kind}: fio is best with {chosen}: {rates[chosen] / 1e9:.2f} GB/s", file=sys.stderr)
    return lambda: fio(kind, directories, seconds, *chosen)


def compared(kind: str, chunk: int, directories: Sequence[Path], args: argparse.Namespace) -> dict[str, Any]:
    """Medians over alternating rounds."""
    reference, run = best_of_fio(kind, directories, args.seconds), functools.partial(ours, kind, chunk, directories)
    rounds = [(run(args.seconds), reference(), run(args.seconds, huge=False)) for _ in range(args.rounds)]
    return {
        "ratio": statistics.median(a.bytes_per_s / b.bytes_per_s for a, b, _ in rounds),
        "bytes_per_s": statistics.median(a.bytes_per_s for a, _, _ in rounds),
        "fio_bytes_per_s": statistics.median(b.bytes_per_s for _, b, _ in rounds),
        "cpu_s_per_gb": statistics.median(a.cpu_s_per_gb for a, _, _ in rounds),
        "fio_cpu_s_per_gb": statistics.median(b.cpu_s_per_gb for _, b, _ in rounds),
        "small_pages_bytes_per_s": statistics.median(c.bytes_per_s for _, _, c in rounds),
        "small_pages_cpu_s_per_gb": statistics.median(c.cpu_s_per_gb for _, _, c in rounds),
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt-get install fio")
    with own_folder(args):
        directories = [args.nvme / "a", args.nvme / "b"]
        for directory in directories:
            directory.mkdir()
        if shutil.disk_usage(args.nvme).free < 4 * FILE_BYTES:
            parser.error(f"{args.nvme} has too little free space: {4 * FILE_BYTES:,} bytes are needed")
        found = {
            (kind, count, chunk): compared(kind, chunk, directories[:count], args)
            for count, chunk in itertools.product((1, 2), CHUNKS)
            for kind in KINDS
        }
    rows = [
        {"kind": kind, "directories": count, "chunk_elements": chunk, **row}
        for (kind, count, chunk), row in found.items()
    ]
    figures = {**bars.io_ratios(rows), "rows": rows}
    finish(
        "io",
        [
            (
                f"{row['kind']}, {bars.directories(row)}, chunks of {row['chunk_elements']:,}",
                f"{row['bytes_per_s'] / 1e9:.2f} GB/s, fio {row['fio_bytes_per_s'] / 1e9:.2f}: {row['ratio']:.2f}x; "
                f"processor {row['cpu_s_per_gb']:.3f} s/GB, fio {row['fio_cpu_s_per_gb']:.3f}; on small pages "
                f"{row['small_pages_bytes_per_s'] / 1e9:.2f} GB/s, {row['small_pages_cpu_s_per_gb']:.3f} s/GB",
            )
            for row in rows
        ],
        figures,
        bars.io(figures),
        save=args.save,
    )


if __name__ == "__main__":
    main()
