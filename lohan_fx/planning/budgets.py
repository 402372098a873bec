"""budgets: how much memory a run may use, and what of it is spent before any plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch

from lohan_fx.cost_models.lohan import STATE_BYTES
from lohan_fx.errors import InfeasiblePlan
from lohan_fx.hardware import HardwareProfile
from lohan_fx.plan import ParameterPlan, Windows
from lohan_fx.planning.plan_builder import layer_of_parameter
from lohan_fx.planning.problem import SMALL_PARAMETER_ELEMENTS, Budgets, ParameterFacts
from lohan_fx.runtime.huge_pages import HUGE_PAGE_BYTES
from lohan_fx.runtime.state_buffer import buffer_bytes, states_bytes

MIB = 1 << 20
CAPTURE_BYTES = 64 * MIB
CAPTURE_BYTES_PER_PARAMETER = MIB
"""What tracing, guards, graphs and the allocator's slack take: so much, and so much per parameter tensor (a parameter
brings some twenty nodes). Measured on Llama of 12 to 24 layers (docs/0003)."""
AGAIN_BYTES_PER_PARAMETER = 0.65 * MIB
"""What a capture for another shape leaves beside the first, per parameter tensor; its kernels too (docs/0048)."""
BYTES_PER_THREAD = 8 * MIB
"""What each of torch's threads but the first keeps for a CPU's matmuls once it has run one: buffers in which the library lays out
what it multiplies (docs/0054)."""
GPU_KERNELS_BYTES = 256 * MIB
"""What CUDA's libraries take of host memory as their kernels are first called (docs/0042)."""
STRETCHES_BYTES = 3 * HUGE_PAGE_BYTES
"""What huge pages take beyond the values in them where device and host share memory: values lie in three stretches of these, for
what is brought, for what outlives its graph and for what dies with it, and each stretch ends in one that is not full (docs/0026).
"""
UNLIMITED_SHARE = 0.8
"""Without a promise, this share of the memory that is available now."""
DEVICE_SHARE = 0.9
"""The same of a GPU's: the rest is for what its allocator cannot use and kernels' own workspaces."""
LEAST_BUFFERS = 4
"""Per purpose: a read, a copy or an update, and a write at the same time, and one to spare."""
BUFFERS_PER_DRIVE = 2
"""Of several drives (docs/0032)."""
LARGER_ON_A_CPU, LARGER_BESIDE_A_GPU = (2,), (32, 64)
"""GiB of host memory from each of which on requests are twice as large."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def parse_bytes(value: int | float | str, name: str) -> int:
    """Bytes from a number or from text like ``"6GiB"``; ``ValueError`` or ``TypeError`` names the argument."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{name} is {value!r}: expected bytes as a number, or text such as '6GiB'")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b?)\s*", value.lower())
        unit = found.group(2) if found else "?"
        unit = unit if unit in _UNITS else f"{unit}b"
        if found is None or unit not in _UNITS:
            raise ValueError(f"{name} is {value!r}: expected bytes as a number, or text such as '6GiB' or '800MB'")
        nbytes = float(found.group(1)) * _UNITS[unit]
    else:
        nbytes = value
    if not 1 <= nbytes < 2**63:
        raise ValueError(f"{name} is {value!r}: expected at least one byte, and fewer than 2**63")
    return int(nbytes)


def available_memory_bytes() -> int:
    """Memory that this machine could give to a new process now."""
    with open("/proc/meminfo") as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line: pass host_memory=... in bytes")


def captured_again_bytes(parameters: int, *, symbolic: bool) -> int:
    """What a graph of so many parameter tensors takes of the memory for the plans of others that come after it; twice as much
    where it holds for many sizes."""
    return round((2 if symbolic else 1) * AGAIN_BYTES_PER_PARAMETER * parameters)


def choose_windows(
    host_memory_bytes: int, parameters: Sequence[ParameterFacts], *, shared: bool = False, drives: int = 1
) -> Windows:
    """Windows and staging for a promise of ``host_memory_bytes``: about an eighth of it, less where that is plenty.

    What the planner begins with; ``staging`` changes buffers and sizes by what that saves. Beside a GPU a layer's gradients
    come in a burst, and what host memory holds of them is what the drives work on until the next. On a CPU (``shared``) each
    request takes time from compute, beside a GPU from the thread that launches, so there are fewer and larger ones where that
    costs no larger share of the promise (docs/0030, docs/0044). A request goes to one of the ``drives``: several take more
    buffers, as far as there is room (docs/0032).
    """
    layer_bytes, layer_elements = largest_layer(parameters)
    roomy = host_memory_bytes >= 1024 * MIB
    small = host_memory_bytes < 768 * MIB
    times = 2 ** sum(host_memory_bytes >= gib << 30 for gib in (LARGER_ON_A_CPU if shared else LARGER_BESIDE_A_GPU))
    chunk_elements = times * ((128 << 10) if small else (1 << 20) if roomy else (512 << 10))
    io_bytes = times * (MIB if small else 4 * MIB if roomy else 2 * MIB)
    of_each = buffer_bytes(chunk_elements) + (2 if shared else 3) * io_bytes
    room = max(0, min(host_memory_bytes // 4, host_memory_bytes // 2 - captured_bytes(len(parameters))))
    buffers = max(LEAST_BUFFERS, min(BUFFERS_PER_DRIVE * drives, room // of_each))
    burst = 0 if shared else min(-(-layer_elements // chunk_elements), host_memory_bytes // 64 // (4 * chunk_elements))
    return Windows(
        fetch_bytes=min(2 * layer_bytes, host_memory_bytes // 8),
        swap_in_bytes=min(64 * MIB, host_memory_bytes // 16),
        gradient_bytes=min(layer_bytes, host_memory_bytes // 8),
        chunk_elements=chunk_elements,
        io_bytes=io_bytes,
        io_buffers=buffers,
        optimizer_buffers=buffers,
        gradient_buffers=max(LEAST_BUFFERS, burst),
        swap_out_bytes=min(64 * MIB, host_memory_bytes // 16),
    )


def largest_layer(parameters: Sequence[ParameterFacts]) -> tuple[int, int]:
    """The most compute-dtype bytes, and the most trained elements, that a layer has."""
    nbytes: dict[str, int] = {}
    elements: dict[str, int] = {}
    for parameter in parameters:
        layer = layer_of_parameter(parameter.name)
        nbytes[layer] = nbytes.get(layer, 0) + parameter.bytes
        elements[layer] = elements.get(layer, 0) + parameter.numel * parameter.trainable
    return max(nbytes.values(), default=0), max(elements.values(), default=0)


def mean_request_bytes(parameters: Iterable[ParameterFacts | ParameterPlan], windows: Windows) -> int:
    """The mean read or write of a step that streams ``parameters`` and their states: requests end where tensors do.

    What a request takes grows with its bytes and begins above nothing, so drives take for many what they take for as many of
    their mean size. Norms and biases do not count: they stay in memory where anything does.
    """
    total_bytes = requests = 0
    for p in parameters:
        if p.numel <= SMALL_PARAMETER_ELEMENTS:
            continue
        if p.trainable:  # master and moments are read and written, and the copy that graphs compute with is written
            copied = p.bytes != 4 * p.numel  # else the master is that
            total_bytes += 2 * STATE_BYTES * p.numel + copied * p.bytes
            requests += (4 + copied) * -(-p.numel // windows.chunk_elements)
        total_bytes += 2 * p.bytes  # fetched by the forward and by the backward
        requests += 2 * -(-p.bytes // windows.io_bytes)
    return total_bytes // requests if requests else windows.io_bytes


def staging_bytes(windows: Windows, *, shared: bool = False) -> int:
    """Bytes of the host pool's staging buffers that may be touched. Where device and host share memory (``shared``),
    parameters are read and gradients updated in place, and of the buffer of compute's own updates only the gradient is used.
    """
    gradients = 0 if shared else windows.gradient_buffers * 4 * windows.chunk_elements
    own = 4 * windows.chunk_elements if shared else buffer_bytes(windows.chunk_elements)
    return (2 if shared else 3) * windows.io_buffers * windows.io_bytes + states_bytes(windows) + gradients + own


def fixed_bytes(windows: Windows, parameters: int, *, shared: bool = False) -> int:
    """Host memory that is spent whatever the plan of a model with so many parameter tensors."""
    beside = STRETCHES_BYTES if shared else GPU_KERNELS_BYTES
    return staging_bytes(windows, shared=shared) + captured_bytes(parameters) + beside


def captured_bytes(parameters: int) -> int:
    """Host memory that capturing a model of so many parameter tensors leaves in use."""
    return CAPTURE_BYTES + CAPTURE_BYTES_PER_PARAMETER * parameters


def threads_bytes(hw: HardwareProfile, threads: int) -> int:
    """Host memory that so many threads of torch keep for matmuls on the device of ``hw``."""
    return BYTES_PER_THREAD * (threads - 1) if hw.device == "cpu" else 0


def make_budgets(
    hw: HardwareProfile,
    host_memory_bytes: int | None,
    device_memory_bytes: int | None,
    windows: Windows,
    parameters: int = 0,
    kernels_bytes: int = 0,
    windows_of: Callable[[int], Windows] | None = None,
) -> Budgets:
    """The budgets of a run with so many parameter tensors; ``kernels_bytes``: what a compiler and torch's threads take.
    ``windows_of``: which windows another promise gets; None: these.

    Raises ``InfeasiblePlan`` where not even the fixed part fits.
    """
    shared = hw.device == "cpu"
    host = host_memory_bytes or default_host_memory_bytes(hw)
    device = device_memory_bytes or (host if shared else default_device_memory_bytes(hw))

    def fixed_of(promise_bytes: int) -> int:
        found = windows if windows_of is None else windows_of(promise_bytes)
        return fixed_bytes(found, parameters, shared=shared) + kernels_bytes

    fixed = fixed_bytes(windows, parameters, shared=shared) + kernels_bytes
    if fixed >= host:
        least = least_promise(fixed, lambda promise_bytes: fixed_of(promise_bytes) + 1)
        raise InfeasiblePlan(
            f"host_memory={host:,} bytes is too small for any plan: staging and captured graphs alone take {fixed:,}; "
            f"{fixed - host:,} bytes are missing; pass host_memory of at least {least:,}"
        )
    return Budgets(host, device, fixed, shared)


def least_promise(from_bytes: int, needed: Callable[[int], int]) -> int:
    """The least promise from ``from_bytes`` on, in whole MiB, that holds what is ``needed`` of it, which grows more slowly
    than the promise."""
    promise = _whole(from_bytes)
    while (more := _whole(needed(promise))) > promise:
        promise = more
    return promise


def _whole(nbytes: int) -> int:
    return -(-nbytes // MIB) * MIB


def default_device_memory_bytes(hw: HardwareProfile) -> int:
    """What a run may use of a GPU when the user promises nothing: not what other processes, or a screen, have of it."""
    most = int(hw.device_memory_bytes * DEVICE_SHARE)
    if not (torch.cuda.is_available() and hw.is_this_machine()):
        return most
    # What this process has is the model's, whose parameters leave, or unused in the allocator.
    free_bytes = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return min(most, int(free_bytes * DEVICE_SHARE))


def default_host_memory_bytes(hw: HardwareProfile) -> int:
    """What a run may use when the user promises nothing."""
    return int(min(hw.host_memory_bytes, available_memory_bytes()) * UNLIMITED_SHARE)
