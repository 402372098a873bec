"""paper_sizes: rows for what trains and what does not, and with how much main memory."""

from __future__ import annotations

import functools

from paper_constants import gib
from paper_evidence import Evidence, Number, Row, equal, holds, inside
from paper_memory import (
    GPUS,
    LOHAN_MODELS,
    host_bytes_per_block_parameter,
    largest,
    largest_batch,
    lohan_fits,
    parameters,
    zero_infinity_needs,
)

from lohan_fx.forecasting.system_memory import GEMINI_HOST_BYTES, IN_GPU_BYTES
from lohan_fx.models.model_presets import named


def _zero_infinity_largest(e: Evidence, main_gib: float, processes: int = 1) -> str:
    return largest(lambda size: zero_infinity_needs(e, size, processes) <= gib(main_gib))


def _size(billions: float) -> str:
    return f"{billions / 1e9:g}b"


def first_to_train(e: Evidence) -> list[Number]:
    size, main = _size(e.paper("params")), e.paper("main_memory_GB")
    return [
        holds(
            f"{size} trains on an {gpu} with {main} GB",
            lohan_fits(e, size, main_gib=main, gpu_gib=e.of("L-HW-02", f"{gpu.replace(' ', '')}_GB")),
        )
        for gpu in e.paper("gpus")
    ]


def largest_lohan(e: Evidence) -> list[Number]:
    """What stops 412B is the GPU: four copies of one block fill it."""
    found = largest(lambda size: lohan_fits(e, size, main_gib=768, gpu_gib=24))
    others = _zero_infinity_largest(e, 768)
    return [
        equal("largest model, 1e9", e.paper("max_params") / 1e9, parameters(found) / 1e9),
        holds(f"it is {_size(e.paper('max_params'))}, not smaller or larger", found == _size(e.paper("max_params"))),
        equal(f"over ZeRO-Infinity's {others}", e.paper("ratio"), parameters(found) / parameters(others)),
    ]


def activations_on_drives(e: Evidence) -> list[Number]:
    """At the largest batch with which LoHan's largest model at 128 GB fits the GPU."""

    def found(batch: int, main_gib: float, in_main: bool) -> str:
        return largest(
            lambda size: lohan_fits(e, size, batch=batch, main_gib=main_gib, gpu_gib=24, activations_in_main=in_main)
        )

    batch = largest_batch(f"gpt3-{found(1, 128, False)}", 24)
    ours, theirs = found(batch, 128, False), found(batch, 128, True)
    least, most = e.paper("ratio_128GB")
    same = e.paper("equal_at")
    equal_sizes = {found(same["batch"], same["main_memory_GB"], in_main) for in_main in (False, True)}
    return [
        inside(f"{ours} over {theirs}, 128 GB, batch {batch}", least, most, parameters(ours) / parameters(theirs)),
        holds(f"equal at 256 GB and batch 60 ({', '.join(equal_sizes)})", len(equal_sizes) == 1),
    ]


def batches(e: Evidence) -> list[Number]:
    """70B: the largest multiple of 8 up to 32, which is what the table uses where memory is ample."""
    rows = []
    for memory, used in ((m, e.paper(m)) for m in ("128GB", "256GB", "512GB")):
        main = float(memory.removesuffix("GB"))
        for name in ("DS", "Cap", "G10", "Optimized"):
            fitting = [
                batch
                for batch in (8, 16, 24, 32)
                if lohan_fits(
                    e, "70b", batch=batch, main_gib=main, gpu_gib=24, activations_in_main=name in ("DS", "Cap")
                )
            ]
            rows.append(equal(f"{name} at {memory}", used[name], max(fitting, default=0)))
    return rows


# --- peers ------------------------------------------------------------------------------------------------------------


def estimate_175b(e: Evidence) -> list[Number]:
    return [equal("main memory for 175B, TB", e.paper("main_memory_TB"), zero_infinity_needs(e, "175b") / 1e12)]


def fail_175b(e: Evidence) -> list[Number]:
    e.given("F-BL-01 (what Gemini keeps in main memory)")
    zero, colossal = zero_infinity_needs(e, "175b"), GEMINI_HOST_BYTES * parameters("175b")
    return [
        holds(f"ZeRO-Infinity needs {zero / gib(1):.0f} GiB > 768", zero > gib(768)),
        holds(f"Colossal-AI needs {colossal / gib(1):.0f} GiB > 768", colossal > gib(768)),
    ]


def largest_zero_infinity(e: Evidence) -> list[Number]:
    """Each GPU's process needs its own buffers; states are shared among the processes."""
    found = {processes: _zero_infinity_largest(e, 768, processes) for processes in (1, GPUS)}
    return [
        holds(f"one GPU: 135B is the largest (ours {found[1]})", found[1] == _size(e.paper("single"))),
        holds(f"four GPUs: 70B is the largest (ours {found[GPUS]})", found[GPUS] == _size(e.paper("multi"))),
    ]


def megatron(e: Evidence) -> list[Number]:
    """16 bytes per parameter over eight GPUs; the activations that come on top make it harder, not easier."""
    found = largest(lambda size: parameters(size) * IN_GPU_BYTES <= 8 * gib(80))
    return [equal(f"largest model ({found}), 1e9", e.paper("max_params") / 1e9, parameters(found) / 1e9)]


def _fits(e: Evidence, gpu_gib: int, size: str) -> bool:
    return lohan_fits(e, size, main_gib=512, gpu_gib=gpu_gib)


def zero_infinity_small(e: Evidence) -> list[Number]:
    memory = e.paper("zero_inf_fails_13B_at_GB")
    needed = zero_infinity_needs(e, "13b") / gib(1)
    largest_model = named("gpt3-412b")
    crossover = host_bytes_per_block_parameter(e) * largest_model.block_parameters / gib(1)
    sizes = {gpu: largest(functools.partial(_fits, e, gpu), (*LOHAN_MODELS, "805b")) for gpu in (24, 80)}
    return [
        holds(f"ZeRO-Infinity fails 13B at {memory} GB (needs {needed:.0f})", needed > memory),
        holds(
            f"Fuyou's largest at 512 GB is {sizes[80]} on the A100, {sizes[24]} on the 4090",
            parameters(sizes[80]) > parameters(sizes[24]),
        ),
        equal("main memory from which the A100 trains more, GB", e.paper("crossover_GB"), crossover),
    ]


def zero_infinity_65b(e: Evidence) -> list[Number]:
    """Main memory comes in multiples of 128 GB."""
    needed = next(m for m in range(128, 1025, 128) if zero_infinity_needs(e, "65b") <= gib(m))
    largest_there = _zero_infinity_largest(e, needed)
    return [
        equal("main memory for 65B, GB", e.paper("65B_needs_GB"), needed),
        holds("nothing larger there", parameters(largest_there) == parameters("65b")),
    ]


ROWS = {
    "L-ES-05": Row(
        estimate_175b,
        "an estimate; what trains and does not (F-ME-06, F-ME-07, L-ME-09, L-ME-12, L-ME-24) allows less: 135B in 768 GB "
        "is at most 6.1 bytes per parameter, and buffers that do not grow with the model are in it",
    ),
    "L-ME-09": Row(fail_175b),
    "L-ME-11": Row(first_to_train),
    "L-ME-12": Row(largest_lohan),
    "L-ME-18": Row(activations_on_drives),
    "L-TB-05": Row(
        batches,
        "no fixed plus linear need of main memory explains these batches (c3.19): from 128 to 256 GB they grow by 8, which "
        "is 11 GB of inter-block activations",
        left_out="+CM is a solver's failure",
    ),
    "L-ME-24": Row(
        largest_zero_infinity,
        "with four processes 70B comes out a few per cent above the limit: the other claims leave a wide range for what a "
        "process needs besides its share of the states",
    ),
    "L-ME-27": Row(megatron),
    "F-ME-06": Row(zero_infinity_small),
    "F-ME-07": Row(zero_infinity_65b),
}
