"""paper_constants: rates of the papers' machines, each from other claims than the one that is judged (mechanisms d1).

Two compute rates of the RTX 4090 are kept apart (d2, c3.15): what training reached where the papers print seconds
(5.96 s for 13B's forward), and the peak of one block alone, to which LoHan's shares of peak refer.
"""

from __future__ import annotations

from dataclasses import dataclass

from paper_evidence import Evidence

from lohan_fx.hardware import HardwareProfile
from lohan_fx.models.model_presets import named
from lohan_fx.models.transformer_counts import TransformerCounts

TOKENS = 1024
SHEET_4090 = 165.2e12
"""FLOP/s, fp16 with fp32 accumulation, NVIDIA's Ada white paper."""
A100_PEAK = 200e12
"""FLOP/s: Fuyou's "172 TFLOPS are 86 %" (mechanisms c3.16)."""


def counts(model: str, batch: int) -> TransformerCounts:
    return TransformerCounts(named(model), batch, TOKENS)


def thirteen() -> TransformerCounts:
    """13B at batch 32, the setting of most measurements."""
    return counts("gpt3-13b", 32)


def gib(value: float) -> float:
    return value * 2**30


@dataclass(frozen=True)
class Gpu:
    """``peak``: of a block alone; ``reached``: in a training step of the baselines. FLOP/s."""

    peak: float
    reached: float


def rtx4090(e: Evidence) -> Gpu:
    return Gpu(peak_4090(e), reached_4090(e))


def rtx3090(e: Evidence) -> Gpu:
    e.given("preset rtx3090-12xP5510")
    rate = HardwareProfile.preset("rtx3090-12xP5510").matmul_flops_per_s["float16"]
    return Gpu(rate, rate)


def a100(e: Evidence) -> Gpu:
    e.given("mechanisms c3.16 (A100 peak)")
    return Gpu(A100_PEAK, A100_PEAK)


def peak_4090(e: Evidence) -> float:
    """156 TFLOPS are 95 % of it; else the data sheet."""
    if e.judged in ("F-ME-01", "L-ME-15"):
        e.given("data sheet RTX 4090")
        return SHEET_4090
    return float(e.of("F-ME-01", "fuyou_tflops") * 1e12 / e.of("L-ME-15", "lt70B")[1])


def reached_4090(e: Evidence) -> float:
    """13B's forward takes 5.96 s; else its recomputing backward takes 17.6 s."""
    c = thirteen()
    # The head's FLOPs are not recomputed (c3.6).
    backward = 3 * c.forward_flops - c.head_flops
    return e.first(
        (("L-ES-07",), lambda: c.forward_flops / e.of("L-ES-07", "gpu_s")),
        (("L-ME-07",), lambda: backward / e.of("L-ME-07", "gpu_s")),
    )


def link(e: Evidence) -> float:
    """The GPU's link, bytes/s per direction: A_all leaves in a forward whose computing takes 59 % of it."""
    c = thirteen()
    return e.first(
        (
            ("L-ES-08",),
            lambda: c.all_bytes / (c.forward_flops / reached_4090(e) / e.of("L-ES-08", "gpu_share_fwd")),
        ),
        (("L-ES-07",), lambda: c.all_bytes / e.of("L-ES-07", "offload_s")),
    )


def drives(e: Evidence) -> float:
    """The twelve drives together, bytes/s of either direction: 182 GB each way in 13 s; else what makes 34 GB optimal."""
    if e.judged != "L-ES-06":
        return float(2 * e.of("L-ES-06", "GB_per_direction") * 1e9 / e.of("L-ES-06", "pcie_s"))
    from paper_steps import lohan_step

    wanted, slow, fast = e.of("L-ME-10", "swapped_GB") * 1e9, 20e9, 40e9
    # More bandwidth lets LoHan swap more, so this can be halved.
    for _ in range(30):
        middle = (slow + fast) / 2
        swapped = lohan_step(e, thirteen(), rtx4090(e).peak, ssd=middle, whole_layers=False).swapped
        slow, fast = (middle, fast) if swapped < wanted else (slow, middle)
    return fast


def adam(e: Evidence) -> float:
    """Parameters/s of a good CPU Adam on the server."""
    e.given("preset rtx4090-12xP5510 (Adam, an estimate)")
    return HardwareProfile.preset("rtx4090-12xP5510").adam_parameters_per_s


def host_memory(e: Evidence) -> float:
    e.given("preset rtx4090-12xP5510 (host memory bandwidth, an estimate)")
    return HardwareProfile.preset("rtx4090-12xP5510").host_memory_bytes_per_s


def gpu_memory_rate(e: Evidence) -> float:
    e.given("preset rtx4090-12xP5510 (GPU memory bandwidth, 0.9 of the data sheet)")
    return HardwareProfile.preset("rtx4090-12xP5510").memory_bytes_per_s


# --- the baselines' effective rates -----------------------------------------------------------------------------------


def zero_ssd(e: Evidence) -> float:
    """What the drives give ZeRO-Infinity in a backward: 2P in and 2P out in 1/1.91 of the GPU's 2 FLOP_f."""
    c = thirteen()
    return e.first(
        (
            ("L-ME-08",),
            lambda: 4 * c.dims.parameters * e.of("L-ME-08", "vs_ssd") / (2 * c.forward_flops / reached_4090(e)),
        ),
        (("L-ME-07",), lambda: 4 * c.dims.parameters / e.of("L-ME-07", "pcie_ssd_s")),
    )


def pageable(e: Evidence) -> float:
    """The link's rate to pageable memory: the gradients' 2P take 3.18 s; else what ZeRO-Infinity gets from the drives,
    for which the data also passes through such memory."""
    return e.first(
        (("L-ME-07",), lambda: 2 * thirteen().dims.parameters / e.of("L-ME-07", "pcie_g2m_s")),
        ((), lambda: zero_ssd(e)),
    )
