"""paper_memory: which models and batches fit, per system, with constants from the papers' other yes and no."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from paper_constants import counts, gib
from paper_evidence import MOST_ERROR, Evidence

from lohan_fx.forecasting.system_memory import StreamedMemory, ZeroInfinityMemory
from lohan_fx.models.model_presets import named
from lohan_fx.models.transformer_counts import TransformerCounts

LOHAN_MODELS = ("6b", "13b", "30b", "70b", "135b", "175b", "276b", "412b")
BATCHES = range(8, 257, 8)


def parameters(size: str) -> float:
    return float(named(f"gpt3-{size}").parameters)


def nearest(billions: float) -> str:
    """The model whose name says so many parameters; what it has is counted (c3.13)."""
    return min(LOHAN_MODELS, key=lambda size: abs(float(size.rstrip("b")) * 1e9 - billions))


# --- LoHan ------------------------------------------------------------------------------------------------------------


def fits_gpu(c: TransformerCounts, gpu_gib: float) -> bool:
    """Whether LoHan's copies of a block and one block's backward fit the GPU."""
    return StreamedMemory().needs(c).device_bytes <= gib(gpu_gib)


def largest_batch(model: str, gpu_gib: float) -> int:
    """The largest multiple of 8 that fits; 0 for none."""
    return max((batch for batch in BATCHES if fits_gpu(counts(model, batch), gpu_gib)), default=0)


def host_bytes_per_block_parameter(e: Evidence) -> float:
    """Main memory that LoHan's states in flight take, per parameter of one block.

    Table V: with inter-block activations in 128 GB, 70B trains at batch 16 but not at 24: the middle. Where Table V is
    judged: 412B, which only an A100 holds, needs 384 GB.
    """
    if e.judged == "L-TB-05":
        return gib(e.of("F-ME-06", "crossover_GB")) / named("gpt3-412b").block_parameters
    batch = e.of("L-TB-05", "128GB", "DS")
    c = counts("gpt3-70b", batch)
    most = gib(128) - c.inter_block_bytes
    least = gib(128) - counts("gpt3-70b", batch + 8).inter_block_bytes
    return (most + least) / 2 / c.dims.block_parameters


def lohan_host(e: Evidence, c: TransformerCounts, *, activations_in_main: bool = False) -> float:
    """Bytes of main memory that a step needs."""
    return StreamedMemory(host_bytes_per_block_parameter(e), activations_in_main).needs(c).host_bytes


def lohan_fits(
    e: Evidence, size: str, *, batch: int = 1, main_gib: float, gpu_gib: float, activations_in_main: bool = False
) -> bool:
    c = counts(f"gpt3-{size}", batch)
    needed = lohan_host(e, c, activations_in_main=activations_in_main)
    return fits_gpu(c, gpu_gib) and needed <= gib(main_gib)


def largest(fits: Callable[[str], bool], sizes: tuple[str, ...] = LOHAN_MODELS) -> str:
    """The largest model that fits; "" for none."""
    return next((size for size in reversed(sizes) if fits(size)), "")


# --- ZeRO-Infinity ----------------------------------------------------------------------------------------------------


GPUS = 4
"""Of the multi-GPU server (L-HW-03)."""


def zero_infinity_host(e: Evidence) -> tuple[float, float]:
    """(bytes that each process needs, bytes per parameter): the centroid of what all other claims allow.

    A model needs fixed + P * per_parameter. Each claim of what trains and what does not is a half-plane; the centroid is
    taken over a grid within [0, 768 GB] and [0, 16], the size of all states.
    """
    fixed, each = np.meshgrid(np.linspace(0, gib(768), 1000), np.linspace(0, 16, 1000))

    def needs(size: str) -> np.ndarray:
        return fixed + parameters(size) * each

    allowed = np.ones_like(fixed, dtype=bool)
    if e.judged != "F-ME-06":
        allowed &= needs("13b") > gib(e.of("F-ME-06", "zero_inf_fails_13B_at_GB"))
    if e.judged != "F-ME-07":
        memory = e.of("F-ME-07", "65B_needs_GB")
        # The papers' memory sizes are multiples of 128 GB.
        allowed &= (needs("65b") <= gib(memory)) & (needs("65b") > gib(memory - 128)) & (needs("135b") > gib(memory))
    if e.judged != "L-ME-12":
        largest_there = e.of("L-ME-12", "max_params") / e.of("L-ME-12", "ratio")
        allowed &= needs(nearest(largest_there)) <= gib(768)
    if e.judged != "L-ME-24":
        single, multi = (nearest(e.of("L-ME-24", key)) for key in ("single", "multi"))
        allowed &= (needs(single) <= gib(768)) & (needs(multi) <= gib(768) - (GPUS - 1) * fixed)
    if e.judged != "L-ME-09":
        assert e.of("L-ME-09", "fails") == "175B"
        allowed &= needs("175b") > gib(768)
    if e.judged != "L-ES-05":
        estimate = e.of("L-ES-05", "main_memory_TB") * 1e12
        allowed &= abs(needs("175b") / estimate - 1) <= MOST_ERROR  # "about"
    if not allowed.any():
        raise ValueError(f"no memory model of ZeRO-Infinity agrees with the claims other than {e.judged}")
    return float(fixed[allowed].mean()), float(each[allowed].mean())


def zero_infinity_needs(e: Evidence, size: str, processes: int = 1) -> float:
    """Bytes of main memory; states are shared among processes, what each has besides is not."""
    memory = ZeroInfinityMemory(*zero_infinity_host(e), processes)
    return memory.needs(counts(f"gpt3-{size}", 1)).host_bytes
