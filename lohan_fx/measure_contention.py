"""Measures what the drives and compute take from each other where both use the same processor.

A thread that serves a drive takes a core for a while (the system call, the copy of what it touches into caches), and the
ops of a graph, which have a thread on every core, wait for that core. What compute loses so is more than the processor time
of the requests, and is what a plan has to count; so it is measured as just that: how much less compute gets done beside
requests like those of the runtime than alone, in turns; and for small ones, when its own thread asks for them. The other
way round, threads that wait for a core leave a drive idle: on a CPU ``drives_beside_compute`` gives the rates that a plan
can count on.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from lohan_fx.hardware import HardwareProfile, NvmeProfile
from lohan_fx.measure_nvme import measure_drives
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.host_pool import PAGE_BYTES, HostPool, Reservation
from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.machine import SSD_THREADS, use_threads
from lohan_fx.runtime.nvme_store import NvmeStore
from lohan_fx.runtime.room import LEAST_BYTES, Room
from lohan_fx.runtime.timeline import Timeline

SIZES = (PAGE_BYTES, 4 << 20)
ROUNDS = 9
"""Besides a first one, which makes the file and counts for nothing."""
PLACES = 4
"""Requests of a thread go through so many places one after the other: what they touch should not stay in a cache."""
LEAST_S = 1e-6
FEW_ROWS = 16
"""Of matmuls between requests that compute asks for: so short that what those cost shows."""
AHEAD = 8
"""So many are asked for before the first is waited for."""
TURNS = 12


def lost_to_requests(directories: Sequence[str], dtype: torch.dtype, seconds: float) -> tuple[float, float, float]:
    """Seconds that compute in ``dtype`` on all cores loses per request to the store, and besides per byte of it, half of them
    reads; and to hand one over itself. In about ``seconds``."""
    if not directories:
        return HardwareProfile.io_core_s_per_request, HardwareProfile.io_core_s_per_byte, HardwareProfile.handover_s
    directory, share_s = Path(directories[0]), seconds / (len(SIZES) + 1)
    small, large = (_lost_s(directory, nbytes, dtype, share_s) for nbytes in SIZES)
    per_byte = max((large - small) / (SIZES[1] - SIZES[0]), 1e-12)
    per_request = max(small - per_byte * SIZES[0], LEAST_S)
    asked = _lost_to_asking_s(directory, dtype, share_s)
    return per_request, per_byte, max(asked - per_request - per_byte * LEAST_BYTES, LEAST_S)


def drives_beside_compute(
    directories: Sequence[str], device: str, dtype: torch.dtype, seconds: float, announce: Callable[[str], None]
) -> tuple[NvmeProfile, ...]:
    """``measure_drives``; where the compute ``device`` is the CPU, with ops in ``dtype`` on all its cores meanwhile."""
    if device != "cpu" or not directories:
        return measure_drives(directories, seconds, announce)
    stop = threading.Event()

    def compute() -> None:
        run = few_ops(dtype)
        while not stop.is_set():
            run()

    with ThreadPoolExecutor(1, thread_name_prefix="lohan-measure-compute") as pool:
        done = pool.submit(compute)
        try:
            found = measure_drives(directories, seconds, announce)
        finally:
            stop.set()
        done.result()
        return found


def _lost_s(directory: Path, nbytes: int, dtype: torch.dtype, seconds: float) -> float:
    """Seconds that one request of ``nbytes`` costs compute. Without the checksums of checkpoints, as the drives' rates are."""
    window_s = seconds / (2 * (ROUNDS + 1))
    compute, threads = few_ops(dtype), torch.get_num_threads()
    with (
        tempfile.TemporaryDirectory(prefix="lohan_fx-measure-", dir=directory) as place,
        NvmeStore([Path(place)]) as store,
        HostPool({"io": Reservation(SSD_THREADS, PLACES * nbytes)}) as pool,
        Lane("io", threads=SSD_THREADS, timeline=Timeline(), initializer=partial(use_threads, 1)) as lane,
    ):
        store.allocate({"x": SSD_THREADS * nbytes}, chunk_bytes={"x": nbytes})
        torch.set_num_threads(threads)  # what a lane's thread says is partly said for the process
        found = []
        for _ in range(ROUNDS + 1):
            alone = runs_per_s(compute, window_s)
            stop = threading.Event()
            begun_s = time.perf_counter()
            offsets = range(0, SSD_THREADS * nbytes, nbytes)
            works = [lane.submit(partial(_requests, store, pool, offset, nbytes, stop)) for offset in offsets]
            runs = runs_per_s(compute, window_s)
            stop.set()
            requests = sum(work.wait() for work in works)
            took_s = time.perf_counter() - begun_s
            found.append(took_s * (1 - min(runs / alone, 1.0)) / requests)
    return float(statistics.median(found[1:]))


def _lost_to_asking_s(directory: Path, dtype: torch.dtype, seconds: float) -> float:
    """Seconds that compute loses per small request that its own thread asks for, as it does for what it fetches: finding a
    place, the way to the lane and back, and the interpreter, which the lane's threads use too. Waiting for a slow drive is
    something else."""
    compute, ahead = few_ops(dtype, FEW_ROWS), deque[tuple[Arrival, torch.Tensor]]()
    with (
        tempfile.TemporaryDirectory(prefix="lohan_fx-measure-", dir=directory) as place,
        NvmeStore([Path(place)]) as store,
        Lane("io", threads=SSD_THREADS, timeline=Timeline(), initializer=partial(use_threads, 1)) as lane,
    ):
        landing, threads = Room(), torch.get_num_threads()
        landing.reserve(2 * AHEAD * LEAST_BYTES)
        store.allocate({"x": LEAST_BYTES})

        def read(memory: torch.Tensor, arrival: Arrival) -> None:
            store.read("x", 0, memory, LEAST_BYTES)
            arrival.part_done()

        waits_s: list[float] = []

        def ask() -> None:
            value, memory = landing.on_pages(torch.Size([LEAST_BYTES]), torch.uint8)
            arrival = Arrival("what is measured", 1)
            lane.submit(partial(read, memory, arrival))
            ahead.append((arrival, value))
            compute()
            if len(ahead) > AHEAD:
                begun_s = time.perf_counter()
                ahead.popleft()[0].wait()
                waits_s.append(time.perf_counter() - begun_s)

        window_s, found = seconds / (2 * TURNS), []
        torch.set_num_threads(threads)
        for _ in range(TURNS):
            alone = runs_per_s(compute, window_s)
            waits_s.clear()
            each_s = 1 / runs_per_s(ask, window_s)
            found.append(each_s - sum(waits_s) / max(len(waits_s), 1) - 1 / alone)
        lane.drain()
        ahead.clear()
        landing.close()
    return float(statistics.median(found))


def _requests(store: NvmeStore, pool: HostPool, offset: int, nbytes: int, stop: threading.Event) -> int:
    """Write and read in turns until ``stop``; how often."""
    with pool.acquire("io") as buffer:
        for count in itertools.count(1):
            place = count // 2 % PLACES * nbytes
            call = store.write if count % 2 else store.read
            call("x", offset, buffer.tensor[place : place + nbytes], nbytes)
            if stop.is_set():
                return count
    raise AssertionError("unreachable")


def few_ops(dtype: torch.dtype, rows: int = 512) -> Callable[[], object]:
    """A few ops as in a transformer's block: a matmul, and pointwise ones on what it gives."""
    width, wide = 768, 2048
    x, weight = (torch.randn(shape).to(dtype) for shape in ((rows, width), (width, wide)))

    def run() -> object:
        y = x @ weight
        return torch.nn.functional.silu(y).mul_(y)

    run()
    return run


def runs_per_s(run: Callable[[], object], seconds: float) -> float:
    """How often a second ``run`` is done, tried for ``seconds``."""
    begun_s = time.perf_counter()
    for count in itertools.count(1):
        run()
        took_s = time.perf_counter() - begun_s
        if took_s >= seconds:
            return count / took_s
    raise AssertionError("unreachable")
