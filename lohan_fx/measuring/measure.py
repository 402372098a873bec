"""Measures the machine for a hardware profile: compute, memory, links, CPU Adam; drives are in `measure_nvme`.

Every rate is the median of repeated runs after a warm-up. Each measurement gets a share of the time budget and
takes about that long, except that it makes at least `_MIN_RUNS` runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lohan_fx.hardware import DTYPES, MEASUREMENT, HardwareProfile
from lohan_fx.measuring import machine, measure_nvme
from lohan_fx.measuring.measure_contention import drives_beside_compute, lost_by_launching, lost_to_requests
from lohan_fx.measuring.measure_nvme import checked_directories, rounded
from lohan_fx.runtime import adam
from lohan_fx.runtime.adam import AdamOptions

Announce = Callable[[str], None]

# Shares of the budget. The drives get the rest, whether or not there are any: no drives, less time.
_MATMUL_SHARE = 0.05
_BANDWIDTH_SHARE = 0.03
_ADAM_SHARE = 0.05
_OVERHEAD_SHARE = 0.02
_CLEARING_SHARE = 0.02
_LOST_SHARE = 0.3
_DRIVES_SHARE = 0.36

_MIN_RUNS = 3
_ROUNDS = 3  # a machine's speed drifts: rates are measured in turns, and the median of the rounds counts
_OTHER_LOAD = 0.1  # share of the processors that others may use before the rates are worth a warning
_COPY_BYTES = 256 * 2**20  # several times any cache but the very largest
_ADAM_CHUNK = 2**19
_ADAM_CHUNKS = 64  # 400 MB of master and moments: a large server's cache may hold 100 (docs/0049)
_ADAM_OPTIONS = AdamOptions(
    lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False, fused=True
)
_OPS_PER_RUN = 500
_PROC_STAT = Path("/proc/stat")


def measure(nvme: Sequence[str | Path], *, device: str | None, progress: bool, seconds: float) -> HardwareProfile:
    """The profile of this machine; see `HardwareProfile.measure`, which is the public name."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds!r}: expected a finite number of seconds above zero")
    device = _checked_device(device)
    directories = checked_directories(nvme)
    steps = len(DTYPES) + _ROUNDS + 1 + (measure_nvme.STEPS if directories else 0)
    with torch.no_grad(), _warning_of_other_load(), _announcing(progress, steps) as announce:

        def matmul(dtype: str) -> float:
            announce(f"matmul in {dtype}")
            return rounded(_matmul_flops_per_s(getattr(torch, dtype), device, seconds * _MATMUL_SHARE))

        flops = {dtype: matmul(dtype) for dtype in DTYPES}
        rates = _rates(device, seconds, announce)
        device_name = machine.gpu_name() if device == "cuda" else machine.cpu_name()
        host_bytes = machine.host_memory_bytes()
        profile = HardwareProfile(
            name=f"{device_name}, {len(directories)} NVMe director{'y' if len(directories) == 1 else 'ies'}",
            device=device,
            device_name=device_name,
            cpu_name=machine.cpu_name(),
            cpu_cores=machine.cpu_cores(),
            matmul_flops_per_s=flops,
            device_memory_bytes=torch.cuda.mem_get_info()[1] if device == "cuda" else host_bytes,
            host_memory_bytes=host_bytes,
            nvme=(),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            machine=machine.fingerprint(),
            **rates,
        )
        # Not by the rates alone, which other load may spoil: a block in bfloat16 without kernels for it takes seconds.
        dtype = profile.usual_dtype() if device != "cpu" or machine.computes_bfloat16() else torch.float32
        drives = drives_beside_compute(directories, device, dtype, seconds * _DRIVES_SHARE, announce)
        profile = dataclasses.replace(profile, nvme=drives)
        announce("what compute loses to requests")
        if device != "cpu":
            per_job = lost_by_launching(directories, device, seconds * _LOST_SHARE)
            return dataclasses.replace(profile, interpreter_s_per_job=rounded(per_job))
        per_request, per_byte, handover = map(rounded, lost_to_requests(directories, dtype, seconds * _LOST_SHARE))
        return dataclasses.replace(
            profile, io_core_s_per_request=per_request, io_core_s_per_byte=per_byte, handover_s=handover
        )


def _rates(device: str, seconds: float, announce: Announce) -> dict[str, Any]:
    """Those fields of a profile that one short action measures."""
    measured: Mapping[str, tuple[Callable[[str, float], float], float]] = {
        "memory_bytes_per_s": (_memory_bytes_per_s, _BANDWIDTH_SHARE),
        "host_memory_bytes_per_s": (_host_memory_bytes_per_s, _BANDWIDTH_SHARE),
        "h2d_bytes_per_s": (_h2d_bytes_per_s, _BANDWIDTH_SHARE),
        "d2h_bytes_per_s": (_d2h_bytes_per_s, _BANDWIDTH_SHARE),
        "adam_parameters_per_s": (_adam_parameters_per_s, _ADAM_SHARE),
        "op_overhead_s": (_op_overhead_s, _OVERHEAD_SHARE),
        "clearing_s_per_byte": (_clearing_s_per_byte, _CLEARING_SHARE),
    }
    found: dict[str, list[float]] = {field: [] for field in measured}
    for number in range(1, _ROUNDS + 1):
        announce(f"memory, copies and Adam: round {number} of {_ROUNDS}")
        for field, (measurement, share) in measured.items():
            found[field].append(measurement(device, seconds * share / _ROUNDS))
    return {field: rounded(statistics.median(rates)) for field, rates in found.items()}


def _checked_device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}: expected 'cpu', 'cuda' or None for the best there is")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch.cuda.is_available() is False: install a CUDA build or use 'cpu'")
    return device


def _median_seconds(action: Callable[[], object], device: str, seconds: float) -> float:
    """Median time of one `action` on `device`, which has been warmed up and is then repeated for `seconds`."""
    _seconds_of(action, device)
    deadline = time.perf_counter() + seconds
    runs: list[float] = []
    while len(runs) < _MIN_RUNS or time.perf_counter() < deadline:
        runs.append(_seconds_of(action, device))
    return statistics.median(runs)


def _seconds_of(action: Callable[[], object], device: str) -> float:
    if device != "cuda":
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin_event.record()
    action()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event)) / 1e3


def _matmul_flops_per_s(dtype: torch.dtype, device: str, seconds: float) -> float:
    """Rate of a square matmul, the largest (up to a limit) that can run several times in `seconds`.

    The size grows from a small one, since a dtype without kernels of its own can be a thousand times slower (float16
    on many processors). float32 uses TF32 exactly if the caller's torch settings do.
    """
    size, limit = 256, 8192 if device == "cuda" else 2048
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        multiply = partial(torch.mm, a, b, out=out)
        multiply()
        # The shortest of some: one that was held up would end the search at a size whose rate is nobody's.
        if size == limit or 8 * min(_seconds_of(multiply, device) for _ in range(3)) > seconds / (_MIN_RUNS + 2):
            return 2 * size**3 / _median_seconds(multiply, device, seconds)
        size *= 2


def _memory_bytes_per_s(device: str, seconds: float) -> float:
    """Traffic of an addition: two tensors read, one written."""
    a, b, out = (torch.ones(_COPY_BYTES // 4, device=device) for _ in range(3))
    return 3 * _COPY_BYTES / _median_seconds(lambda: torch.add(a, b, out=out), device, seconds)


def _host_memory_bytes_per_s(device: str, seconds: float) -> float:
    """Traffic of a copy within host memory: one buffer read, one written."""
    return 2 * _copy_bytes_per_s(_host_buffer("cpu"), _host_buffer("cpu"), "cpu", seconds)


def _h2d_bytes_per_s(device: str, seconds: float) -> float:
    return _copy_bytes_per_s(_host_buffer(device), _device_buffer(device), device, seconds)


def _d2h_bytes_per_s(device: str, seconds: float) -> float:
    return _copy_bytes_per_s(_device_buffer(device), _host_buffer(device), device, seconds)


def _copy_bytes_per_s(source: torch.Tensor, target: torch.Tensor, device: str, seconds: float) -> float:
    return _COPY_BYTES / _median_seconds(lambda: target.copy_(source, non_blocking=True), device, seconds)


def _host_buffer(device: str) -> torch.Tensor:
    """Host memory as the runtime uses it: pinned where there is a GPU. Filled, so that every page exists."""
    return torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=device == "cuda").fill_(1)


def _device_buffer(device: str) -> torch.Tensor:
    return torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).fill_(1)


def _adam_parameters_per_s(device: str, seconds: float) -> float:
    """Rate of the runtime's update of a chunk (two casts and fused AdamW) on the processor, whatever the compute device
    is, with all threads, over more memory than a cache holds."""
    del device
    chunks = [[torch.rand(_ADAM_CHUNK) for _ in range(3)] for _ in range(_ADAM_CHUNKS)]
    half, each = torch.rand(_ADAM_CHUNK).bfloat16(), min(adam.part_elements(), _ADAM_CHUNK)
    gradient = torch.empty(each)

    def update() -> None:
        for chunk in chunks:
            for master, mean, square, cast in zip(*(array.split(each) for array in (*chunk, half)), strict=True):
                gradient.copy_(cast)
                adam.update(_ADAM_OPTIONS, 1, master, gradient, mean, square)
                cast.copy_(master)

    return _ADAM_CHUNK * _ADAM_CHUNKS / _median_seconds(update, "cpu", seconds)


def _op_overhead_s(device: str, seconds: float) -> float:
    """Seconds per eager op on a tensor so small that the arithmetic takes no time."""
    small = torch.ones(16, device=device)

    def run() -> None:
        for _ in range(_OPS_PER_RUN):
            torch.add(small, small)

    return _median_seconds(run, device, seconds) / _OPS_PER_RUN


def _clearing_s_per_byte(device: str, seconds: float) -> float:
    """What an op takes longer to fill memory that the kernel clears page by page as it is touched, as all blocks that the C
    library maps anew are, than to fill what is there. Nothing where the compute device has memory of its own."""
    if device != "cpu":
        return HardwareProfile.clearing_s_per_byte
    there = _host_buffer(device)
    begun_s, taken_s = time.perf_counter(), list[float]()
    while len(taken_s) < _MIN_RUNS or time.perf_counter() - begun_s < seconds:
        fresh_s = _seconds_of(lambda: torch.empty(_COPY_BYTES, dtype=torch.uint8).fill_(1), device)
        taken_s.append(fresh_s - _seconds_of(lambda: there.fill_(1), device))
    return max(statistics.median(taken_s) / _COPY_BYTES, HardwareProfile.clearing_s_per_byte)


def _versions() -> dict[str, str]:
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "linux": os.uname().release,
        "measurement": MEASUREMENT,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # run from a checkout
        versions["lohan_fx"] = importlib.metadata.version("lohan-fx")
    return versions


@contextlib.contextmanager
def _warning_of_other_load() -> Iterator[None]:
    """Warn if others kept processors busy meanwhile: an operation on all cores then waits for whole time slices."""
    begin_s, begin_others_s = time.perf_counter(), _processor_seconds_of_others()
    yield
    busy = (_processor_seconds_of_others() - begin_others_s) / (time.perf_counter() - begin_s)
    if busy > _OTHER_LOAD * machine.cpu_cores():
        warnings.warn(
            f"other processes kept {busy:.1f} of {machine.cpu_cores()} processors busy while the machine was measured: "
            "its rates are lower than when it is idle; measure again when nothing else runs",
            RuntimeWarning,
            stacklevel=5,  # the caller of HardwareProfile.measure
        )


def _processor_seconds_of_others() -> float:
    """Processor time since boot that went neither to this process nor to idling."""
    ticks = [int(value) for value in _PROC_STAT.read_text().split("\n", 1)[0].split()[1:]]
    user, nice, system, _idle, _iowait, *stolen = ticks[:8]
    own = os.times()
    return (user + nice + system + sum(stolen)) / os.sysconf("SC_CLK_TCK") - own.user - own.system


@contextlib.contextmanager
def _announcing(progress: bool, steps: int) -> Iterator[Announce]:
    """A function that names the measurement that begins: on stderr, one live line on a terminal, else a line each."""
    if not progress:
        yield lambda label: None
    elif not sys.stderr.isatty():
        yield lambda label: print(f"lohan_fx: measuring {label}", file=sys.stderr, flush=True)
    else:
        columns = (TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=steps, completed=-1)
            yield lambda label: bar.update(task, description=label, advance=1)
