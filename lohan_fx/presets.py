"""The machines of the papers, as hardware profiles.

A number is followed by its source: an id of the papers' claims (L- LoHan, F- Fuyou, S- LSP-Offload), "d1" for what
our arithmetic over several claims fixes, "data sheet" for the maker's figure, or "estimate" with its reason where no
paper gives one. Memory sizes are binary, as modules are sold; drives are decimal. LoHan's and Fuyou's server is the
same one (L-HW-01, F-HW-01) with one GPU changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lohan_fx.hardware import HardwareProfile, NvmeProfile, Prices

_GIB = 2**30


@dataclass(frozen=True)
class _Gpu:
    """`half_flops_per_s` holds for float16 and bfloat16 with float32 accumulation, the way PyTorch multiplies."""

    device_name: str
    half_flops_per_s: float
    float32_flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    usd: float | None = None


# Estimates common to all GPUs. float32 without TF32 reaches 0.8 and pointwise kernels reach 0.9 of the data sheet in
# ordinary PyTorch programs; the data sheet's figure is the one multiplied below. The half-precision rate of a GPU
# without a measured one is 0.99 of the data sheet, which is the ratio d1 finds on the RTX 4090 (164 of 165.2).
_FLOAT32 = 0.8
_POINTWISE = 0.9
_HALF = 0.99

_RTX4090 = _Gpu(
    "NVIDIA GeForce RTX 4090",
    half_flops_per_s=164e12,  # d1: 87 TFLOPS are 53% of peak (L-ME-15), 156 are 95% (F-ME-01)
    float32_flops_per_s=_FLOAT32 * 82.6e12,  # data sheet
    memory_bytes_per_s=_POINTWISE * 1008e9,  # data sheet
    memory_bytes=24 * _GIB,  # L-HW-02
    usd=1600,  # L-HW-04
)
_RTX4080 = _Gpu(
    "NVIDIA GeForce RTX 4080",
    half_flops_per_s=_HALF * 97.5e12,  # data sheet
    float32_flops_per_s=_FLOAT32 * 48.7e12,  # data sheet
    memory_bytes_per_s=_POINTWISE * 716.8e9,  # data sheet
    memory_bytes=16 * _GIB,  # L-HW-02
)
_RTX3090 = _Gpu(
    "NVIDIA GeForce RTX 3090",
    half_flops_per_s=_HALF * 71.2e12,  # data sheet
    float32_flops_per_s=_FLOAT32 * 35.6e12,  # data sheet
    memory_bytes_per_s=_POINTWISE * 936e9,  # data sheet
    memory_bytes=24 * _GIB,  # L-HW-02
)
_A100 = _Gpu(
    "NVIDIA A100 80GB PCIe",
    # Estimate: 202 TFLOPS were reached (F-ME-03), here taken to be 95% of peak as on the RTX 4090. Fuyou's own
    # "172 is 86%" would make the peak 200, less than what was reached.
    half_flops_per_s=213e12,
    float32_flops_per_s=_FLOAT32 * 19.5e12,  # data sheet
    memory_bytes_per_s=_POINTWISE * 1935e9,  # data sheet
    memory_bytes=80 * _GIB,  # F-HW-01
    usd=14177,  # F-HW-03, L-HW-04
)
_A1000_LAPTOP = _Gpu(
    "NVIDIA RTX A1000 Laptop GPU",
    # Estimate: 2048 cores and 64 tensor cores of the Ampere generation at 1.14 GHz: 18.7 and 4.7 TFLOPS.
    half_flops_per_s=_HALF * 18.7e12,
    float32_flops_per_s=_FLOAT32 * 4.7e12,
    memory_bytes_per_s=_POINTWISE * 176e9,  # estimate: 128 bits of GDDR6 at 11 Gbit/s
    memory_bytes=4 * _GIB,  # S-HW-01
)


def _p5510(count: int) -> tuple[NvmeProfile, ...]:
    """`count` Intel P5510, each with a twelfth of what twelve reach; Fuyou models an array as per-drive * N (F-EQ-02).

    Twelve read 32 GB/s and write 25 GB/s (d1, set F3: 182 GB each way in 13 s, L-ES-06). A single P5510 reads 6.5 GB/s
    by its data sheet, so presets with few drives are slower than such a server would be.
    """
    read_bytes_per_s, write_bytes_per_s = 32e9 / 12, 25e9 / 12
    drive = NvmeProfile(
        directory="",
        read_bytes_per_s=read_bytes_per_s,
        write_bytes_per_s=write_bytes_per_s,
        mixed_bytes_per_s=2 / (1 / read_bytes_per_s + 1 / write_bytes_per_s),  # simplex: times add (L-HW-08)
        capacity_bytes=3_840_000_000_000,  # L-HW-01
    )
    return (drive,) * count


def _server(name: str, gpu: _Gpu, drives: int = 12, memory_gib: int = 768) -> HardwareProfile:
    """LoHan's and Fuyou's server with one GPU. The papers vary GPU, number of drives and host memory."""
    # L-HW-04, F-HW-03: server without GPU and drives, and one P5510.
    prices = None if gpu.usd is None else Prices(server_usd=14098, gpu_usd=gpu.usd, ssd_usd=308)
    return HardwareProfile(
        name=name,
        device="cuda",
        device_name=gpu.device_name,
        cpu_name="2x Intel Xeon Gold 5320 @ 2.20 GHz",  # L-HW-01; Fuyou prints one for the same server (F-HW-01)
        cpu_cores=104,  # data sheet: 26 cores and 52 threads each
        matmul_flops_per_s=_matmul(gpu),
        memory_bytes_per_s=gpu.memory_bytes_per_s,
        # Estimate: 0.6 of the data sheet's 409.6 GB/s (2 sockets, 8 channels of DDR4-3200 each).
        host_memory_bytes_per_s=246e9,
        h2d_bytes_per_s=21.2e9,  # d1: 213 GB in 10 s, 5.96 s / 0.59 (L-ES-07, L-ES-08)
        d2h_bytes_per_s=21.2e9,  # d1, duplex (L-HW-08)
        # Estimate: Adam moves 28 bytes per parameter, which 246 GB/s would allow 8.8e9 times a second; two sockets
        # sharing memory reach less. 5e9 takes 2.6 s for 13B, well below its 13 s of SSD traffic as L-AL-07 says.
        adam_parameters_per_s=5e9,
        device_memory_bytes=gpu.memory_bytes,
        host_memory_bytes=memory_gib * _GIB,  # L-HW-01: 768
        nvme=_p5510(drives),
        op_overhead_s=5e-6,  # estimate: an eager CUDA op of PyTorch 2.0 on such a processor
        measured_at="",
        versions={"torch": "2.0.0+cu118", "cuda": "11.8"},  # L-HW-01
        machine="",
        prices=prices,
    )


def _lsp_workstation() -> HardwareProfile:
    """LSP-Offload's workstation; its experiments use no SSD."""
    return replace(
        _server("rtx4090-tr3970x", _RTX4090, drives=0, memory_gib=252),  # S-HW-01
        cpu_name="AMD Ryzen Threadripper 3970X",  # S-HW-01
        cpu_cores=64,  # data sheet: 32 cores, 64 threads
        host_memory_bytes_per_s=61e9,  # estimate: 0.6 of 102 GB/s (4 channels of DDR4-3200)
        h2d_bytes_per_s=15e9,  # S-TB-01 gives 10 to 20 GB/s: the middle
        d2h_bytes_per_s=15e9,
        adam_parameters_per_s=2.2e9,  # estimate: 61 GB/s / 28 bytes; S-TB-01's 3.6e9 has half the bytes per parameter
        versions={},
        prices=None,
    )


def _lsp_laptop() -> HardwareProfile:
    """LSP-Offload's laptop; its experiments use no SSD."""
    return replace(
        _lsp_workstation(),
        name="a1000-i7-12800h",
        device_name=_A1000_LAPTOP.device_name,
        cpu_name="Intel Core i7-12800H",  # S-HW-01
        cpu_cores=20,  # data sheet: 14 cores, 20 threads
        matmul_flops_per_s=_matmul(_A1000_LAPTOP),
        memory_bytes_per_s=_A1000_LAPTOP.memory_bytes_per_s,
        host_memory_bytes_per_s=46e9,  # estimate: 0.6 of 76.8 GB/s (2 channels of DDR5-4800)
        h2d_bytes_per_s=12.5e9,  # S-TB-05 gives 10 to 15 GB/s: the middle
        d2h_bytes_per_s=12.5e9,
        adam_parameters_per_s=1.6e9,  # estimate: 46 GB/s / 28 bytes; S-TB-05's time is probably ten times too long
        device_memory_bytes=_A1000_LAPTOP.memory_bytes,
        host_memory_bytes=32 * _GIB,  # S-HW-01
    )


def _matmul(gpu: _Gpu) -> dict[str, float]:
    half = gpu.half_flops_per_s
    return {"float32": gpu.float32_flops_per_s, "bfloat16": half, "float16": half}


# The sizes the papers vary: GPUs L-HW-01 and F-HW-01; up to 12 drives (R-FG-01); 128 to 768 GB (L-ME-11, L-TB-05).
PRESETS: Mapping[str, HardwareProfile] = {
    profile.name: profile
    for profile in (
        _server("rtx4090-12xP5510", _RTX4090),
        *(_server(f"rtx4090-{drives}xP5510", _RTX4090, drives) for drives in (1, 2, 3, 6)),
        *(_server(f"rtx4090-12xP5510-{gib}GB", _RTX4090, memory_gib=gib) for gib in (128, 256, 512)),
        _server("rtx4080-12xP5510", _RTX4080),
        _server("rtx4080-12xP5510-256GB", _RTX4080, memory_gib=256),
        _server("rtx3090-12xP5510", _RTX3090),
        _server("a100-80g-12xP5510", _A100),
        _lsp_workstation(),
        _lsp_laptop(),
    )
}
