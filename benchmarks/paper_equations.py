"""paper_equations: rows for the printed equations and pipelines: the cost models against the arithmetic as printed."""

from __future__ import annotations

from dataclasses import replace

import paper_constants as constants
from paper_constants import rtx4090, thirteen
from paper_events import BlockSeconds, backward_tasks, chain_tasks, play
from paper_evidence import Evidence, Number, Row, equal, holds
from paper_steps import lohan_step, zero_infinity_values

from lohan_fx.cost_models import fuyou, lohan, zero_infinity

MAIN_BYTES = 10e9
"""Main memory for activations in the equations' rows; any number tests them."""


def lohan_values(e: Evidence) -> dict[str, float]:
    """13B at batch 32, with what LoHan swaps there."""
    c, rate = thirteen(), constants.drives(e)
    step = lohan_step(e, c, rtx4090(e).peak)
    return {
        "FLOP_f": c.forward_flops,
        "FLOP_r": step.recompute_flops,
        "THP_G": rtx4090(e).peak,
        "P": float(c.dims.parameters),
        "A_G2M": step.swapped,
        "MEM_avail": MAIN_BYTES,
        "BW_G": constants.link(e),
        "BW_S2M": rate,
        "BW_M2S": rate,
    }


def _forward_as_printed(v: dict[str, float], to_ssd: float) -> float:
    return max(
        v["FLOP_f"] / v["THP_G"],
        v["A_G2M"] / v["BW_G"],
        2 * v["P"] / v["BW_G"],
        2 * v["P"] / v["BW_S2M"] + to_ssd / v["BW_M2S"],
    )


def lohan_forward(e: Evidence) -> list[Number]:
    """Eq. 2 and 4, at points where each of the terms binds."""
    rows = []
    for change in (
        {},
        {"FLOP_f": 0.0},
        {"FLOP_f": 0.0, "BW_S2M": 1e15, "BW_M2S": 1e15},
        {"A_G2M": MAIN_BYTES, "FLOP_f": 0.0},
    ):
        v = {**lohan_values(e), **change}
        model = lohan.LITERAL
        paper = _forward_as_printed(v, v["A_G2M"] - v["MEM_avail"])
        rows.append(equal(f"T_f, {model.binding(v)['forward']} binds", paper, model.stage_seconds(v)["forward"]))
    return rows


def lohan_overflow(e: Evidence) -> list[Number]:
    v = lohan_values(e)
    ssd_s = lohan.LITERAL.evaluate(v)["forward"]["ssd"]
    ours = (ssd_s - 2 * v["P"] / v["BW_S2M"]) * v["BW_M2S"]
    return [equal("alpha A_G2M, bytes", v["A_G2M"] - v["MEM_avail"], ours)]


def lohan_backward(e: Evidence) -> list[Number]:
    v = lohan_values(e)
    p, to_ssd = v["P"], v["A_G2M"] - v["MEM_avail"]
    paper = {
        "compute": (2 * v["FLOP_f"] + v["FLOP_r"]) / v["THP_G"],
        "d2h": 2 * p / v["BW_G"],
        "h2d": (2 * p + v["A_G2M"]) / v["BW_G"],
        "ssd": (14 * p + to_ssd) / v["BW_S2M"] + 14 * p / v["BW_M2S"],
    }
    ours = lohan.LITERAL.evaluate(v)["backward"]
    return [equal(f"T_b {lane}, s", paper[lane], ours[lane]) for lane in paper]


def adam_hides(e: Evidence) -> list[Number]:
    values = {**lohan_values(e), "ADAM": constants.adam(e), "BW_M": constants.host_memory(e)}
    lanes = lohan.OF_A_MODEL.evaluate(values)["backward"]
    return [holds(f"CPU Adam ({lanes['cpu']:.1f} s) < SSD ({lanes['ssd']:.1f} s)", lanes["cpu"] < lanes["ssd"])]


# --- Fuyou ------------------------------------------------------------------------------------------------------------


def fuyou_values(e: Evidence) -> dict[str, float]:
    v = lohan_values(e)
    count = 12
    e.given("L-HW-01 (12 drives)")
    return {
        "T_f_comp": v["FLOP_f"] / v["THP_G"],
        "RC": v["FLOP_r"] / v["THP_G"],
        "T_o_comp": v["P"] / constants.adam(e),
        "p": v["P"],
        "D_f": v["A_G2M"],
        "BW_GPU": v["BW_G"],
        "BW_S2C": v["BW_S2M"] / count,
        "BW_C2S": v["BW_M2S"] / count,
        "N": float(count),
    }


def _fuyou_backward_as_printed(v: dict[str, float]) -> dict[str, float]:
    """Eq. 6 to 8."""
    return {
        "GPU": max(2 * v["p"] / v["BW_GPU"], (2 * v["p"] + v["D_f"]) / v["BW_GPU"]),
        "SSD": (12 * v["p"] + 2 * v["p"] + v["D_f"]) / (v["BW_S2C"] * v["N"])
        + (12 * v["p"] + 2 * v["p"]) / (v["BW_C2S"] * v["N"]),
        "comp": 2 * v["T_f_comp"] + v["RC"],
    }


def fuyou_forward(e: Evidence) -> list[Number]:
    v = fuyou_values(e)
    ssd = 2 * v["p"] / (v["BW_S2C"] * v["N"]) + v["D_f"] / (v["BW_C2S"] * v["N"])
    paper = max(v["T_f_comp"], max(2 * v["p"], v["D_f"]) / v["BW_GPU"], ssd)
    lanes = fuyou.OVERLAPPED.evaluate(v)["forward"]
    return [
        equal("T_f, s", paper, max(lanes.values())),
        equal("T_f^SSD, s", ssd, lanes["ssd"]),
        equal("T_f^GPU, s", max(2 * v["p"], v["D_f"]) / v["BW_GPU"], max(lanes["h2d"], lanes["d2h"])),
    ]


def fuyou_backward(e: Evidence) -> list[Number]:
    v = fuyou_values(e)
    paper = max(v["T_o_comp"], *_fuyou_backward_as_printed(v).values())
    return [equal("T_{b+o}, s", paper, fuyou.OVERLAPPED.stage_seconds(v)["backward"])]


def fuyou_traffic(e: Evidence) -> list[Number]:
    v = fuyou_values(e)
    paper, lanes = _fuyou_backward_as_printed(v), fuyou.OVERLAPPED.evaluate(v)["backward"]
    return [
        equal("T^GPU, s", paper["GPU"], max(lanes["h2d"], lanes["d2h"])),
        equal("T^SSD, s", paper["SSD"], lanes["ssd"]),
    ]


def fuyou_compute(e: Evidence) -> list[Number]:
    v = fuyou_values(e)
    c, rate = thirteen(), rtx4090(e).peak
    layers = [fuyou.SwapLayer(x.bytes, x.flops / rate) for x in c.block_layers]
    start = {**v, "D_f": c.inter_block_bytes, "RC": c.forward_flops / rate}
    more = fuyou.schedule_swaps(start, layers)[0]
    return [
        equal(
            "T_b^comp, s", _fuyou_backward_as_printed(v)["comp"], fuyou.OVERLAPPED.evaluate(v)["backward"]["compute"]
        ),
        holds("swapping more leaves less to recompute", more > start["D_f"]),
    ]


def fuyou_bound(e: Evidence) -> list[Number]:
    c = thirteen()
    v = {**fuyou_values(e), "D_f": c.inter_block_bytes, "RC": c.forward_flops / rtx4090(e).peak}
    paper = _fuyou_backward_as_printed(v)
    slack = paper["comp"] - max(paper["GPU"], paper["SSD"])
    most = v["D_f"] + slack * min(v["BW_GPU"], v["BW_C2S"] * v["N"], v["BW_S2C"] * v["N"])
    return [
        equal("T_max, s", slack, fuyou.slack_seconds(v)),
        equal("D_max, bytes", most, fuyou.most_swapped_bytes(v)),
    ]


def overlap_saves(e: Evidence) -> list[Number]:
    v = fuyou_values(e)
    apart, together = (
        sum(lanes["ssd"] for lanes in model.evaluate(v).values()) for model in (fuyou.NOT_OVERLAPPED, fuyou.OVERLAPPED)
    )
    saved = (apart - together) * v["BW_S2C"] * v["N"] / v["p"]
    settings = [{**v, "RC": v["RC"] * k, "N": v["N"] * n} for k in (0.0, 1.0, 3.0) for n in (0.1, 1.0, 10.0)]
    never = all(fuyou.OVERLAPPED.seconds(s) <= fuyou.NOT_OVERLAPPED.seconds(s) * (1 + 1e-12) for s in settings)
    return [
        equal("SSD bytes saved per parameter", e.paper("ssd_bytes_saved_per_param"), saved),
        holds("overlap is never slower, from 1/10 to 10 times the drives", never),
    ]


# --- pipelines by events ----------------------------------------------------------------------------------------------


def _block_seconds(e: Evidence) -> BlockSeconds:
    """13B, all it swaps on the drives."""
    c, v = thirteen(), lohan_values(e)
    rate, p = v["BW_S2M"], v["P"]
    whole = {
        "fetch": (2 * p + v["A_G2M"]) / rate,
        "load": (2 * p + v["A_G2M"]) / v["BW_G"],
        "backward": (2 * v["FLOP_f"] + v["FLOP_r"]) / v["THP_G"],
        "gradient": 2 * p / v["BW_G"],
        "read": 12 * p / rate,
        "update": p / constants.adam(e),
        "write": 14 * p / rate,
    }
    return BlockSeconds(**{name: seconds / c.dims.layers for name, seconds in whole.items()})


def _bound(e: Evidence) -> float:
    v = {**lohan_values(e), "MEM_avail": 0.0, "ADAM": constants.adam(e), "BW_M": constants.host_memory(e)}
    return lohan.OF_A_MODEL.stage_seconds(v)["backward"]


def naive(e: Evidence) -> list[Number]:
    """With nothing else on the drives the handlers take exactly the sum; it is the chain that binds."""
    blocks = thirteen().dims.layers
    block = replace(_block_seconds(e), fetch=0.0)
    serial = blocks * (block.read + block.update + block.write) + block.load + block.backward + block.gradient
    simulated = max(play(backward_tasks(block, blocks, "naive")).values())
    better = max(play(backward_tasks(block, blocks, "optimized")).values())
    return [
        equal("backward where handlers bind, s", serial, simulated),
        holds("slower than the optimized order", simulated > better),
    ]


def optimized(e: Evidence) -> list[Number]:
    blocks, block = thirteen().dims.layers, _block_seconds(e)
    simulated = max(play(backward_tasks(block, blocks, "optimized")).values())
    slower = max(play(backward_tasks(block, blocks, "naive")).values())
    return [
        equal("backward against the formula's full overlap, s", _bound(e), simulated),
        holds("the naive order is slower", slower > simulated),
    ]


def delayed(e: Evidence) -> list[Number]:
    blocks, block = thirteen().dims.layers, _block_seconds(e)
    simulated = max(play(backward_tasks(block, blocks, "delayed")).values())
    return [equal("backward against the formula's full overlap, s", _bound(e), simulated)]


def subprocess(e: Evidence) -> list[Number]:
    """Adam of a block runs when its gradient has landed, its states prefetched, and its gradient never on the drives."""
    blocks, block = thirteen().dims.layers, _block_seconds(e)
    ends = play(backward_tasks(block, blocks, "delayed"))
    waits = [ends[f"update{i}"] - block.update - ends[f"gradient{i}"] for i in range(blocks)]
    v = fuyou_values(e)
    written = fuyou.OVERLAPPED.derivative("p", {**v, "T_f_comp": 0.0, "RC": 0.0, "T_o_comp": 0.0})
    traffic = written * v["BW_S2C"] * v["N"]
    return [
        holds("no update before its gradient", min(waits) >= -1e-9),
        equal("SSD bytes per parameter and step: 16 read, 14 written", 30.0, traffic),
        equal("T_{b+o} by events, s", _bound(e), max(ends.values())),
    ]


def serial_forward(e: Evidence) -> list[Number]:
    c = thirteen()
    values = zero_infinity_values(e, c, constants.a100(e))
    lanes = zero_infinity.MODEL.evaluate(values)["forward"]
    chain = chain_tasks([(lane, seconds / c.dims.layers) for lane, seconds in lanes.items()], c.dims.layers)
    return [equal("forward as a chain of its four lanes, s", sum(lanes.values()), max(play(chain).values()))]


ROWS = {
    "L-EQ-02": Row(lohan_forward),
    "L-EQ-03": Row(lohan_overflow),
    "L-EQ-04": Row(lohan_forward),
    "L-EQ-05": Row(lohan_backward),
    "L-AL-03": Row(naive),
    "L-AL-04": Row(optimized),
    "L-AL-07": Row(adam_hides),
    "F-EQ-02": Row(fuyou_forward),
    "F-EQ-03": Row(fuyou_backward),
    "F-EQ-04": Row(fuyou_traffic),
    "F-EQ-05": Row(fuyou_compute),
    "F-EQ-06": Row(fuyou_bound),
    "F-ES-01": Row(overlap_saves),
    "F-AL-03": Row(subprocess),
    "F-AL-04": Row(delayed),
    "F-ME-17": Row(serial_forward),
}
