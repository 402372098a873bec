"""paper_lohan: rows for LoHan's sizes, seconds and shares (Ratel's are the same numbers)."""

from __future__ import annotations

import paper_constants as constants
from paper_constants import counts, gib, reached_4090, rtx4090, thirteen
from paper_evidence import Evidence, Number, Row, equal, holds, inside
from paper_steps import gemini_seconds, gpu_seconds, lohan_step, zero_infinity_seconds, zero_infinity_values

from lohan_fx.cost_models import g10, zero_infinity
from lohan_fx.forecasting.system_memory import IN_GPU_BYTES
from lohan_fx.models.model_presets import named


def language_models(e: Evidence) -> list[Number]:
    return [
        equal(f"{size} parameters, 1e9", float(size.rstrip("B")), named(f"gpt3-{size.lower()}").parameters / 1e9)
        for size in e.paper()
    ]


def diffusion_models(e: Evidence) -> list[Number]:
    names = {"0.90B": "dit-0.9b"}
    rows = []
    for size in e.paper():
        if size != "image":
            dims = named(names.get(size, f"dit-{size.lower()}"))
            rows.append(equal(f"DiT {size} parameters, 1e9", float(size.rstrip("B")), dims.parameters / 1e9))
    return rows


def states_bytes(e: Evidence, *tensors: str) -> float:
    """Bytes per parameter of these tensors (Table II)."""
    return float(sum(e.of("L-TB-02", tensor, "bytes_per_param") for tensor in tensors))


def _hundred_billion_bytes(e: Evidence) -> float:
    """States and, at batch 32, activations of a 100B model, between those of 70B and 135B."""
    small, large = counts("gpt3-70b", 32), counts("gpt3-135b", 32)
    low, high = small.dims.parameters, large.dims.parameters
    activations = small.all_bytes + (large.all_bytes - small.all_bytes) * (100e9 - low) / (high - low)
    e.given("L-ME-04 (batch 32)")
    return states_bytes(e, "P32", "OS32", "G16", "P16") * 100e9 + activations


def hundred_billion(e: Evidence) -> list[Number]:
    return [equal("TB at batch 32", e.paper("bytes_TB"), _hundred_billion_bytes(e) / 1e12)]


def gpus_for_hundred_billion(e: Evidence) -> list[Number]:
    e.given("data sheet A100 (80 GB)")
    return [equal("A100-80G", e.paper("gpus"), e.of("L-ES-01", "bytes_TB") * 1e12 / 80e9)]


def gpu_memory(e: Evidence) -> list[Number]:
    total = states_bytes(e, "P32", "OS32", "P16") * named("gpt3-175b").parameters
    return [equal("TB of P32, OS32 and P16", e.paper("bytes_TB"), total / 1e12)]


def activations(e: Evidence) -> list[Number]:
    c = thirteen()
    inter = c.inter_block_bytes / gib(1)
    return [
        equal("inter-block, GiB", e.paper("inter_GB"), inter),
        equal("intra-block, GiB", e.paper("intra_GB"), c.all_bytes / gib(1) - inter),
        equal("inter-block share", e.paper("inter_share"), inter / (c.all_bytes / gib(1))),
    ]


def all_activations(e: Evidence) -> list[Number]:
    return [equal("all, GiB", e.paper("all_GB"), thirteen().all_bytes / gib(1))]


# --- ZeRO-Infinity and Colossal-AI ------------------------------------------------------------------------------------


def zero_infinity_busy(e: Evidence) -> list[Number]:
    c, gpu = thirteen(), rtx4090(e)
    return [equal("GPU busy", e.paper("gpu_busy"), gpu_seconds(c, gpu) / zero_infinity_seconds(e, c, gpu))]


def colossal_busy(e: Evidence) -> list[Number]:
    c, gpu = thirteen(), rtx4090(e)
    return [equal("GPU busy", e.paper("gpu_busy"), gpu_seconds(c, gpu) / gemini_seconds(e, c, gpu))]


def optimizer_share(e: Evidence) -> list[Number]:
    c = thirteen()
    stages = zero_infinity.MODEL.stage_seconds(zero_infinity_values(e, c, rtx4090(e)))
    share = stages["optimizer"] / sum(stages.values())
    return [inside("optimizer's share, 13B at batch 32", e.paper("min"), e.paper("max"), share)]


def _zero_backward(e: Evidence) -> dict[str, float]:
    c = thirteen()
    rates = {"BW_SSD": constants.zero_ssd(e), "BW_PAGE": constants.pageable(e), "BW_OPT": 1.0, "ADAM": 1.0}
    values = {
        "FLOP_f": c.forward_flops,
        "FLOP_r": c.forward_flops - c.head_flops,
        "THP_G": reached_4090(e),
        "P": float(c.dims.parameters),
        "A_inter": c.inter_block_bytes,
        "BW_G": constants.link(e),
        **rates,
    }
    return zero_infinity.MODEL.evaluate(values)["backward"]


def zero_recompute(e: Evidence) -> list[Number]:
    c, lanes = thirteen(), _zero_backward(e)
    recompute, backward = (c.forward_flops - c.head_flops) / reached_4090(e), sum(lanes.values())
    return [
        equal("recomputing, s", e.paper("recompute_s"), recompute),
        equal("share of backward", e.paper("share_of_bwd"), recompute / backward),
        equal("SSD link's share of backward (c3.14)", e.paper("pcie_util"), lanes["ssd"] / backward),
    ]


def zero_backward(e: Evidence) -> list[Number]:
    lanes, p = _zero_backward(e), thirteen().dims.parameters
    return [
        equal("GPU to main, s", e.paper("pcie_g2m_s"), 2 * p / constants.pageable(e)),
        equal("SSD, s", e.paper("pcie_ssd_s"), lanes["ssd"]),
        equal("GPU, s", e.paper("gpu_s"), lanes["compute or gradients d2h"]),
    ]


def backward_without_recompute(e: Evidence) -> list[Number]:
    """The link's part is read as activations out and back and gradients out, of a whole step; of the backward alone it
    would be 2.46 (c3.14)."""
    c = thirteen()
    backward = 2 * c.forward_flops / reached_4090(e)
    page = constants.pageable(e)
    moved = 2 * c.inter_block_bytes + 2 * c.dims.parameters
    return [
        equal("over SSD", e.paper("vs_ssd"), backward / _zero_backward(e)["ssd"]),
        equal("over activations out and back and gradients", e.paper("vs_gpu_cpu"), backward / (moved / page)),
    ]


# --- G10 --------------------------------------------------------------------------------------------------------------


def _g10_values(e: Evidence) -> dict[str, float]:
    c, rate = thirteen(), constants.drives(e)
    return {
        "FLOP_f": c.forward_flops,
        "THP_G": reached_4090(e),
        "P": float(c.dims.parameters),
        "A_all": c.all_bytes,
        "BW_G": constants.link(e),
        "BW_S2M": rate,
        "BW_M2S": rate,
        "BW_GPU_MEM": constants.gpu_memory_rate(e),
    }


def g10_optimizer(e: Evidence) -> list[Number]:
    values = _g10_values(e)
    stages, lanes = g10.SEPARATE.stage_seconds(values), g10.SEPARATE.evaluate(values)["optimizer"]
    moved = states_bytes(e, "P32", "OS32", "P16") * values["P"]
    return [
        equal("optimizer on drives, s", e.paper("pcie_s"), lanes["ssd"]),
        equal("its share of the step", e.paper("share"), stages["optimizer"] / sum(stages.values())),
        equal("GB per direction", e.paper("GB_per_direction"), moved / 1e9),
        equal("optimizer on GPU, s", e.paper("gpu_s"), lanes["compute"]),
    ]


def g10_forward(e: Evidence) -> list[Number]:
    lanes = g10.SEPARATE.evaluate(_g10_values(e))["forward"]
    return [
        equal("offload, s", e.paper("offload_s"), lanes["d2h"]),
        equal("GPU, s", e.paper("gpu_s"), lanes["compute"]),
    ]


def g10_overlapped(e: Evidence) -> list[Number]:
    values = _g10_values(e)
    lanes, stages = g10.OVERLAPPED.evaluate(values), g10.OVERLAPPED.stage_seconds(values)
    return [
        equal("GPU share of forward", e.paper("gpu_share_fwd"), lanes["forward"]["compute"] / stages["forward"]),
        equal("GPU share of backward", e.paper("gpu_share_bwd_opt"), lanes["backward"]["compute"] / stages["backward"]),
        equal("link share of forward", e.paper("pcie_share"), lanes["forward"]["d2h"] / stages["forward"]),
        equal("link share of backward", e.paper("pcie_share"), lanes["backward"]["h2d"] / stages["backward"]),
    ]


# --- LoHan's decision -------------------------------------------------------------------------------------------------


def swapped(e: Evidence) -> list[Number]:
    c = thirteen()
    step = lohan_step(e, c, rtx4090(e).peak)
    return [
        equal("swapped, GB", e.paper("swapped_GB"), step.swapped / 1e9),
        equal("recomputed, of backward", e.paper("extra_gpu_bwd"), step.recompute_flops / (2 * c.forward_flops)),
    ]


def cases(e: Evidence) -> list[Number]:
    """Whose seconds the search did not leave: case 1 below A_interBlock, 3 inside."""
    rate = rtx4090(e).peak
    return [
        equal(f"case at batch {batch}", case, lohan_step(e, counts("gpt3-13b", int(batch)), rate).case)
        for batch, case in e.paper().items()
    ]


def flashneuron(e: Evidence) -> list[Number]:
    e.given("L-HW-02 (24 GB)")
    most = gib(24) / IN_GPU_BYTES
    return [
        equal("largest model, 1e9", e.paper("max_params") / 1e9, most / 1e9),
        holds("6B does not fit", named("gpt3-6b").parameters > most),
    ]


ROWS = {
    "L-MC-01": Row(language_models),
    "F-MC-01": Row(language_models),
    "L-MC-03": Row(
        diffusion_models,
        "DiT-XL/2's blocks (18h^2 each) at the printed depths and widths make 8.5B and 44.5B, not 10B and 40B; those are "
        "the GPTs' 6B, 13B and 30B shapes",
    ),
    "L-ES-01": Row(hundred_billion),
    "L-ES-02": Row(gpus_for_hundred_billion, left_out="the price is an input"),
    "L-ES-03": Row(gpu_memory),
    "L-ES-04": Row(flashneuron),
    "L-ME-01": Row(zero_infinity_busy),
    "L-ME-02": Row(
        colossal_busy,
        "8.02 times LoHan's step at 12 % busy leaves the GPU 18.6 s, but ZeRO-Infinity's 36 % of 65 s are the 23.6 s that "
        "the same recomputing step takes: the paper's two ratios disagree",
    ),
    "L-ME-03": Row(optimizer_share),
    "L-ME-04": Row(activations),
    "L-ME-05": Row(all_activations),
    "L-ME-06": Row(zero_recompute),
    "L-ME-07": Row(zero_backward),
    "L-ME-08": Row(backward_without_recompute),
    "L-ES-06": Row(
        g10_optimizer,
        "0.1 s on the GPU is less than its memory allows: Adam moves 28 bytes per parameter, 360 GB, at 1 TB/s at most",
    ),
    "L-ES-07": Row(g10_forward),
    "L-ES-08": Row(g10_overlapped),
    "L-ME-10": Row(swapped),
    "L-ME-20": Row(cases),
}
