"""system_memory: what the papers' systems themselves need to train a model, whatever our runtime can do with it.

Their maximal model sizes follow from a few constants, which the papers fix by what trains and what does not
(``benchmarks/paper_memory.py`` derives them, and judges each claim without itself). What our planner can do under the
policy of the same name is another question, and often more: ``lohan-fx plan --max-model`` shows both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from lohan_fx.models.transformer_counts import TransformerCounts

BLOCK_COPIES = 4
"""Of a block on LoHan's GPU: parameters and gradients, each twice so that transfers overlap computing."""
IN_GPU_BYTES = 16
"""Per parameter: P16, G16, P32 and OS32 (LoHan table II)."""
GEMINI_HOST_BYTES = 8
"""Per parameter: P16, P32 and G16; its optimizer states go to the drives (Fuyou sec. 5.1)."""
GEMINI_NVME_BYTES = 8
"""Per parameter: OS32, two moments."""
NVME_BYTES = 14
"""Per parameter, of the systems that stream: P16, P32 and OS32."""
LOHAN_HOST_BYTES = 137.3
"""Per parameter of one block, for states in flight: with inter-block activations in 128 GB, 70B trains at batch 16 and
not at 24 (LoHan table V)."""
ZERO_INFINITY_BYTES = (93.9e9, 5.28)
"""(per process, per parameter): the centroid of what the papers' yes and no allow."""
FP16_BYTES = 2


@dataclass(frozen=True)
class Needed:
    """Bytes of memory and, of the systems that keep something on drives, of those."""

    device_bytes: float
    host_bytes: float
    nvme_bytes: float = 0.0

    def short(self, device_bytes: float, host_bytes: float, nvme_bytes: float = math.inf) -> dict[str, float]:
        """Tier -> bytes that are missing; empty where all suffice."""
        over = {
            "device": self.device_bytes - device_bytes,
            "host": self.host_bytes - host_bytes,
            "nvme": self.nvme_bytes - nvme_bytes,
        }
        return {tier: nbytes for tier, nbytes in over.items() if nbytes > 0}


class SystemMemory(Protocol):
    """What a system needs for one model and batch."""

    def needs(self, c: TransformerCounts) -> Needed: ...


@dataclass(frozen=True)
class StreamedMemory:
    """LoHan and Fuyou: a few blocks on the GPU, states in flight in main memory; ``activations_in_main``: variants that
    never write activations to the drives also hold the tensors between blocks there."""

    host_bytes_per_block_parameter: float = LOHAN_HOST_BYTES
    activations_in_main: bool = False

    def needs(self, c: TransformerCounts) -> Needed:
        states = self.host_bytes_per_block_parameter * c.dims.block_parameters
        activations = c.inter_block_bytes if self.activations_in_main else 0.0
        device = BLOCK_COPIES * FP16_BYTES * c.dims.block_parameters + c.block_peak_bytes
        return Needed(device, states + activations, NVME_BYTES * c.dims.parameters)


@dataclass(frozen=True)
class ZeroInfinityMemory:
    """ZeRO-Infinity: each process needs its own buffers, states in flight are shared among them; the GPU never limits
    (F-ME-06): it holds a block and its gradients."""

    bytes_per_process: float = ZERO_INFINITY_BYTES[0]
    bytes_per_parameter: float = ZERO_INFINITY_BYTES[1]
    processes: int = 1

    def needs(self, c: TransformerCounts) -> Needed:
        shared = self.bytes_per_parameter * c.dims.parameters
        host = self.processes * self.bytes_per_process + shared
        return Needed(_one_block(c), host, NVME_BYTES * c.dims.parameters)


@dataclass(frozen=True)
class HostMemory:
    """States in main memory, ``host_bytes_per_parameter``, or on drives; the tensors between blocks in main memory too, or
    on the GPU."""

    host_bytes_per_parameter: float = IN_GPU_BYTES
    checkpoints_on_device: bool = False
    nvme_bytes_per_parameter: float = 0.0

    def needs(self, c: TransformerCounts) -> Needed:
        inter = c.inter_block_bytes
        on_device, in_host = (inter, 0.0) if self.checkpoints_on_device else (0.0, inter)
        host = self.host_bytes_per_parameter * c.dims.parameters + in_host
        return Needed(_one_block(c) + on_device, host, self.nvme_bytes_per_parameter * c.dims.parameters)


@dataclass(frozen=True)
class DeviceMemory:
    """All states on the GPU; the activations that come on top are counted for one block only, in its favour."""

    def needs(self, c: TransformerCounts) -> Needed:
        return Needed(IN_GPU_BYTES * c.dims.parameters + c.block_peak_bytes, 0.0)


def _one_block(c: TransformerCounts) -> float:
    return 2 * FP16_BYTES * c.dims.block_parameters + c.block_peak_bytes


_STREAMED, _IN_MAIN = StreamedMemory(), StreamedMemory(activations_in_main=True)
MEMORY: Mapping[str, SystemMemory] = {
    **dict.fromkeys(("lohan", "lohan-naive", "lohan-zero", "lohan-g10", "fuyou", "fuyou-no-overlap"), _STREAMED),
    **dict.fromkeys(("lohan-cpuact", "lohan-ds", "lohan-cap", "lohan-cm"), _IN_MAIN),
    "zero-infinity": ZeroInfinityMemory(),
    **dict.fromkeys(("zero-offload", "l2l", "stronghold"), HostMemory()),
    "gemini": HostMemory(GEMINI_HOST_BYTES, checkpoints_on_device=True, nvme_bytes_per_parameter=GEMINI_NVME_BYTES),
    **dict.fromkeys(("flashneuron", "capuchin", "checkmate", "str", "vdnn", "superneurons"), DeviceMemory()),
}
"""By policy. Angel-PTM, G10 and SwapAdvisor are not here: the papers say too little of their memory; nor is what only we have."""
