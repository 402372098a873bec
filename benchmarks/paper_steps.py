"""paper_steps: a training step of each system on the papers' server, by the cost models."""

from __future__ import annotations

from dataclasses import dataclass

import paper_constants as constants
from paper_constants import Gpu, a100, rtx4090
from paper_evidence import Evidence

from lohan_fx.cost_models import gemini, lohan, zero_infinity, zero_offload
from lohan_fx.models.transformer_counts import TransformerCounts


@dataclass(frozen=True)
class LohanStep:
    """LoHan's decision and what it leads to. ``case``: of LoHan sec. IV-D."""

    seconds: float
    swapped: float
    recompute_flops: float
    case: int
    tflops: float


def lohan_step(
    e: Evidence,
    c: TransformerCounts,
    thp: float,
    *,
    ssd: float = 0.0,
    host: float = 0.0,
    whole_layers: bool = True,
) -> LohanStep:
    """Algorithm 1 corrected (mechanisms B4) over the blocks' layers, accounting B of c3.5, all swaps to the drives
    beyond ``host`` bytes. Recomputation includes the head, as in the paper (c3.6)."""
    values = _lohan_values(e, c, thp, ssd or constants.drives(e), host)
    swapped, flops = c.inter_block_bytes, c.forward_flops
    best = at_least = _lohan_seconds(values, swapped, flops)
    # Pieces of layers, as in the paper's convexity proof, where a constant is sought; else whole tensors.
    pieces = c.dims.layers if whole_layers else 50 * c.dims.layers
    for layer in sorted(c.block_layers, key=lambda layer: -layer.benefit):
        share = c.dims.layers / pieces
        for _ in range(pieces):
            seconds = _lohan_seconds(values, swapped + layer.bytes * share, flops - layer.flops * share)
            if seconds >= best - 1e-9:
                return _found(c, best, swapped, flops, 1 if best == at_least else 3)
            best, swapped, flops = seconds, swapped + layer.bytes * share, flops - layer.flops * share
    return _found(c, best, swapped, flops, 2)


def _lohan_values(e: Evidence, c: TransformerCounts, thp: float, ssd: float, host: float) -> dict[str, float]:
    return {
        "FLOP_f": c.forward_flops,
        "THP_G": thp,
        "P": float(c.dims.parameters),
        "MEM_avail": host,
        "BW_G": constants.link(e),
        "BW_S2M": ssd,
        "BW_M2S": ssd,
        "ADAM": constants.adam(e),
        "BW_M": constants.host_memory(e),
    }


def _lohan_seconds(values: dict[str, float], swapped: float, recomputed: float) -> float:
    return lohan.OF_A_MODEL.seconds({**values, "A_G2M": swapped, "FLOP_r": recomputed})


def _found(c: TransformerCounts, seconds: float, swapped: float, flops: float, case: int) -> LohanStep:
    return LohanStep(seconds, swapped, flops, case, 3 * c.forward_flops / seconds / 1e12)


def fixed_policy_seconds(
    e: Evidence, c: TransformerCounts, thp: float, *, swapped: float, recompute: float, host: float
) -> float:
    """A step of LoHan's runtime with another system's activations (mechanisms a2)."""
    return _lohan_seconds(_lohan_values(e, c, thp, constants.drives(e), host), swapped, recompute)


# --- the baselines ----------------------------------------------------------------------------------------------------


def _baseline_values(e: Evidence, c: TransformerCounts, gpu: Gpu) -> dict[str, float]:
    return {
        "FLOP_f": c.forward_flops,
        "FLOP_r": c.forward_flops - c.head_flops,
        "THP_G": gpu.reached,
        "P": float(c.dims.parameters),
        "A_inter": c.inter_block_bytes,
        "BW_G": constants.link(e),
    }


def gpu_seconds(c: TransformerCounts, gpu: Gpu) -> float:
    """What the GPU computes in a step that recomputes all blocks."""
    return (4 * c.forward_flops - c.head_flops) / gpu.reached


def zero_infinity_values(e: Evidence, c: TransformerCounts, gpu: Gpu) -> dict[str, float]:
    return {
        **_baseline_values(e, c, gpu),
        "BW_SSD": constants.zero_ssd(e),
        "BW_PAGE": constants.pageable(e),
        "ADAM": constants.adam(e),
        "BW_OPT": _zero_optimizer_rate(e),
    }


def _zero_optimizer_rate(e: Evidence) -> float:
    """What the drives give in ZeRO-Infinity's optimizer: from the GPU's 28 % on the A100, else its 36 % on the 4090.

    Claims of LoHan are predicted from Fuyou's measurement and the other way round.
    """
    from_a100 = not e.judged.startswith("F-")
    gpu, claim, key = (a100(e), "F-ME-08", "b32") if from_a100 else (rtx4090(e), "L-ME-01", "gpu_busy")
    c = constants.thirteen()
    values = {
        **_baseline_values(e, c, gpu),
        "BW_SSD": constants.zero_ssd(e),
        "BW_PAGE": constants.pageable(e),
        "ADAM": constants.adam(e),
        "BW_OPT": float("inf"),
    }
    rest = gpu_seconds(c, gpu) / e.of(claim, key) - zero_infinity.MODEL.seconds(values)
    return float(28 * c.dims.parameters / rest)


def zero_infinity_seconds(e: Evidence, c: TransformerCounts, gpu: Gpu) -> float:
    return zero_infinity.MODEL.seconds(zero_infinity_values(e, c, gpu))


def zero_offload_seconds(e: Evidence, c: TransformerCounts, gpu: Gpu) -> float:
    """Its CPU's rate: from the other paper's ratio on the RTX 4090, at batch 32."""
    source = ("L-ME-13", "zero_offload") if e.judged.startswith("F-") else ("F-ME-01", "x_zero_offload")
    own, on = constants.thirteen(), rtx4090(e)
    base = {**_baseline_values(e, own, on), "BW_PAGE": constants.pageable(e)}
    streamed = zero_offload.MEASURED.seconds({**base, "ADAM": float("inf")})
    rest = e.of(*source) * lohan_step(e, own, on.peak).seconds - streamed
    values = {**_baseline_values(e, c, gpu), "BW_PAGE": constants.pageable(e)}
    return zero_offload.MEASURED.seconds({**values, "ADAM": own.dims.parameters / rest})


def gemini_seconds(e: Evidence, c: TransformerCounts, gpu: Gpu) -> float:
    """What the drives give it: from the ratio on the RTX 4090, else from that on the RTX 3090."""
    on = constants.rtx3090(e) if e.judged == "L-ME-13" else rtx4090(e)
    own = constants.thirteen()
    base = {**_baseline_values(e, own, on), "ADAM": constants.adam(e), "BW_OPT": float("inf")}
    ratio = e.of("L-ME-14" if e.judged == "L-ME-13" else "L-ME-13", "colossal")
    rest = ratio * lohan_step(e, own, on.peak).seconds - gemini.MODEL.seconds(base)
    rate = 24 * own.dims.parameters / rest
    return gemini.MODEL.seconds({**_baseline_values(e, c, gpu), "ADAM": constants.adam(e), "BW_OPT": rate})
