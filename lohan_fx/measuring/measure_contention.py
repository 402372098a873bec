"""Measures what the drives and compute take from each other where both use the same processor, or the same interpreter.

A thread that serves a drive takes a core for a while (the system call, the copy of what it touches into caches), and the
ops of a graph, which have a thread on every core, wait for that core. What compute loses so is more than the processor time
of the requests, and is what a plan has to count; so it is measured as just that: how much less compute gets done beside
requests like those of the runtime than alone, in turns. They come as in training, as jobs of a lane that another thread asks
for: asked for by the lane's own threads, a request cost half as much (docs/0041). The other way round, threads that wait for a
core leave a drive idle: on a CPU ``drives_beside_compute`` gives the rates that a plan can count on.

Beside a GPU a job of a lane takes time from the thread that launches kernels, since Python runs one thread at a time: so much
less gets launched beside requests than alone (docs/0044).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from lohan_fx.hardware import HardwareProfile, NvmeProfile
from lohan_fx.measuring.measure_nvme import Access, fill, load, measure_drives, open_drive
from lohan_fx.runtime.arrival import Arrival
from lohan_fx.runtime.host_pool import PAGE_BYTES
from lohan_fx.runtime.lanes import Lane
from lohan_fx.runtime.machine import use_threads
from lohan_fx.runtime.nvme_store import SSD_THREADS, NvmeStore
from lohan_fx.runtime.room import LEAST_BYTES, Room
from lohan_fx.runtime.timeline import Timeline

SIZES = (PAGE_BYTES, 4 << 20)
ROUNDS = 9
"""Besides a first one, which warms up and counts for nothing."""
HANDOVER_SHARE = 0.1
"""Of the time, for handing over; of the rest ``FILL_SHARE`` is for making a file."""
FILL_SHARE = 0.1
LEAST_S = 1e-6
FEW_ROWS = 16
"""Of what is computed between requests that compute asks for."""
FEW_BLOCKS = 4
"""So many blocks' weights, 57 MB in bfloat16, pass through the caches between two runs of one."""
AHEAD = 8
"""So many are asked for before the first is waited for."""
FEW_KERNELS = 16
"""So many are launched between two looks at the clock."""


def lost_to_requests(directories: Sequence[str], dtype: torch.dtype, seconds: float) -> tuple[float, float, float]:
    """Seconds that compute in ``dtype`` on all cores loses per request to the store, and besides per byte of it, half of them
    reads; and to hand one over itself. In about ``seconds``."""
    if not directories:
        return HardwareProfile.io_core_s_per_request, HardwareProfile.io_core_s_per_byte, HardwareProfile.handover_s
    directory, handover_share_s = directories[0], seconds * HANDOVER_SHARE
    small, large = _lost_s(directory, few_ops(dtype), seconds - handover_share_s, SIZES)
    per_byte = max((large - small) / (SIZES[1] - SIZES[0]), 1e-12)
    per_request = max(small - per_byte * SIZES[0], LEAST_S)
    return per_request, per_byte, _handover_s(Path(directory), dtype, handover_share_s)


def lost_by_launching(directories: Sequence[str], device: str, seconds: float) -> float:
    """Seconds that a thread which launches small kernels on ``device`` loses per request to the store that another one asks for:
    what a lane's job takes of the interpreter. In about ``seconds``."""
    if not directories:
        return HardwareProfile.interpreter_s_per_job
    (lost_s,) = _lost_s(directories[0], few_kernels(device), seconds, SIZES[:1])
    return max(lost_s, LEAST_S)


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


def _lost_s(directory: str, compute: Callable[[], object], seconds: float, sizes: Sequence[int]) -> list[float]:
    """Seconds that one request of each of ``sizes`` costs ``compute``; without checkpoints' checksums, as the drives' rates
    are."""
    window_s = seconds * (1 - FILL_SHARE) / (2 * len(sizes) * (ROUNDS + 1))
    found: list[list[float]] = [[] for _ in sizes]
    with warnings.catch_warnings():
        # What there is to say about the directory was said when its rates were measured.
        warnings.simplefilter("ignore")
        with open_drive(directory) as drive, ThreadPoolExecutor(1, thread_name_prefix="lohan-measure-asking") as asking:
            file_bytes = fill([drive], seconds * FILL_SHARE)
            before = runs_per_s(compute, window_s)
            for _, (place, nbytes) in itertools.product(range(ROUNDS + 1), enumerate(sizes)):
                asked = asking.submit(load, [drive], file_bytes, Access.MIXED, nbytes, window_s)
                beside = runs_per_s(compute, window_s)
                (bytes_per_s,) = asked.result()
                after = runs_per_s(compute, window_s)
                found[place].append((1 - min(2 * beside / (before + after), 1.0)) * nbytes / bytes_per_s)
                before = after
    return [statistics.median(losses[1:]) for losses in found]


def _handover_s(directory: Path, dtype: torch.dtype, seconds: float) -> float:
    """Seconds that compute's own thread takes to ask for a small request, as it does for what it fetches: to find a place, and
    on the way to the lane, and for the interpreter, which the lane's threads use too."""
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

        found: list[float] = []
        torch.set_num_threads(threads)  # what a lane's thread says is partly said for the process
        until_s = time.perf_counter() + seconds
        while not found or time.perf_counter() < until_s:
            begun_s = time.perf_counter()
            value, memory = landing.on_pages(torch.Size([LEAST_BYTES]), torch.uint8)
            arrival = Arrival("what is measured", 1)
            lane.submit(partial(read, memory, arrival))
            found.append(time.perf_counter() - begun_s)
            ahead.append((arrival, value))
            compute()
            if len(ahead) > AHEAD:
                ahead.popleft()[0].wait()
        lane.drain()
        ahead.clear()
        landing.close()
    return max(statistics.median(found), LEAST_S)


def few_ops(dtype: torch.dtype, rows: int = 512) -> Callable[[], object]:
    """The ops of one transformer block, of another one each time: some of them short, and their weights come from memory, as in
    training. A few large ops in a core's cache lose a third less to requests (docs/0041)."""
    width, wide, heads = 768, 2048, 12
    shapes = ((width, 3 * width), (width, width), (width, wide), (width, wide), (wide, width))
    sizes = [inner * outer for inner, outer in shapes]
    weights = torch.empty(FEW_BLOCKS, sum(sizes), dtype=dtype).normal_()  # in one: a mapping, which goes as a whole
    blocks = itertools.cycle([[w.view(s) for w, s in zip(row.split(sizes), shapes, strict=True)] for row in weights])
    x = torch.randn(rows, width).to(dtype)

    def normed(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(values.float(), (width,)).to(dtype)

    def run() -> object:
        into_heads, out_of_heads, gate, up, down = next(blocks)
        query, key, value = (normed(x) @ into_heads).view(1, rows, 3, heads, -1).transpose(1, 3).unbind(2)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = x + attended.transpose(1, 2).reshape(rows, width) @ out_of_heads
        z = normed(y)
        return y + (torch.nn.functional.silu(z @ gate) * (z @ up)) @ down

    run()
    return run


def few_kernels(device: str) -> Callable[[], object]:
    """Launches some of the smallest: what takes time is to launch them."""
    x = torch.ones(1, device=device)

    def run() -> object:
        for _ in range(FEW_KERNELS):
            x.add_(1)
        return x

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
