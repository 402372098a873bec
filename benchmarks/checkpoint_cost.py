"""checkpoint_cost: what checkpoints cost while nothing goes wrong: a commit, by the size of the model; and checksums.

    python benchmarks/checkpoint_cost.py [--only nvme|memory|checksums] [--dtype float32] --save

A commit is timed after a step, with all states on NVMe; what its ``fdatasync`` and ``fsync`` take is told apart. With all
states in memory, which a commit writes, it is timed beside raw writes of as many bytes by as many threads. Checksums
are switched on and off in turn, in training steps and in raw I/O by as many threads as the runtime has; their processor
time is also measured where they run, which is what company on the machine cannot change. Saves ``commit.json``,
``commit_in_memory.json`` and ``checksums.json``; prints them, the last one as the last line. Bars: a commit takes at most 1% of
a step beside syncing; checksums at most 3% of a step's processor time, of its seconds, and of raw I/O.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bars
import report
import torch
from workload import Workload, dtype_argument, streamed

import lohan_fx
from lohan_fx.compile import compiled
from lohan_fx.runtime import generations, scratch_sums
from lohan_fx.runtime.checksum import checksum
from lohan_fx.runtime.file_backend import PosixBackend
from lohan_fx.runtime.host_pool import HostPool, Reservation
from lohan_fx.runtime.nvme_store import SSD_THREADS, NvmeStore

SIZES = ("demo6", "demo")
HOST_MEMORY = "640MiB"
MUCH_HOST_MEMORY = "6GiB"
CHUNK_BYTES = 4 << 20
RAW_BYTES = 1 << 30
COMMIT_BAR = 0.01
PARTS = ("nvme", "memory", "checksums")
Transfer = Callable[..., None]


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


def commits(
    workload: Workload, hw: lohan_fx.HardwareProfile, nvme: Path, rounds: int, sync: SyncTimer
) -> dict[str, float]:
    """Medians over ``rounds`` steps, each followed by a commit."""
    ours = streamed(workload, hw, nvme, host_memory=HOST_MEMORY, policy="recompute", checkpoints=1)
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


def commits_of_memory(workload: Workload, hw: lohan_fx.HardwareProfile, nvme: Path, rounds: int) -> dict[str, float]:
    """Medians over ``rounds`` steps with all states in memory, each followed by a commit and by raw writes of as much."""
    ours = streamed(workload, hw, nvme, host_memory=MUCH_HOST_MEMORY, policy="in-memory", checkpoints=1)
    nbytes = compiled(ours.model).engine.states.written_back_bytes()
    found: list[tuple[float, float]] = []
    with extent(_made(nvme / "raw"), nbytes) as move:
        for number in range(rounds + 1):
            ours.step()
            commit_s = _seconds(lambda: lohan_fx.checkpoint(ours.model, ours.optimizer))
            raw_s = _seconds(lambda: move(NvmeStore.write))
            if number:
                found.append((commit_s, raw_s))
    compiled(ours.model).abandon()
    commit_s, raw_s = (statistics.median(column) for column in zip(*found, strict=True))
    ratio = statistics.median(commit_s / raw_s for commit_s, raw_s in found)
    return {"bytes": nbytes, "commit_s": commit_s, "raw_s": raw_s, "ratio": ratio}


def steps(
    workload: Workload, hw: lohan_fx.HardwareProfile, nvme: Path, rounds: int, sums: Checksums
) -> dict[str, float]:
    """Blocks of a step without and of one with checksums, in turn, each after one that warms it up."""
    ours = streamed(workload, hw, nvme, host_memory=HOST_MEMORY, policy="recompute", checkpoints=1)
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


@contextmanager
def extent(nvme: Path, nbytes: int) -> Iterator[Callable[[Transfer], None]]:
    """What moves all ``nbytes`` of an extent that checkpoints keep, by as many threads as the runtime has."""
    with (
        NvmeStore([nvme]) as store,
        HostPool({"x": Reservation(SSD_THREADS, CHUNK_BYTES)}) as pool,
        ThreadPoolExecutor(SSD_THREADS) as threads,
    ):
        store.keep_generations(1)
        store.allocate({"x": nbytes}, chunk_bytes={"x": CHUNK_BYTES})

        def move(transfer: Transfer, start: int) -> None:
            with pool.acquire("x") as buffer:
                transfer(store, "x", start, buffer.tensor, min(CHUNK_BYTES, nbytes - start))

        def move_all(transfer: Transfer) -> None:
            list(threads.map(functools.partial(move, transfer), range(0, nbytes, CHUNK_BYTES)))

        yield move_all


def raw(nvme: Path, rounds: int, sums: Checksums) -> float:
    """Seconds to write and read all of an extent, with checksums over without."""
    ratios = []
    with extent(nvme, RAW_BYTES) as move:

        def all_of_it() -> None:
            for transfer in (NvmeStore.write, NvmeStore.read):
                move(transfer)

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
    parser.add_argument("--only", choices=PARTS, help="(all)")
    dtype_argument(parser)
    args = parser.parse_args()
    parts = PARTS if args.only is None else (args.only,)
    torch.manual_seed(0)
    missed = False
    with report.own_folder(args):
        hw, workload = report.profile(args), Workload("demo", 4, 128, dtype=args.dtype)
        if "nvme" in parts:
            sync = SyncTimer()
            cases = [
                commits(dataclasses.replace(workload, size=size), hw, args.nvme / size, args.rounds, sync)
                for size in SIZES
            ]
            over = [f"{_millions(case)}: {case['share']:.1%} of a step" for case in cases if case["share"] > COMMIT_BAR]
            rows = [(_millions(case), ", ".join(f"{k} {v:.4g}" for k, v in case.items())) for case in cases]
            missed |= _told("commit", rows, {"cases": cases}, over, args.save)
        if "memory" in parts:
            of_memory = commits_of_memory(workload, hw, args.nvme / "memory", args.rounds)
            missed |= _told("commit_in_memory", _rows(of_memory), of_memory, [], args.save)
        if "checksums" in parts:
            sums = Checksums()
            found = steps(workload, hw, args.nvme / "steps", args.rounds, sums)
            found["raw_ratio"] = raw(_made(args.nvme / "raw"), args.rounds, sums)
            missed |= _told("checksums", _rows(found), found, bars.checksums(found), args.save)
    sys.exit(1 if missed else 0)


def _told(name: str, rows: Sequence[tuple[str, str]], found: Mapping[str, Any], missed: list[str], save: bool) -> bool:
    """Print and save one result; whether a bar is missed."""
    try:
        report.finish(name, rows, found, missed, save=save)
    except SystemExit as ended:
        return bool(ended.code)
    return False


def _millions(case: Mapping[str, float]) -> str:
    return f"{case['parameters'] / 1e6:.0f}M parameters"


def _rows(found: Mapping[str, float]) -> list[tuple[str, str]]:
    return [(name, f"{value:.4g}") for name, value in found.items()]


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory


if __name__ == "__main__":
    main()
