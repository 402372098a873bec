"""checkpoint_cost: what checkpoints cost while nothing goes wrong: a commit, by the size of the model; and checksums.

    python benchmarks/checkpoint_cost.py --save

A commit is timed after a step, with all states on NVMe; what its ``fdatasync`` and ``fsync`` take is told apart. Checksums
are switched on and off in turn, in training steps and in raw I/O by as many threads as the runtime has; their processor
time is also measured where they run, which is what company on the machine cannot change. Saves ``commit.json`` and
``checksums.json``; prints both, the second as the last line. Bars: a commit takes at most 1% of a step beside syncing;
checksums at most 3% of a step's processor time, of its seconds, and of raw I/O.
"""

from __future__ import annotations

import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bars
import report
import torch
from workload import Workload, streamed

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.runtime import generations, scratch_sums
from lohan_fx.runtime.checksum import checksum
from lohan_fx.runtime.file_backend import PosixBackend
from lohan_fx.runtime.host_pool import HostPool, Reservation
from lohan_fx.runtime.machine import SSD_THREADS
from lohan_fx.runtime.nvme_store import NvmeStore

SIZES = ("demo6", "demo")
HOST_MEMORY = "640MiB"
CHUNK_BYTES = 4 << 20
RAW_BYTES = 1 << 30
COMMIT_BAR = 0.01


class Checksums:
    """Switches the checksums of all stores of this process off and on, and counts their processor time and bytes."""

    def __init__(self) -> None:
        self.processor_s = 0.0
        self.nbytes = 0
        self._lock = threading.Lock()
        self._use(self._timed)

    @staticmethod
    def _use(function: Callable[[memoryview], int | None]) -> None:
        for module in (generations, scratch_sums):
            vars(module)["checksum"] = function

    def _timed(self, data: memoryview) -> int:
        begin_s = time.thread_time()
        found = checksum(data)
        with self._lock:
            self.processor_s += time.thread_time() - begin_s
            self.nbytes += len(data)
        return found

    @contextmanager
    def off(self) -> Iterator[None]:
        """What is written in here has no checksum that is known, and so nothing is compared."""
        self._use(lambda data: None)
        methods: tuple[tuple[type, str], ...] = (
            (scratch_sums.ScratchSums, "end_write"),
            (scratch_sums.ScratchSums, "comparisons"),
            (generations.Generations, "_compare"),  # of what was written before
        )
        originals = [getattr(owner, name) for owner, name in methods]
        for owner, name in methods:
            setattr(owner, name, lambda *args: [])
        try:
            yield
        finally:
            self._use(self._timed)
            for (owner, name), original in zip(methods, originals, strict=True):
                setattr(owner, name, original)


class SyncTimer:
    """Counts the seconds that all stores wait for the drives to have written."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in ("fdatasync", "sync_directory"):
            setattr(PosixBackend, name, self._timed(getattr(PosixBackend, name)))

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            begin_s = time.perf_counter()
            call(*args)
            self.seconds += time.perf_counter() - begin_s

        return timed


def commits(size: str, hw: lohan_fx.HardwareProfile, nvme: Path, rounds: int, sync: SyncTimer) -> dict[str, float]:
    """Medians over ``rounds`` steps, each followed by a commit."""
    ours = streamed(Workload(size, 4, 128), hw, nvme, host_memory=HOST_MEMORY, policy="recompute", checkpoints=1)
    found: list[tuple[float, float, float]] = []
    for number in range(rounds + 1):
        begin_s = time.perf_counter()
        ours.step()
        step_s = time.perf_counter() - begin_s
        sync.seconds, begin_s = 0.0, time.perf_counter()
        lohan_fx.checkpoint(ours.model, ours.optimizer)
        if number:
            found.append((step_s, time.perf_counter() - begin_s, sync.seconds))
    parameters = sum(parameter.numel for parameter in ours.plan.parameters)
    compiled(ours.model).abandon()
    step_s, commit_s, sync_s = (statistics.median(column) for column in zip(*found, strict=True))
    share = statistics.median((commit - synced) / step for step, commit, synced in found)
    return {"parameters": parameters, "step_s": step_s, "commit_s": commit_s, "sync_s": sync_s, "share": share}


def steps(hw: lohan_fx.HardwareProfile, nvme: Path, rounds: int, sums: Checksums) -> dict[str, float]:
    """Blocks of a step without and of one with checksums, in turn, each after one that warms it up."""
    ours = streamed(Workload("demo", 4, 128), hw, nvme, host_memory=HOST_MEMORY, policy="recompute", checkpoints=1)
    ours.step()
    ratios, shares, nbytes = [], [], 0
    for _ in range(rounds):
        with sums.off():
            ours.step()
            without_s = _seconds(ours.step)
        ours.step()
        sums.processor_s, sums.nbytes, used_s = 0.0, 0, time.process_time()
        with_s = _seconds(ours.step)
        shares.append(sums.processor_s / (time.process_time() - used_s - sums.processor_s))
        ratios.append(with_s / without_s)
        nbytes = sums.nbytes
    compiled(ours.model).abandon()
    return {
        "step_ratio": statistics.median(ratios),
        "processor_share": statistics.median(shares),
        "gigabytes_per_step": nbytes / 1e9,
    }


def raw(nvme: Path, rounds: int, sums: Checksums) -> float:
    """Seconds to write and read all of an extent, with checksums over without."""
    ratios = []
    with (
        NvmeStore([nvme]) as store,
        HostPool({"x": Reservation(SSD_THREADS, CHUNK_BYTES)}) as pool,
        ThreadPoolExecutor(SSD_THREADS) as threads,
    ):
        store.keep_generations(1)
        store.allocate({"x": RAW_BYTES}, chunk_bytes={"x": CHUNK_BYTES})

        def move(transfer: Callable[..., None], start: int) -> None:
            with pool.acquire("x") as buffer:
                transfer("x", start, buffer.tensor, CHUNK_BYTES)

        def all_of_it() -> None:
            for transfer in (store.write, store.read):
                list(threads.map(functools.partial(move, transfer), range(0, RAW_BYTES, CHUNK_BYTES)))

        for _ in range(rounds):
            seconds = []
            for switch in (sums.off, _on):
                with switch():
                    seconds.append(_seconds(all_of_it))
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


@contextmanager
def _on() -> Iterator[None]:
    yield


def _seconds(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=report.at_least_one, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    with report.own_folder(args):
        hw, sync = report.profile(args), SyncTimer()
        cases = [commits(size, hw, args.nvme / size, args.rounds, sync) for size in SIZES]
        sums = Checksums()
        found = steps(hw, args.nvme / "steps", args.rounds, sums)
        found["raw_ratio"] = raw(_made(args.nvme / "raw"), args.rounds, sums)
    missed = [
        f"{case['parameters'] / 1e6:.0f}M: {case['share']:.1%} of a step"
        for case in cases
        if case["share"] > COMMIT_BAR
    ]
    rows = [
        (f"{case['parameters'] / 1e6:.0f}M parameters", ", ".join(f"{k} {v:.4g}" for k, v in case.items()))
        for case in cases
    ]
    try:
        report.finish("commit", rows, {"cases": cases}, missed, save=args.save)
    except SystemExit as ended:
        commits_missed = bool(ended.code)
    rows = [(name, f"{value:.4g}") for name, value in found.items()]
    try:
        report.finish("checksums", rows, found, bars.checksums(found), save=args.save)
    except SystemExit as ended:
        sys.exit(1 if commits_missed or ended.code else 0)


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


if __name__ == "__main__":
    main()
